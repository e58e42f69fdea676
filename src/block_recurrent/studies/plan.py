"""The plan of a study: its options and the number of steps, decided once, so that a study can be resumed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from block_recurrent.errors import ConfigError, FileFormatError
from block_recurrent.io import door
from block_recurrent.io.output import read_json, write_json

PLAN = "plan.json"


def planned_steps(folder: Path, has: str, asked: dict[str, Any], decide: Callable[[], tuple[int, float | None]]) -> int:
    """The steps of the plan in a folder; `decide` gives them, and the seconds of one, if there is no plan yet.

    asked: options that must not change; has: the beginning of the error about one that has.
    """
    path = folder / PLAN
    if not path.is_file():
        steps, seconds = decide()
        folder.mkdir(parents=True, exist_ok=True)
        write_json(path, {**asked, "seconds_of_a_step": seconds, "steps": steps})
        return steps
    plan = read_json(path)
    for key, value in json.loads(json.dumps(asked)).items():
        if (there := plan.get(key)) != value:
            raise ConfigError(f"{has} with {key} {there!r}, but now it is {value!r}: choose another --out")
    planned: Any = plan.get("steps")
    if not (door.is_count(planned) and planned > 0):
        raise FileFormatError(f"'{path}' has an invalid 'steps': {planned!r}; choose another --out, or remove the file")
    return planned


def read_result(path: Path, keys: dict[str, door.Rule]) -> dict[str, Any]:
    """The result of a run of a study that was measured before; it must have these keys."""
    found = read_json(path)
    for key, rule in keys.items():
        if key not in found or not rule(found[key]):
            raise FileFormatError(f"'{path}' lacks a valid '{key}': remove the file to measure this run again")
    return found
