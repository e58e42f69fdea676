"""`brt reproduce`: equal conditions, tables that can be gone on with, numbers that are what `brt eval` says."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from block_recurrent.cli.main import main
from block_recurrent.presets import SIZES
from block_recurrent.run_config import parse_settings
from block_recurrent.studies.paper_tables import TABLES, rows_of
from block_recurrent.studies.reproduce import TIMED_STEPS, Study, _plan
from block_recurrent.train.loop import Trainer
from block_recurrent.train.step import Update


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    words = ["the", "cat", "sat", "on", "a", "mat", "and", "Alice", "saw", "Bob", "there", "once", "more"]
    for split, count in (("train", 6), ("validation", 2), ("test", 2)):
        (folder / "texts" / split).mkdir(parents=True)
        for number in range(count):
            text = " ".join(random.Random(number).choices(words, k=400))
            (folder / "texts" / split / f"{number}.txt").write_text(text)
    assert main(["data", "prepare", str(folder / "texts"), "--out", str(folder / "bytes")]) == 0
    return folder / "bytes"


def test_the_help_says_what_a_budget_does_not_count(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["reproduce", "--help"])
    assert "excluding validation and scoring" in " ".join(capsys.readouterr().out.split())


def test_a_budget_does_not_count_validation_and_scoring(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = []

    def ticking() -> float:
        return float(sum(seconds))

    original = Trainer.update

    def updated(*args: Any) -> Update:
        seconds.append(0.5)
        return original(*args)

    def costly(*_: Any) -> NoReturn:
        pytest.fail("the time of a step includes validation or scoring")

    monkeypatch.setattr("block_recurrent.studies.reproduce.time", SimpleNamespace(perf_counter=ticking))
    monkeypatch.setattr(Trainer, "update", updated)
    monkeypatch.setattr(Trainer, "evaluate", costly)
    monkeypatch.setattr("block_recurrent.studies.reproduce.evaluate_split", costly)
    settings = parse_settings(["train.lanes=2", "eval.every=1"])
    asked = Study("windows", "micro", (str(data),), tmp_path, budget=2, seeds=(0,), settings=settings)
    assert _plan(asked, lambda text: None) == 2 * 60 / 0.5
    assert len(seconds) == TIMED_STEPS + 1


def study(table: str, data: Path, out: Path, *more: str) -> list[str]:
    small = ["--size", "micro", "--budget", "0.001"]
    for setting in ("train.lanes=2", "train.save_every=10", "eval.every=10"):
        small += ["--set", setting]
    return ["reproduce", table, "--data", str(data), "--out", str(out), *small, *more]


def test_equal_conditions_and_further_seeds(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "study"
    assert main(study("windows", data, out, "--no-report")) == 0
    assert "rec-fixed-skip, window 4" in capsys.readouterr().out
    found = json.loads((out / "windows.json").read_text())
    assert len(found["runs"]) == 6
    assert len({run["tokens_trained"] for run in found["runs"]}) == 1
    assert {run["seed"] for run in found["runs"]} == {0}
    run = out / "runs" / "slide-window-16-seed0"
    metrics = (run / "metrics.jsonl").read_text()
    assert main(["eval", str(run), "--data", str(data), "--json", str(tmp_path / "eval.json")]) == 0
    expected = json.loads((tmp_path / "eval.json").read_text())["bits_per_token"]
    of_run = next(r for r in found["runs"] if r["label"] == "slide, window 16")
    assert of_run["bits_per_token"] == pytest.approx(expected, abs=1e-9)
    # The same with one seed more: what is there is not trained again.
    assert main(study("windows", data, out, "--no-report", "--seeds", "2")) == 0
    assert (run / "metrics.jsonl").read_text() == metrics
    assert len(json.loads((out / "windows.json").read_text())["runs"]) == 12
    assert "| slide, window 16 | 2 |" in (out / "windows.md").read_text()
    assert main(study("windows", data, out, "--budget", "7")) == 2
    assert "has a study with budget" in capsys.readouterr().err


def test_the_report_comes_with_the_main_table(data: Path, tmp_path: Path) -> None:
    assert main(study("table1", data, tmp_path / "study", "--systems", "slide-plus,rec-fixed-skip")) == 0
    labels = [run["label"] for run in json.loads((tmp_path / "study" / "table1.json").read_text())["runs"]]
    assert labels == ["slide-plus", "rec-fixed-skip"]
    assert (tmp_path / "study" / "report" / "report.html").is_file()
    assert (tmp_path / "study" / "table1-by-position.html").is_file()


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("size", SIZES)
def test_every_table_has_models_at_every_size(table: str, size: str) -> None:
    from block_recurrent.presets import preset

    rows = rows_of(table, size, [257, 1000])
    assert len({row.label for row in rows}) == len(rows) >= 2
    for row in rows:
        preset(row.system, row.size, **row.model)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--budget", "0"], "--budget is 0.0: it must be a number of minutes above 0"),
        (["--systems", "slid"], "table1 has no models of system 'slid'"),
        (["--seeds", "0"], "--seeds is 0: it must be at least 1"),
        (["--size", "tinny"], "there is no size 'tinny' (did you mean 'tiny'?)"),
        (["--set", "train.lanse=3"], "unknown key 'train.lanse'"),
    ],
)
def test_bad_input(
    more: list[str], message: str, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*study("table1", data, tmp_path / "study"), *more]) == 2
    assert message in capsys.readouterr().err


def test_the_vocabulary_study_wants_several(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(study("vocabularies", data, tmp_path / "study")) == 2
    assert "--data has one folder" in capsys.readouterr().err


def test_a_window_for_all_systems_is_the_base_window_of_xl(data: Path, tmp_path: Path) -> None:
    settings = parse_settings(["model.window=8", "model.segment=32", "train.lanes=4"])
    study = Study("table1", "micro", (str(data),), tmp_path, 1.0, (0,), settings=settings)
    configs = {row.system: study.config(row, 0, 10) for row in study.rows()}
    sizes = {name: (c.model.window, c.model.segment, c.train.lanes) for name, c in configs.items()}
    assert sizes["slide-plus"] == sizes["rec-fixed-skip"] == (8, 32, 4)
    assert sizes["xl"] == sizes["memorizing"] == (8, 8, 16)
    assert sizes["xl-2w"] == (16, 16, 8)
