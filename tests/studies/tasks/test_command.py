"""`brt tasks`: what it writes, what it refuses, and that stopped studies go on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from block_recurrent.checkpoint import load_run
from block_recurrent.cli.main import main
from block_recurrent.studies.tasks.catalog import TASKS, Point, spec_of
from block_recurrent.studies.tasks.study import TaskStudy
from block_recurrent.train.loop import Trainer

SHORT = ["--set", "task.steps=4", "--set", "task.lanes=2", "--set", "task.examples=4"]


def test_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tasks", "list"]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in (*TASKS, "recall", "needle"))
    assert "Recurrent Memory Transformer 1.00" in printed
    assert main(["tasks", "list", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["name"] for row in rows} == {*TASKS, "recall", "needle"}


def test_results_of_several_tasks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["tasks", "run", "copy-24", "parity", "--system", "rec-fixed-skip", "--against", "xl", "--seeds", "2"]
    assert main([*command, "--out", str(tmp_path), *SHORT]) == 0
    assert "Transformer-XL" in capsys.readouterr().out
    for name in ("copy-24", "parity"):
        found = json.loads((tmp_path / f"{name}.json").read_text())
        assert {(run["system"], run["seed"]) for run in found["runs"]} == {
            (system, seed) for system in ("rec-fixed-skip", "xl") for seed in (0, 1)
        }
        assert {"command", "machine", "versions", "published", "training", "changed"} <= found.keys()
        assert all(run["updates"] and run["tokens"] and min(run["accuracy"].values()) >= 0 for run in found["runs"])
        page = (tmp_path / f"{name}.md").read_text()
        assert "| rec-fixed-skip |" in page
        assert "task.steps = 4" in page
        assert (tmp_path / f"{name}.html").is_file()
    runs = json.loads((tmp_path / "copy-24.json").read_text())["runs"]
    assert runs[1]["updates"] == 8 * runs[0]["updates"], "Transformer-XL: an update for each of 8 segments"


def test_a_curve_over_state_sizes(tmp_path: Path) -> None:
    spec = spec_of("mqar", "tiny")
    study = TaskStudy(spec, "tiny", ("rec-fixed-skip", "slide", "memorizing"), tmp_path)
    for system in study.systems:
        configs = [study.model_config(system, point) for point in spec.points_of(system)]
        assert len(configs) >= 4
        assert {config.num_layers for config in configs} == {2}
        assert len({(c.num_states, c.window, c.memory_size) for c in configs}) == len(configs)
    flags = ["--set", "task.vocabulary=16", "--set", "task.levels=[1]", "--set", "task.tests=[1]"]
    command = ["tasks", "run", "mqar", "--system", "slide", "--size", "tiny", "--out", str(tmp_path), *flags, *SHORT]
    command += ["--set", "model.d_model=16", "--overwrite"]
    assert main([*command, "--variants", "W=8, W=64"]) == 0
    found = json.loads((tmp_path / "mqar.json").read_text())
    assert [run["point"] for run in found["runs"]] == ["W=8", "W=64"]
    assert main(command) == 0, "the other variants"
    found = json.loads((tmp_path / "mqar.json").read_text())
    numbers = [run["numbers in the state"] for run in found["runs"]]
    assert numbers == sorted(set(numbers))
    assert len(numbers) == 4


def test_a_stopped_task_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the same weights, bit for bit."""
    one_step = Trainer.one_step
    command = ["tasks", "run", "retrieval", *SHORT]
    assert main([*command, "--out", str(tmp_path / "whole")]) == 0
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "one_step", lambda self, *rest: one_step(self, *rest) or self.counters.step == 2)
        assert main([*command, "--out", str(tmp_path / "parts")]) == 130
    assert main([*command, "--out", str(tmp_path / "parts")]) == 0
    run = Path("runs/retrieval/rec-fixed-skip-seed0")
    ours, expected = (load_run(tmp_path / name / run).model.state_dict() for name in ("parts", "whole"))
    assert all(torch.equal(ours[name], x) for name, x in expected.items())
    assert main([*command, "--set", "task.finished=0.5", "--out", str(tmp_path / "parts")]) == 2, "another study"


def test_a_budget_becomes_steps(tmp_path: Path) -> None:
    flags = ["--budget", "0.0001", "--set", "task.lanes=2", "--set", "task.examples=4"]
    assert main(["tasks", "run", "copy-24", "--out", str(tmp_path), *flags]) == 0
    assert json.loads((tmp_path / "copy-24.json").read_text())["steps at most"] == 10


def test_recall_is_one_of_the_tasks(tmp_path: Path) -> None:
    command = ["tasks", "run", "recall", "--against", "slide-plus", "--out", str(tmp_path), "--set", "task.steps=3"]
    assert main(command) == 0
    found = json.loads((tmp_path / "recall.json").read_text())
    assert [run["system"] for run in found["systems"]] == ["rec-fixed-skip", "slide-plus"]
    assert (tmp_path / "recall.md").is_file()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["copy-25"], "did you mean 'copy-24'"),
        (["copy-24", "--system", "rec-fixed-skp"], "did you mean 'rec-fixed-skip'"),
        (["copy-24", "--size", "tinny"], "did you mean 'tiny'"),
        (["copy-24", "--seeds", "0"], "must be at least 1"),
        (["copy-24", "--budget", "0"], "a number of minutes above 0"),
        (["copy-24", "--set", "task.step=3"], "did you mean 'steps'"),
        (["copy-24", "--set", "model.num_state=3"], "did you mean 'num_states'"),
        (["copy-24", "--set", "train.lanes=3"], "must be task or model"),
        (["copy-24", "--variants", "chunk 1"], "copy-24 has no variant 'chunk 1'; it has no variants"),
        (["mqar", "--size", "tiny", "--variants", "S=63"], "did you mean 'S=64'"),
        (["mqar", "--size", "tiny", "--system", "slide", "--variants", "S=64"], "none of the variants S=64 for slide"),
        (["needle"], "--run RUN --data BOOK"),
        (["needle", "--run", "r", "--data", "b", "--needle", "none"], "{answer}"),
        (["needle", "--run", "r", "--data", "b", "--distances", "far"], "whole numbers"),
        (["needle", "--run", "r", "--data", "b", "--answers", "A"], "at least 2"),
    ],
)
def test_refusals(tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], message: str) -> None:
    assert main(["tasks", "run", "--out", str(tmp_path / "out"), *flags]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists(), "nothing was begun"


def test_models_have_layers_for_their_memory(tmp_path: Path) -> None:
    """Also where a task has fewer layers than the preset."""
    study = TaskStudy(spec_of("mqar", "tiny"), "tiny", ("rec-lstm-dual",), tmp_path)
    assert study.model_config("rec-lstm-dual", Point()).recurrent_layers == (2,)
    assert study.model_config("slide-plus", Point()).num_layers == 3
    assert study.model_config("memorizing", Point()).memory_layers == (2,)
