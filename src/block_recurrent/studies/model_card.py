"""The card of a run: its data, recipe, training curve and evaluations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from block_recurrent.accounting import cost_of
from block_recurrent.checkpoint import LoadedRun
from block_recurrent.data import Corpus
from block_recurrent.errors import ConfigError, DataError
from block_recurrent.evaluate.measures import Score, bootstrap
from block_recurrent.io.door import check_schema
from block_recurrent.io.output import read_json
from block_recurrent.model.memory import DocumentMemory
from block_recurrent.models.card import RULES
from block_recurrent.run_config import read_toml
from block_recurrent.train.report import METRICS, read_metrics

ABOUT = {"summary": "", "data": "", "licence": "", "command": "", "limits": [], "samples": []}
"""The keys of about.toml, with their defaults."""
CURVE_POINTS = 12
RECIPE = {
    "train": ("lanes", "bptt", "clip", "seed"),
    "data": ("excerpt", "repeats", "repeat_steps"),
    "optimizer": ("name", "beta1", "beta2", "weight_decay", "embedding_rate", "gate_rate", "scale_rate"),
    "schedule": ("kind", "learning_rate", "final_learning_rate", "warmup"),
    "model": ("dropout", "attention_dropout", "scale_init", "gate_horizon", "copy_init"),
}


def make_card(
    name: str, loaded: LoadedRun, run: Path, about: Path | None, data: Path | None, files: Mapping[str, Path]
) -> dict[str, Any]:
    """The whole card. `files`: JSON by kind: memory, cleared and twin of `brt eval`, headroom, needle."""
    said = ABOUT | (_read_about(about) if about else {})
    values = loaded.config.to_dict()
    history = read_metrics(run) if (run / METRICS).is_file() else []
    trained = [line for line in history if line["split"] == "train" and line["step"] <= loaded.checkpoint.step]
    recipe = {
        f"{part}.{key}": values[part][key] for part, keys in RECIPE.items() for key in keys if key in values[part]
    }
    card = {
        "name": name,
        "summary": said["summary"],
        "licence": said["licence"],
        "data": _data(said["data"], Corpus(data) if data else None),
        "model": _model(loaded),
        "training": {
            "command": said["command"],
            "steps": loaded.checkpoint.step,
            "tokens": trained[-1]["tokens_seen"] if trained else 0,
            "recipe": recipe,
            "curve": _curve(history, loaded.checkpoint.step),
        },
        "evaluation": evaluation_of({what: read_json(path) for what, path in files.items()}),
        "samples": said["samples"],
        "limits": said["limits"],
    }
    check_schema(card, RULES, "the card")
    return card


def evaluation_of(found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The evaluations, and their differences on the same documents."""
    try:
        return _evaluation_of(found)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, DataError):
            raise
        what = f"{type(error).__name__}: {error}"
        raise DataError(f"an evaluation can't be used ({what}): give the JSON of 'brt eval RUN --json FILE'") from None


def _evaluation_of(found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    card: dict[str, Any] = {what: _measures(found[what]) for what in ("memory", "cleared", "twin") if what in found}
    for what, gap in (("cleared", "state_saves"), ("twin", "twin_minus_model")):
        if what in found and "memory" in found:
            card[gap] = _gap(found["memory"], found[what], what)
    if "headroom" in found:
        card["headroom"] = {"taken by the memory beyond its reach, bits per token": found["headroom"]["taken"]}
    if "needle" in found:
        card["needle"] = found["needle"]
    return card


def _measures(result: dict[str, Any]) -> dict[str, Any]:
    return {
        "bits_per_byte": result["bits_per_byte"],
        "bits_per_token": result["bits_per_token"],
        "interval_95": result["intervals_95"]["bits_per_byte"],
        "documents": len(result["documents"]),
        "tokens": result["tokens"],
        "split": result["split"],
        "clear_every": result["clear_every"],
    }


def _gap(model: dict[str, Any], other: dict[str, Any], what: str) -> dict[str, Any]:
    """Extra bits of the other, with a paired bootstrap interval."""
    pairs = list(zip(model["documents"], other["documents"], strict=False))
    same = [(a["name"], a["bytes"]) == (b["name"], b["bytes"]) for a, b in pairs]
    if not all(same) or len(model["documents"]) != len(other["documents"]):
        raise DataError(f"--{what} and --memory were evaluated on different documents: evaluate both on the same split")
    fields = ("name", "bits", "tokens", "bytes", "words")
    mine, theirs = (
        [Score(**{key: document[key] for key in fields}) for document in side] for side in zip(*pairs, strict=True)
    )
    gaps = [replace(b, bits=b.bits - a.bits) for a, b in zip(mine, theirs, strict=True)]
    bits = sum(gap.bits for gap in gaps)
    return {
        "bits_per_token": bits / max(1, sum(gap.tokens for gap in gaps)),
        "bits_per_byte": bits / max(1, sum(gap.bytes for gap in gaps)),
        "interval_95": bootstrap(gaps)["bits_per_token"],
        "documents": len(gaps),
    }


def _data(about: str, corpus: Corpus | None) -> dict[str, Any]:
    if corpus is None:
        return {"about": about, "splits": {}, "trained_on": []}
    manifest = corpus.manifest
    splits = {
        split: {key: numbers[key] for key in ("documents", "bytes")} for split, numbers in manifest["splits"].items()
    }
    trained_on = [document.name for document in corpus.documents("train")]
    labels = {
        f"{p['name']}=={p['version']}": p.get("license") or "licence not stated" for p in manifest.get("packages", [])
    }
    if labels:  # a large package is several documents
        heads = dict.fromkeys(name.partition("/")[0] for name in trained_on)
        trained_on = [f"{name} ({labels.get(name, 'licence not stated')})" for name in heads]
    return {"about": about, "splits": splits, "trained_on": trained_on}


def _model(loaded: LoadedRun) -> dict[str, Any]:
    config = loaded.config.model
    return {
        "system": loaded.config.system,
        "size": loaded.config.size,
        "parameters": cost_of(config).parameters,
        "parameters_without_embeddings": cost_of(config).parameters - config.vocab_size * config.d_model,
        "vocabulary": config.vocab_size,
        "window": config.window,
        "segment": config.segment,
        "states": config.num_states if config.recurrent_layers else 0,
        "memory_bytes": DocumentMemory.empty(config, 1, "meta").nbytes,
    }


def _curve(history: list[dict[str, Any]], last: int) -> list[dict[str, Any]]:
    """Validation over the run, at most a dozen points, the last one always."""
    seen, points = 0, []
    for line in history:
        if line["step"] > last:
            break
        if line["split"] == "train":
            seen = line["tokens_seen"]
        else:
            bits, gain = line["bits_per_token"], line.get("state_gain")
            points.append({"step": line["step"], "tokens": seen, "bits_per_token": bits, "state_gain": gain})
    every = -(-len(points) // CURVE_POINTS) or 1
    return points[::-1][::every][::-1]


def _read_about(path: Path) -> dict[str, Any]:
    values = {key: value for key, value in read_toml(path).items() if key != "version"}
    for key, value in values.items():
        if key not in ABOUT or not isinstance(value, type(ABOUT[key])):
            raise ConfigError(
                f"'{path}' has '{key}' {str(value)[:40]!r}: its keys are {', '.join(ABOUT)}, with strings or lists"
            )
    for key in ("samples", "limits"):
        if key in values and not RULES[key](values[key]):
            rule = "each sample needs a title and a text, both strings" if key == "samples" else "limits are strings"
            raise ConfigError(f"'{path}': {rule}")
    return values
