"""Cards, plans and results that were edited, forged or cut: one line that names the file, and nothing of it is used."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from block_recurrent.cli.main import main
from block_recurrent.inference.trail import checkpoint_path, places_of
from block_recurrent.io import door
from block_recurrent.io.atomic import atomic_folder
from block_recurrent.models import CARD
from block_recurrent.models.card import card_of, card_text
from tests.security.forging import change_value
from tests.security.made import RUN, train_arguments


def refusal(arguments: list[Any], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line of a command that fails."""
    capsys.readouterr()
    assert main([str(word) for word in arguments]) in (1, 2)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error:" in line]
    assert line.startswith("brt: error: ")
    return line


def forge_card(folder: Path, change: Any) -> None:
    """The card with a change, and a hash that fits."""
    card = json.loads((folder / CARD).read_text())
    del card["sha256"]
    change(card)
    (folder / CARD).write_text(door.seal_json(json.dumps(card)))


@pytest.mark.parametrize(
    "change",
    [
        lambda card: card["model"].pop("system"),
        lambda card: card["model"].update(parameters="many"),
        lambda card: card["model"].update(window=2**80),
        lambda card: card["training"].update(recipe=[]),
        lambda card: card["training"].update(curve=[{"step": 1}]),
        lambda card: card["data"].update(splits={"train": 3}),
        lambda card: card["data"].update(trained_on=[["a"]]),
        lambda card: card["evaluation"].update(memory={"bits_per_byte": None}),
        lambda card: card["evaluation"].update(state_saves={"interval_95": [1]}),
        lambda card: card["evaluation"].update(needle=json.loads("[" * 500 + "]" * 500)),
        lambda card: card.update(samples=[{"title": "x", "text": 3}]),
        lambda card: card.update(limits=[3]),
    ],
)
def test_a_forged_card_is_refused_by_name(change, files, capsys):
    forge_card(files / "box", change)
    line = refusal(["models", "show", files / "box"], capsys)
    assert f"model '{files / 'box'}' is damaged: its card.json has an invalid '" in line


def test_any_change_of_a_card_is_refused_or_shown(files, capsys):
    whole, rng = (files / "box" / CARD).read_text(), random.Random(0)
    shown = 0
    for _ in range(150):
        (files / "box" / CARD).write_text(whole)
        forge_card(files / "box", lambda card: change_value(card, rng))
        with contextlib.suppress(door.FileFormatError):
            shown += bool(card_text(card_of(str(files / "box"))))
    assert 0 < shown < 150


@pytest.mark.parametrize(
    ("about", "why"),
    [
        ("samples = [1]", "each sample needs a title and a text"),
        ("samples = [{title = 1, text = 'x'}]", "both strings"),
        ("samples = [['title', 'text']]", "each sample needs a title and a text"),
        ("limits = [[1]]", "limits are strings"),
        ("summary = 3", "with strings or lists"),
        ("summary = 'x", "is not a TOML file"),
        ("[data]\nx = 1", "with strings or lists"),
    ],
)
def test_an_about_file_that_says_something_else(about, why, files, capsys):
    (files / "about.toml").write_text(about)
    out = files / "new"
    line = refusal(
        ["models", "pack", files / RUN, "--name", "x", "--out", out, "--about", files / "about.toml"], capsys
    )
    assert "about.toml" in line
    assert why in line
    assert not out.exists()


@pytest.mark.parametrize("kind", ["memory", "cleared", "twin", "headroom", "needle"])
def test_an_evaluation_that_is_none(kind, files, capsys):
    evaluation = files / "eval.json"
    assert main(["eval", str(files / RUN), "--data", str(files / "data"), "--json", str(evaluation)]) == 0
    whole, rng = json.loads(evaluation.read_text()), random.Random(1)
    odd: list[Any] = [
        {},
        {"taken": 3, "documents": [{}], "bits_per_byte": "x", "intervals_95": []},
        {"x": [[[[[[[1]]]]]]]},
    ]
    for _ in range(25):
        odd.append(json.loads(json.dumps(whole)))
        change_value(odd[-1], rng)
    pack = ["models", "pack", files / RUN, "--name", "x", "--out", files / "new", "--overwrite"]
    memory = [] if kind == "memory" else ["--memory", evaluation]
    for value in odd:
        (files / "odd.json").write_text(json.dumps(value))
        code = main([*map(str, pack), *map(str, memory), f"--{kind}", str(files / "odd.json")])
        error = capsys.readouterr().err
        assert code == 0 or error.count("\n") == 1
        assert "Traceback" not in error


@pytest.mark.parametrize("line", ["3", "[]", "{}", '{"step": 1}', '{"step": 1, "split": "train"}', "[" * 2000, "x"])
def test_a_line_of_metrics_that_is_none(line, files, capsys):
    with open(files / RUN / "metrics.jsonl", "a") as file:
        file.write(f"{line}\n")
    assert "metrics.jsonl'" in refusal(["models", "pack", files / RUN, "--name", "x", "--out", files / "new"], capsys)


def test_text_of_a_card_does_not_command_the_terminal(files, monkeypatch, capsys):
    (files / "about.toml").write_text('summary = "\\u001b]0;owned\\u0007"\nlimits = ["</script><script>"]')
    pack = ["models", "pack", files / RUN, "--name", "x", "--out", files / "new", "--about", files / "about.toml"]
    assert main([*map(str, pack)]) == 0
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert main(["models", "show", str(files / "new")]) == 0
    assert "\x1b" not in capsys.readouterr().out


REPRODUCE = ["reproduce", "table1", "--size", "micro", "--systems", "slide-plus", "--budget", "0.0001", "--no-report"]
TASK = ["tasks", "run", "copy-24", "--set", "task.steps=1", "--set", "task.examples=4"]


@pytest.mark.parametrize("command", [REPRODUCE, TASK], ids=["reproduce", "tasks"])
def test_an_edited_plan_or_a_partial_result_is_named(command, files, monkeypatch, capsys):
    monkeypatch.chdir(files)
    command = [*command, "--out", "study", *(["--data", "data"] if command is REPRODUCE else [])]
    assert main(command) == 0
    (plan,) = Path("study").rglob("plan.json")
    (result,) = [path for path in Path("study").rglob("*.json") if path.name in ("accuracy.json", "test.json")]
    for path, whole in ((plan, plan.read_text()), (result, result.read_text())):
        for text in ("", "[]", "{}", "nan", whole[: len(whole) // 2], '{"steps": -1}'):
            path.write_text(text)
            assert f"'{path.parent}" in refusal(command, capsys) or path is plan
        path.write_text(whole)
    for steps in ("x", 0, -1, 2**70, None, 1.5):
        plan.write_text(json.dumps(json.loads(plan.read_text()) | {"steps": steps}))
        assert "has an invalid 'steps'" in refusal(command, capsys)
    plan.unlink()
    whole, rng = json.loads(result.read_text()), random.Random(0)
    for _ in range(30):
        value = json.loads(json.dumps(whole))
        change_value(value, rng)
        result.write_text(json.dumps(value))
        assert main(command) in (0, 1)
        assert "Traceback" not in capsys.readouterr().err


def test_a_checkpoint_of_a_trail_that_was_replaced(files, monkeypatch, capsys):
    monkeypatch.chdir(files)
    read = ["read", RUN, "--trail", "4", "--trail-every", "1"]
    assert main([*read, "text.txt", "--memory", "a.memory"]) == 0
    assert main([*read, "text.txt", "--from", "a.memory", "--memory", "a.memory"]) == 0
    first, second = places_of(Path("a.memory"))
    before = Path("a.memory").read_bytes()
    shutil.copy(checkpoint_path(Path(), second), checkpoint_path(Path(), first))
    line = refusal(["memory", "rewind", "a.memory", "--to", first.position, "--overwrite"], capsys)
    assert f"is not the checkpoint of 'a.memory' at {first.position} tokens" in line
    shutil.copy("memorizing.memory", checkpoint_path(Path(), second))
    assert "is not the checkpoint" in refusal(
        ["memory", "rewind", "a.memory", "--to", second.position, "--overwrite"], capsys
    )
    assert Path("a.memory").read_bytes() == before


@pytest.mark.parametrize("link", ["victim.txt", "loop"])
def test_a_lock_that_is_a_link_is_not_followed(link, files, monkeypatch, capsys):
    """A run folder of someone else could name any file, which would be emptied."""
    monkeypatch.chdir(files)
    Path("victim.txt").write_text("mine")
    (files / RUN / ".lock").unlink()
    (files / RUN / ".lock").symlink_to(files / link if link != "loop" else ".lock")
    assert "contains '.lock', which is not a regular file" in refusal(["train", "--out", RUN, "--steps", "3"], capsys)
    assert Path("victim.txt").read_text() == "mine"


@pytest.mark.parametrize("name", ["config.toml", "metrics.jsonl", "log.txt", "tokenizer.model"])
def test_a_pipe_in_a_run_is_not_waited_for(name, files, capsys):
    (files / RUN / name).unlink(missing_ok=True)
    os.mkfifo(files / RUN / name)
    assert "which is not a regular file" in refusal([*train_arguments(files, RUN, 3)], capsys)


@pytest.mark.parametrize("kind", ["about", "memory", "needle"])
def test_a_pipe_is_no_part_of_a_card(kind, files, capsys):
    os.mkfifo(files / "pipe")
    pack = ["models", "pack", files / RUN, "--name", "x", "--out", files / "new", f"--{kind}", files / "pipe"]
    assert "it is not a regular file" in refusal(pack, capsys)


@pytest.mark.parametrize(
    "command", [["models", "pack", RUN, "--name", "x", "--out"], ["data", "prepare", "books", "--out"]]
)
def test_two_that_write_one_folder(command, files, monkeypatch, capsys):
    monkeypatch.chdir(files)
    with atomic_folder(files / "new") as part:
        (part / "mine").touch()
        assert "another run is writing to" in refusal([*command, "new"], capsys)
    assert [path.name for path in (files / "new").iterdir()] == ["mine"]


def test_a_source_whose_name_is_not_utf8(files, capsys):
    odd = files / os.fsdecode(b"books-\xff")
    shutil.copytree(files / "books", odd)
    assert main(["data", "prepare", str(odd), "--out", str(files / "new")]) == 0
    assert main(["data", "verify", str(files / "new"), "--json", str(files / "verified.json")]) == 0
    assert main(["eval", str(files / RUN), "--data", str(files / "new"), "--json", str(files / "scores.json")]) == 0
    assert json.loads((files / "verified.json").read_text())["problems"] == []


def test_a_loop_of_links_stays_one(files, capsys):
    (files / "loop").symlink_to("loop")
    assert "it is not a regular file" in refusal(
        ["read", files / RUN, files / "text.txt", "--memory", files / "loop"], capsys
    )
    assert (files / "loop").is_symlink()


def test_a_run_of_more_layers_than_any_is_refused_at_once(files, capsys):
    path = files / RUN / "config.toml"
    for old, new, why in (
        ("num_layers = 2", f"num_layers = {2**40}", "num_layers is 1099511627776: it must be at most 4096"),
        ("mlp_dim = 32", f"mlp_dim = {2**38}", "the weights alone need"),
    ):
        whole = path.read_text()
        path.write_text(door.seal_toml(whole[: whole.index("# sha256")].replace(old, new)))
        assert why in refusal(["score", files / RUN, files / "text.txt"], capsys)
        path.write_text(whole)
