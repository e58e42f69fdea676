"""Defaults of a run that starts from the weights of another: that run's architecture, and a short recipe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from block_recurrent import models
from block_recurrent.errors import ConfigError, DataError
from block_recurrent.run_config.resolve import read_toml
from block_recurrent.run_config.sections import RunConfig

# Small steps for pretrained weights. States are few, start near zero, and can take large ones.
_RATES = {"all": 0.0003, "state": 0.02}
STEPS, WARMUP = 120, 10


def fine_tuning_values(source: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The architecture of `source`, and a recipe for the settings that are not in `given`."""
    config = _config_of(source)
    tune = given.get("train", {}).get("tune", "all")
    if tune not in _RATES:
        return {}  # the section reports the error
    rate = given.get("schedule", {}).get("learning_rate", _RATES[tune])
    steps = given.get("train", {}).get("steps", STEPS)
    data: dict[str, Any] = {"repeats": 0.0}  # it can copy already
    if tune == "state":
        # Only a document's first segment reads the initial state, so every segment becomes an excerpt.
        data |= {"excerpt": config.model.segment * given.get("train", {}).get("bptt", 1)}
    return {
        "system": config.system,
        "size": config.size,
        "model": config.model.to_dict(),
        "data": data,
        "train": {"steps": steps, "lanes": config.train.lanes, "clip": 1.0, "save_every": 50, "keep": 1},
        "optimizer": {"name": "adamw"},
        "schedule": {
            "kind": "cosine",
            "learning_rate": rate,
            "final_learning_rate": rate / 10,
            "decay_steps": steps,
            "warmup": min(WARMUP, steps // 4),
        },
        "eval": {"every": 40, "tokens": 32_768},
    }


def check_same_tokenizer(source: str, sha256: str, data: str) -> None:
    """Raise an error unless the data was prepared with the tokenizer of the run that the weights come from."""
    theirs = _config_of(source).data.tokenizer
    if theirs in ("", sha256):
        return
    raise DataError(
        f"'{data}' was prepared with another tokenizer ({sha256[:12]}) than that of '{source}' "
        f"({theirs[:12]}): prepare the documents with 'brt data prepare YOUR-FOLDER --out NEW --tokenizer {source}'"
    )


def _config_of(source: str) -> RunConfig:
    path = models.locate(source)[0] / models.CONFIG
    if not path.is_file():
        raise ConfigError(
            f"--init-from {source}: it has no checkpoint; give a run folder, or a model name (see 'brt models')"
        )
    return RunConfig.from_dict(read_toml(path, sealed=True))
