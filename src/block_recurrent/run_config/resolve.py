"""How the configuration of a run is resolved, and what may differ when it is resumed."""

from __future__ import annotations

import dataclasses
import functools
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from block_recurrent.errors import ConfigError
from block_recurrent.io.door import first_line, read_bytes, toml_seal
from block_recurrent.presets import preset, preset_lanes
from block_recurrent.run_config.sections import (
    ENDING_SCHEDULES,
    SECTIONS,
    VERSION,
    EvalConfig,
    OptimizerConfig,
    RunConfig,
    ScheduleConfig,
    TrainConfig,
    check_keys,
)

# Default recipes of the sizes that are not in the paper. The paper's sizes use the paper's recipe, and micro,
# which is for tests, uses it with a shorter warmup. That of tiny and small is for all systems (docs/evidence.md).
_RECIPE: dict[str, dict[str, Any]] = {
    # Attention can be sharp and copies from the start, the state lasts from one block to 16, and planted repeats teach
    # it to remember. Text is rarely read twice.
    "model": {"scale_init": 10.0, "gate_horizon": 16.0, "copy_init": True, "dropout": 0.0, "attention_dropout": 0.0},
    "data": {"repeats": 0.2},
    "train": {"clip": 1.0},
    "optimizer": {"name": "muon", "embedding_rate": 8.0},
    "schedule": {"kind": "cosine"},
}
_BY_SIZE: dict[str, dict[str, dict[str, Any]]] = {
    "micro": {
        "train": {"steps": 1000, "save_every": 250},
        "schedule": {"warmup": 100},
        "eval": {"every": 250, "tokens": 16_384},
    },
    "tiny": {
        "data": {"excerpt": 4096},
        "train": {"steps": 5000, "save_every": 500},
        "eval": {"every": 500, "tokens": 131_072},
    },
    "small": {"data": {"excerpt": 8192}, "train": {"steps": 20_000, "save_every": 500}, "eval": {"every": 500}},
}


def resolve(given: Mapping[str, Any], vocab_size: int) -> RunConfig:
    """The preset of a system and size, with some of its values overridden.

    Args:
        given: `system`, `size`, and for each section (`model`, `train`, ...) the values to override.
        vocab_size: the vocabulary size of the data, including the document mark.
    """
    check_keys(given)
    system, size = given["system"], given["size"]
    if given.get("model", {}).get("vocab_size", vocab_size) != vocab_size:
        raise ConfigError(
            f"model.vocab_size is {given['model']['vocab_size']}, but the data has {vocab_size} pieces, including the "
            "document mark: omit it"
        )
    model = preset(system, size, vocab_size).to_dict()
    lanes = {"train": {"lanes": preset_lanes(system, size)}}
    values = _merge_all({"model": model}, lanes, _recipe(size, model, given), given)
    values["schedule"] = _learning_rates(values) | values.get("schedule", {})
    return RunConfig.from_dict(values)


def default_optimizer(size: str) -> OptimizerConfig:
    """The optimizer of a size's recipe."""
    recipe = _RECIPE if size in ("tiny", "small") else {}
    return OptimizerConfig(**recipe.get("optimizer", {}))


def _recipe(size: str, model: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The recipe of a size that is not in the paper; empty for others."""
    if size not in ("tiny", "small"):
        return _BY_SIZE.get(size, {})
    recipe = _merge_all(_RECIPE, _BY_SIZE[size])
    segment = given.get("model", {}).get("segment", model["segment"])
    recipe["data"]["excerpt"] = -(-recipe["data"]["excerpt"] // segment) * segment  # an excerpt has whole segments
    has_memory = model["recurrent_layers"] or model["memory_layers"]
    if not has_memory or given.get("data", {}).get("excerpt") == 0:
        recipe["data"]["repeats"] = 0.0  # they are planted into excerpts, and are out of reach without a memory
    steps = given.get("train", {}).get("steps", recipe["train"]["steps"])
    if given.get("optimizer", {}).get("name") == "adafactor":  # it has a single rate
        recipe["optimizer"] = {}
    recipe["schedule"]["warmup"] = min(100, max(0, steps) // 10)
    recipe["data"]["repeat_steps"] = max(1, steps // 2)  # the last updates are for text as it is
    return recipe


def _learning_rates(values: Mapping[str, Any]) -> dict[str, Any]:
    """The paper's rate for Adafactor; a tenth of its peak for AdamW, whose steps are not relative to the weights."""
    given = values.get("schedule", {})
    kind = given.get("kind", ScheduleConfig.kind)
    optimizer = values.get("optimizer", {}).get("name", OptimizerConfig.name)
    if kind == "inverse-sqrt":
        return {"learning_rate": 1.0 if optimizer == "adafactor" else 0.1}
    first = {"adafactor": 0.01, "adamw": 0.001}.get(optimizer, 0.006)
    if kind not in ENDING_SCHEDULES:
        return {"learning_rate": first}
    steps = values.get("train", {}).get("steps", TrainConfig.steps)
    return {
        "learning_rate": first,
        "final_learning_rate": given.get("learning_rate", first) / 10,
        "decay_steps": max(1, steps // 5) if kind == "wsd" else steps,
    }


def merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two configurations of plain values, key by key."""
    merged = dict(below)
    for name, value in above.items():
        merged[name] = {**below.get(name, {}), **value} if name in SECTIONS else value
    return merged


def _parse_setting(text: str) -> dict[str, Any]:
    """Parse `section.key=value`; the value is written as in TOML, and a plain word is a string."""
    path, equals, value = text.partition("=")
    section, dot, key = path.strip().partition(".")
    if not (equals and dot and section and key):
        raise ConfigError(f"--set {text}: it must be section.key=value, such as train.lanes=8")
    try:
        parsed = tomllib.loads(f"value = {value}")["value"]
    except (ValueError, RecursionError):  # not TOML, or more of it than is read
        parsed = value.strip()
    return {section: {key: parsed}}


def _merge_all(*configurations: Mapping[str, Any]) -> dict[str, Any]:
    return functools.reduce(merge, configurations, {})


def parse_settings(texts: Iterable[str]) -> dict[str, Any]:
    """Parse the values of `--set`, each `section.key=value`; later ones override earlier ones."""
    return _merge_all(*map(_parse_setting, texts))


def read_toml(path: str | Path, sealed: bool = False) -> dict[str, Any]:
    """A configuration file as plain values. sealed: it belongs to a run, and must not have been edited."""
    try:
        text = read_bytes(Path(path)).decode()
        values = tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"'{path}' can't be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"'{path}' is not a TOML file: {first_line(error)}") from None
    version, seal = values.get("version"), toml_seal(text)
    if version not in (None, VERSION):
        raise ConfigError(f"'{path}' has format version {version!r}; this version supports {VERSION}")
    if sealed and not (seal or (version is None and seal is None)):
        raise ConfigError(
            f"'{path}' was edited after it was written: its hash differs; undo the change, or give an edited copy to "
            "'brt train --config COPY --out ANOTHER-RUN'"
        )
    return values


# Settings that may change when a run is resumed: none of them affects training.
_FREE = {
    "data": {"path", "prefetch", "tokenizer"},
    "train": {
        "steps",
        "device",
        "compile",
        "checkpoint_activations",
        "parallel",
        "keep_gathered",
        "save_every",
        "keep",
        "log_every",
        "init_from",
        "tensorboard",
        "wandb",
        "wandb_offline",
    },
    "eval": {item.name for item in dataclasses.fields(EvalConfig)},
}


def differences(old: RunConfig, new: RunConfig) -> list[str]:
    """The differences that matter, as `section.key old -> new`."""
    before, after = old.to_dict(), new.to_dict()
    return [
        f"{section}.{key} {before[section].get(key, 'unset')} -> {after[section].get(key, 'unset')}"
        for section in SECTIONS
        for key in sorted(before[section].keys() | after[section].keys())
        if key not in _FREE.get(section, ()) and before[section].get(key) != after[section].get(key)
    ]
