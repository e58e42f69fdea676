"""Every task at size micro: a recurrent model learns in seconds what lies beyond all windows, slide-plus never does.

The answers lie further back than slide-plus reaches through all its layers, so that nothing but a memory can know them.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from block_recurrent.presets import preset
from block_recurrent.studies.tasks.catalog import Point, spec_of
from block_recurrent.studies.tasks.study import TaskStudy, run_task

# task: accuracy at the last level that the recurrent model must reach, and that slide-plus must not
BARS = {
    "copy-24": (0.7, 0.2),
    "reverse-24": (0.7, 0.2),
    "retrieval": (0.45, 0.25),
    "mqar": (0.4, 0.25),
    "parity": (0.9, 0.65),
    "even-pairs": (0.9, 0.65),
    "cycle-navigation": (0.5, 0.4),
    "modular-arithmetic": (0.5, 0.35),
    "selective-copying": (0.5, 0.25),
    "capacity": (0.45, 0.25),
}


@pytest.mark.parametrize("name", BARS)
def test_only_a_memory_can(name: str, tmp_path: Path) -> None:
    spec = spec_of(name, "micro")
    study = TaskStudy(spec, "micro", ("rec-lstm-dual", "slide-plus"), tmp_path)
    reach = {s: study.model_config(s, Point()).num_layers * spec.window for s in study.systems}
    assert reach["slide-plus"] > reach["rec-lstm-dual"]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        found = run_task(study, lambda text: None)
    finally:
        torch.set_num_threads(threads)
    assert found is not None
    recurrent, sliding = found["runs"]
    assert recurrent["updates"] == sliding["updates"] <= spec.training.steps
    assert recurrent["tokens"] == sliding["tokens"], "the same examples"
    level, (reached, not_reached) = str(spec.tests[-1]), BARS[name]
    assert recurrent["accuracy"][level] > reached, found["runs"]
    assert sliding["accuracy"][level] < not_reached, found["runs"]
    assert spec.problem.chance < not_reached < reached


def test_bars_are_of_all_tasks() -> None:
    assert preset("slide-plus", "micro").num_layers == preset("rec-lstm-dual", "micro").num_layers + 1
