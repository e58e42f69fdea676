"""What commands write: nothing of the user's is replaced or lost, and no text of others commands the terminal."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from block_recurrent.cli.main import COMMANDS, _Terminal, main, parser_of
from block_recurrent.cli.output import check_results, size
from block_recurrent.errors import ConfigError, DataError, printable
from block_recurrent.inference.session_file import read_memory_file
from block_recurrent.inference.text_input import FILE_BYTES, read_text
from block_recurrent.inference.trail import FOLDER as CHECKPOINTS
from block_recurrent.inference.trail import places_of
from block_recurrent.run_config import RunConfig, read_toml
from tests.security.made import RUN, TEXT, train_arguments

BRT = [sys.executable, "-m", "block_recurrent"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["tokenizer", "train", "--vocab-size", "512", "--out", "BOOK", "books"],
        ["export", RUN, "--out", "BOOK"],
        ["eval", RUN, "--data", "data", "--json", "BOOK"],
        ["eval", RUN, "--data", "data", "--per-token", "BOOK.csv"],
        ["headroom", RUN, "--data", "data", "--json", "BOOK"],
        ["inspect", RUN, "text.txt", "--json", "BOOK"],
        ["score", RUN, "text.txt", "--json", "BOOK"],
        ["data", "info", "data", "--json", "BOOK"],
        ["presets", "--json", "BOOK"],
        ["doctor", "--json", "BOOK"],
        ["memory", "info", f"{RUN}.memory", "--json", "BOOK"],
        ["bench", "data", "--markdown", "BOOK"],
        ["write", RUN, "--tokens", "3", "--log-probs", "BOOK"],
        ["write", RUN, "--tokens", "3", "--save", "BOOK"],
        ["read", RUN, "text.txt", "--memory", "BOOK"],
        ["memory", "rewind", f"{RUN}.memory", "--to", "1", "--out", "BOOK"],
        ["memory", "rewind", f"{RUN}.memory", "--to", "1"],
        ["compare", RUN, RUN, "--data", "data", "--out", "plots"],
        ["recall", "--steps", "1", "--out", "results"],
        ["tasks", "run", "copy-24", "--out", "results"],
        ["reproduce", "table1", "--size", "micro", "--data", "data", "--out", "results"],
        ["models", "pack", RUN, "--name", "x", "--out", "results"],
        ["compare", RUN, RUN, "--data", "data", "--out", "report"],
        ["inspect", RUN, "text.txt", "--out", "BOOK"],
        ["harness", RUN, "--books", "books", "--json", "BOOK"],
        ["models", "--json", "BOOK"],
        ["tasks", "list", "--json", "BOOK"],
        ["read", RUN, "text.txt", "--memory", f"{RUN}.memory"],
        ["read", RUN, "text.txt", "--memory", "new", "--json", "BOOK"],
        ["write", RUN, "--tokens", "3", "--json", "BOOK"],
        ["data", "verify", "data", "--json", "BOOK"],
        ["data", "prepare", "books", "--out", "new", "--json", "BOOK"],
        ["export", RUN, "new", "--json", "BOOK"],
        ["models", "pack", RUN, "--name", "x", "--out", "new", "--json", "BOOK"],
        ["memory", "rewind", f"{RUN}.memory", "--json", "BOOK"],
        ["compare", RUN, RUN, "--data", "data", "--out", "new", "--json", "BOOK"],
        ["demo", "--out", "new", "--json", "BOOK"],
    ],
    ids=lambda arguments: " ".join(arguments[:2]) + arguments[-2],
)
def test_a_file_that_exists_is_not_replaced(arguments, files, monkeypatch, capsys):
    monkeypatch.chdir(files)
    names = ("BOOK", "BOOK.csv", "report/report.json", "plots/cumulative.png")
    mine = [Path(name) for name in (*names, "results/recall.json", "results/copy-24.md", "results/table1.html")]
    for path in mine:
        path.parent.mkdir(exist_ok=True)
    for path in mine:
        path.write_text("my book")
    before = Path(f"{RUN}.memory").read_bytes()
    assert main(arguments) in (1, 2)
    assert "exists" in capsys.readouterr().err
    assert {path.read_text() for path in mine} == {"my book"}
    assert Path(f"{RUN}.memory").read_bytes() == before


@pytest.mark.parametrize(
    "arguments",
    [
        ["eval", RUN, "--data", "data", "--plot", "new.html"],
        ["read", RUN, "text.txt", "--memory", "new"],
        ["write", RUN, "--tokens", "3", "--save", "new"],
        ["write", RUN, "--tokens", "3", "--log-probs", "new"],
        ["export", RUN, "new"],
        ["compare", RUN, "--clear-state", "--data", "data", "--out", "new"],
        ["data", "prepare", "books", "--out", "new"],
        ["models", "pack", RUN, "--name", "x", "--out", "new"],
        ["recall", "--out", "new"],
        ["tasks", "run", "copy-24", "--out", "new"],
        ["reproduce", "table1", "--size", "micro", "--data", "data", "--out", "new"],
        ["demo", "--out", "new"],
    ],
    ids=lambda arguments: " ".join(arguments[:2]) + arguments[-2],
)
def test_two_outputs_of_one_name(arguments, files, monkeypatch, capsys):
    monkeypatch.chdir(files)
    before = sorted(files.rglob("*"))
    assert main([*arguments, "--json", f"../{files.name}/{arguments[-1]}"]) == 2
    assert "two outputs have the same name" in capsys.readouterr().err
    assert sorted(files.rglob("*")) == before


def test_json_does_not_replace_what_the_command_itself_wrote(files, monkeypatch, capsys):
    monkeypatch.chdir(files)
    Path("new").mkdir()
    assert main(["data", "prepare", "books", "--out", "new", "--json", "new/manifest.json"]) == 2
    assert "'new/manifest.json' exists" in capsys.readouterr().err
    assert main(["data", "verify", "new"]) == 0


def test_results_of_another_program_and_of_an_earlier_call(tmp_path):
    (tmp_path / "study.md").write_text("my notes")
    with pytest.raises(ConfigError, match=r"study\.md' exists"):
        check_results(tmp_path, "study", {"runs"}, overwrite=False)
    check_results(tmp_path, "study", {"runs"}, overwrite=True)
    (tmp_path / "study.json").write_text('{"runs": []}')
    check_results(tmp_path, "study", {"runs"}, overwrite=False)
    (tmp_path / "study.html").symlink_to(tmp_path / "study.md")
    with pytest.raises(ConfigError, match=r"study\.html' exists"):
        check_results(tmp_path, "study", {"runs"}, overwrite=False)


def test_other_data_in_the_folder_of_a_study_is_kept(files, capsys):
    before = (files / "data" / "manifest.json").read_bytes()
    assert main(["recall", "--out", str(files), "--steps", "1"]) == 2
    assert "contains other data" in capsys.readouterr().err
    assert (files / "data" / "manifest.json").read_bytes() == before


def test_a_plan_of_another_program_is_one_line(files, capsys):
    (files / "plan.json").write_text("mine")
    assert main(["reproduce", "table1", "--size", "micro", "--data", str(files / "data"), "--out", str(files)]) == 1
    assert capsys.readouterr().err.startswith(f"brt: error: '{files / 'plan.json'}' can't be read")


def test_what_was_added_to_a_packed_model_is_kept(files, capsys):
    (files / "box" / "notes.txt").write_text("mine")
    assert main(["models", "pack", str(files / RUN), "--name", "x", "--out", str(files / "box"), "--overwrite"]) == 1
    assert "is not only a packed model" in capsys.readouterr().err
    assert (files / "box" / "notes.txt").read_text() == "mine"


def test_a_pipe_stays_a_pipe(files, capsys):
    os.mkfifo(files / "pipe")
    for arguments in (["export", files / RUN, "--out"], ["read", files / RUN, files / "text.txt", "--memory"]):
        assert main([*map(str, arguments), str(files / "pipe")]) == 1
        assert "it is not a regular file" in capsys.readouterr().err
    assert (files / "pipe").is_fifo()


def test_a_full_device_is_a_failure_not_wrong_usage(files, capsys):
    assert main(["score", str(files / RUN), str(files / "text.txt"), "--json", "/dev/full"]) == 1
    assert "'/dev/full' can't be written: No space left on device" in capsys.readouterr().err


def test_the_root_is_no_output(files, capsys):
    assert main(["data", "prepare", str(files / "books"), "--out", "/"]) == 1
    assert "it is the root of the file system" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["data", "info", "data", "--segment", "0"],
        ["reproduce", "table1", "--size", "micro", "--data", "data", "--budget", "0"],
        ["tasks", "run", "copy-24", "--out", "new", "--budget", "0"],
        ["tasks", "run", "copy-24", "--out", "new", "--set", "model.window=0"],
        [*train_arguments(Path(), RUN), "--out", "new", "--set", "train.lanes=1000000000"],
        [*train_arguments(Path(), RUN), "--out", "new", "--set", "data.path=3"],
        [*train_arguments(Path(), RUN), "--out", "new", "--set", "train.init_from=[1]"],
        [*train_arguments(Path(), RUN), "--out", "new", "--set", "schedule.kind=[1]"],
        [*train_arguments(Path(), RUN), "--out", "new", "--set", "optimizer.name=[1]"],
        [*train_arguments(Path(), RUN), "--out", "new", "--size", "tiny", "--set", "train.steps=soon"],
        [*train_arguments(Path(), RUN), "--out", "new", "--size", "tiny", "--set", "model.segment=0"],
        [*train_arguments(Path(), RUN), "--out", "new", "--set", "model.num_layers=1000000000000"],
        [*train_arguments(Path(), RUN), "--out", "new", "--set", f"train.seed={2**70}"],
        [*train_arguments(Path(), RUN), "--out", "new", "--set", f"train.seed={'9' * 5000}"],
        [*train_arguments(Path(), RUN), "--out", "new", "--set", f"train.seed={'[' * 5000}"],
        ["train", "--init-from", RUN, "--data", "data", "--out", "new", "--set", "train.steps=soon"],
        ["train", "--init-from", RUN, "--data", "data", "--out", "new", "--set", "train.tune=[1]"],
        ["train", "--init-from", RUN, "--data", "data", "--out", "new", "--set", "schedule.learning_rate=fast"],
        ["train", "--init-from", RUN, "--data", "data", "--out", "new", "--tune", "state", "--set", "train.bptt=x"],
        ["recall", "--out", "new", "--threads", "1000000"],
        ["tasks", "run", "copy-24", "--out", "new", "--threads", "1000000"],
        ["reproduce", "table1", "--size", "micro", "--data", "data", "--out", "new", "--set", "model.window=0"],
        ["reproduce", "table1", "--size", "micro", "--data", "data", "--out", "new", "--budget", "1e300"],
        ["tasks", "run", "copy-24", "--out", "new", "--budget", "1e300"],
        ["recall", "--out", "new", "--steps", "1", "--lr", "1e300"],
        [*train_arguments(Path(), RUN), "--out", "new", "--lr", "1e300"],
        [*train_arguments(Path(), RUN), "--out", "new", "--set", "model.scale_init=1e39"],
        ["write", RUN, "--tokens", "2", "--beams", "2", "--length-penalty", "1e300"],
        ["score", RUN, "text.txt", "--device", "meta"],
        ["score", RUN, "text.txt", "--device", "mps"],
    ],
)
def test_a_number_without_sense_is_one_line(arguments, files, monkeypatch, capsys):
    monkeypatch.chdir(files)
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("brt: error: ")
    assert error.count("\n") == 1


def test_overwrite_replaces(files, capsys):
    out = files / "scores.json"
    for more in ([], ["--overwrite"]):
        assert main(["score", str(files / RUN), str(files / "text.txt"), "--json", str(out), *more]) == 0
    assert json.loads(out.read_text())["tokens"] > 0
    assert main(["score", str(files / RUN), str(files / "text.txt"), "--json", "nowhere/x.json"]) == 2


def test_a_memory_can_be_gone_on_from_into_its_own_file(files):
    memory = str(files / f"{RUN}.memory")
    assert main(["read", str(files / RUN), str(files / "text.txt"), "--from", memory, "--memory", memory]) == 0


def test_a_device_stays_a_device(files):
    assert main(["score", str(files / RUN), str(files / "text.txt"), "--json", "/dev/null"]) == 0
    assert not Path("/dev/null").is_file()


def test_json_is_one_option_with_snake_case_keys(files, capsys):
    def keys(value):
        if isinstance(value, dict):
            yield from value
            for each in value.values():
                yield from keys(each)
        elif isinstance(value, list):
            for each in value:
                yield from keys(each)

    run, data = str(files / RUN), ["--data", str(files / "data")]
    for arguments in (
        ["memory", "info", str(files / f"{RUN}.memory")],
        ["memory", "diff", *[str(files / f"{RUN}.memory")] * 2],
        ["data", "info", str(files / "data")],
        ["presets"],
        ["eval", run, *data, "--split", "validation"],
        ["headroom", run, *data],
        ["inspect", run, str(files / "text.txt")],
        ["read", run, str(files / "text.txt"), "--memory", str(files / "new.memory")],
        ["write", run, "--tokens", "3"],
        ["memory", "rewind", str(files / f"{RUN}.memory")],
        ["data", "verify", str(files / "data")],
        ["data", "prepare", str(files / "books"), "--out", str(files / "more")],
        ["models", "pack", run, "--name", "x", "--out", str(files / "packed")],
        ["export", run, "--out", str(files / "one.safetensors")],
        ["compare", run, "--clear-state", *data, "--out", str(files / "report"), "--no-png", "--no-inspect"],
        ["tasks", "run", "copy-24", "--set", "task.steps=1", "--set", "task.examples=4", "--out", str(files / "tasks")],
        ["score", run, str(files / "text.txt")],
    ):
        assert main([*arguments, "--json"]) == 0
        printed = json.loads(capsys.readouterr().out)
        assert all(key == key.lower() and " " not in key for key in keys(printed))

    assert main([*arguments, "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out) == printed


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["serve", RUN, "--port", "99999999"], "port must be 0-65535"),
        (["serve", RUN, "--port", "0", "--memories", "text.txt"], "File exists"),
        (["serve", RUN, "--port", "0", "--memories", RUN], f"'{RUN}' contains 'config.toml': it is a run, a model or"),
        (["serve", RUN, "--port", "0", "--memories", "box"], "choose another folder for the memories"),
        (["serve", RUN, "--port", "0", "--memories", "data"], "'data' contains 'manifest.json'"),
        (["serve", RUN, "--port", "0", "--memories", "hf"], "'hf' contains 'block_recurrent_manifest.json'"),
        (["serve", RUN, "--api-key-file", "nothing"], "can't be read: No such file"),
        (["memory", "rewind", "nothing", "--to", "3"], "memory file 'nothing' does not exist"),
        (["memory", "rewind", f"{RUN}.memory", "--to", "3", "--overwrite"], "has no checkpoints"),
        (["read", RUN, "books", "--memory", "new"], "'books' can't be read: Is a directory"),
        (["score", RUN, "pipe"], "'pipe' can't be read: it is not a regular file"),
        (["write", RUN, "--prompt-file", "pipe"], "'pipe' can't be read: it is not a regular file"),
        (["write", RUN, "--prompt-file", "empty"], "'empty' is empty: there is nothing to read"),
        (["train", "--config", "pipe", "--out", "new"], "'pipe' can't be read: it is not a regular file"),
        (["data", "prepare", "books", "--out", "new", "--tokenizer", "pipe"], "it is not a regular file"),
        (["serve", RUN, "--api-key-file", "pipe"], "it is not a regular file"),
        (["score", "hollow", "text.txt"], "'hollow' is not a run: its config.toml has no section 'model'"),
        (["score", RUN, ""], "'' can't be read: No such file"),
        (["read", RUN, "-", "--memory", "new"], "-: empty, there is nothing to read"),
        (["write", RUN, "--prompt-file", "-", "--save", "new"], "'-' is empty: there is nothing to read"),
        (["compare", RUN, "--clear-state", "--data", "data", "--out", "new", "--lanes", "0"], "--lanes is 0"),
        ([*train_arguments(Path(), RUN), "--out", "new", "--resume", "nothing"], "'nothing' is not a checkpoint"),
        ([*train_arguments(Path(), RUN), "--out", "new", "--resume", "data"], "is damaged: its manifest.json"),
        ([*train_arguments(Path(), RUN), "--out", "new/run", "--resume", "must"], "has no checkpoint to resume from"),
        (
            [*train_arguments(Path(), RUN), "--out", "new/run", "--init-from", "hollow"],
            "--init-from hollow: it has no checkpoint",
        ),
        ([*train_arguments(Path(), RUN), "--out", "empty-folder", "--resume", "must"], "has no checkpoint to resume"),
        (["tokenizer", "train", "--vocab-size", "512", "--out", "new/v.model", "nothing"], "'nothing' does not exist"),
        (["data", "prepare", "nothing", "--out", "new/folder/data"], "'nothing' does not exist"),
        (["export", RUN, "books"], "'books' exists"),
        (["export", RUN, "new", "--out", "other"], "give one output"),
        (["demo", "--size", "tyni"], "did you mean 'tiny'?"),
        (["demo", "--model", "nothing"], "'nothing' is not a run"),
        (["demo", "--source", "nothing"], "source 'nothing' does not exist"),
        (["demo", "--text", "nothing"], "'nothing' can't be read"),
    ],
    ids=lambda value: " ".join(value[:3]) if isinstance(value, list) else "",
)
def test_wrong_input_is_found_before_the_work_and_leaves_nothing(arguments, why, files, monkeypatch, capsys):
    pytest.importorskip("uvicorn")
    monkeypatch.chdir(files)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
    os.mkfifo("pipe")
    Path("empty").touch()
    Path("hollow").mkdir()
    Path("empty-folder").mkdir()
    Path("hollow/config.toml").touch()
    before = sorted(files.rglob("*"))
    assert main(arguments) in (1, 2)
    error = capsys.readouterr().err
    assert why in error
    assert error.count("\n") == 1
    assert sorted(files.rglob("*")) == before


def test_going_on_keeps_the_trail_of_a_memory(files, monkeypatch, capsys):
    monkeypatch.chdir(files)
    assert main(["read", RUN, "text.txt", "--memory", "a.memory", "--trail", "2", "--trail-every", "1"]) == 0
    (place,) = places_of(Path("a.memory"))
    assert main(["read", RUN, "text.txt", "--from", "a.memory", "--memory", "a.memory"]) == 0
    assert main(["write", RUN, "--memory", "a.memory", "--tokens", "2", "--save", "a.memory"]) == 0
    assert places_of(Path("a.memory")) == (place,)
    assert main(["memory", "rewind", "a.memory", "--to", str(place.position), "--overwrite"]) == 0
    assert read_memory_file("a.memory").tokens == place.position


class _Closed(io.StringIO):
    def flush(self):
        raise BrokenPipeError


def test_a_closed_pipe_does_not_keep_a_memory_from_being_saved(files):
    saved = files / "new.memory"
    with contextlib.redirect_stdout(_Closed()):
        assert main(["write", str(files / RUN), "--prompt", "Anna", "--tokens", "5", "--save", str(saved)]) == 0
    assert read_memory_file(saved).tokens > len("Anna")


def test_a_conversation_is_saved_at_its_end(files, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("Boris\n"))
    saved = files / "new.memory"
    assert main(["write", str(files / RUN), "--interactive", "--tokens", "2", "--save", str(saved)]) == 0
    assert read_memory_file(saved).tokens >= len("Boris") + 1


def test_no_input_ends_a_conversation(files, monkeypatch):
    typed = b"Anna \xff met\n/fork \xc2\xb2\n/load nothing\n\x1b[31m\n"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(typed), encoding="utf-8"))
    saved = files / "new.memory"
    assert main(["write", str(files / RUN), "--interactive", "--tokens", "2", "--save", str(saved)]) == 0
    assert read_memory_file(saved).tokens >= len("Anna \N{REPLACEMENT CHARACTER} met".encode())


@pytest.mark.parametrize("command", [["read", RUN, "text.txt", "--memory"], ["write", RUN, "--tokens", "2", "--save"]])
def test_a_memory_gets_no_name_that_it_can_not_be_read_by(command, files, monkeypatch, capsys):
    monkeypatch.chdir(files)
    odd = os.fsdecode(b"m\xff")
    assert main([*command, odd]) == 1
    assert "its name is not UTF-8: choose another" in capsys.readouterr().err
    os.rename(f"{RUN}.memory", odd)
    assert main(["memory", "info", odd]) == 1
    assert "its name is not UTF-8: rename it" in capsys.readouterr().err


def test_memory_info_of_another_text_fails(files, capsys):
    other = files / "other.txt"
    other.write_text("another text")
    memory = str(files / f"{RUN}.memory")
    assert main(["memory", "info", memory, "--text", str(other)]) == 1
    assert "is not the memory of" in capsys.readouterr().err
    assert main(["memory", "info", memory, "--text", str(files / "text.txt")]) == 0


def test_standard_input_is_a_text(files, monkeypatch, capsys):
    class Stdin:
        buffer = io.BytesIO((files / "text.txt").read_bytes())

    assert main(["score", str(files / RUN), str(files / "text.txt"), "--json"]) == 0
    by_name = capsys.readouterr().out
    monkeypatch.setattr(sys, "stdin", Stdin)
    assert main(["score", str(files / RUN), "-", "--json"]) == 0
    assert capsys.readouterr().out == by_name
    Stdin.buffer.seek(0)
    assert main(["read", str(files / RUN), "-", "--memory", str(files / "new.memory")]) == 0
    mine, other = read_memory_file(files / "new.memory"), read_memory_file(files / f"{RUN}.memory")
    assert mine.text_hash == other.text_hash
    assert mine.state.memory.equals(other.state.memory, 1e-5)


def test_control_characters_do_not_reach_a_terminal(capsys):
    assert printable("a\x1b[2Jb\rc\r\nd\x9b\te") == "a\\x1b[2Jb\\x0dc\r\nd\\x9b\te"
    stream = io.StringIO()
    print("name\x1b]0;owned\x07", file=_Terminal(stream))
    assert "\x1b" not in stream.getvalue()
    assert main(["data", "info", "no\x1b[31mwhere"]) == 2
    assert "\x1b" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["trian"], "did you mean 'train'?"),
        (["train", "--setps", "3"], "did you mean '--steps'?"),
        (["data", "prepair"], "did you mean 'prepare'?"),
        (["write", "run", "--temprature", "1"], "did you mean '--temperature'?"),
    ],
)
def test_what_may_have_been_meant(arguments, hint, capsys):
    with contextlib.suppress(SystemExit):
        assert main(arguments) == 2
    error = capsys.readouterr().err
    assert hint in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_a_command_by_either_way(name, capsys):
    for arguments in (["help", name], [name, "--help"]):
        with pytest.raises(SystemExit) as left:
            main(arguments)
        assert left.value.code == 0
    first, second = capsys.readouterr().out.split("usage: ")[1:]
    assert first.strip() == second.strip()


def _start(arguments, **options):
    # Where the tests run in the background, Ctrl-C would be ignored.
    ctrl_c = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)}
    return subprocess.Popen([*BRT, *map(str, arguments)], stderr=subprocess.PIPE, text=True, **ctrl_c, **options)


def test_output_to_a_full_device_and_an_ascii_terminal(files):
    text = files / "Ж.txt"
    text.write_text(TEXT + "Ж")
    with open("/dev/full", "w") as full:
        done = _start(["presets"], stdout=full)
        error = done.communicate(timeout=120)[1]
    assert done.returncode == 1
    assert error == "brt: error: No space left on device\n"
    plain = {**os.environ, "PYTHONIOENCODING": "ascii", "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    done = _start(["data", "prepare", text, "--out", files / "out", "--tokenizer", files / "Ж.model"], env=plain)
    error = done.communicate(timeout=120)[1]
    assert done.returncode == 2
    assert "Traceback" not in error


def test_ctrl_c_keeps_what_was_read_and_written(files):
    long = files / "long.txt"
    long.write_text(TEXT * 40_000)
    memory = files / "long.memory"
    trail = ["--trail", 1, "--trail-every", 1]
    reading = _start(["read", files / RUN, long, "--memory", memory, *trail], stdout=subprocess.PIPE)
    while not (files / CHECKPOINTS).is_dir() and reading.poll() is None:  # until it has begun to read
        time.sleep(0.05)
    reading.send_signal(signal.SIGINT)
    out, error = reading.communicate(timeout=120)
    assert reading.returncode == 130, error
    assert "tokens in" in out
    assert memory.is_file()
    assert "stopped: to resume, read the text from byte" in error
    assert "Traceback" not in error
    written = files / "written.memory"
    endless = ["write", files / RUN, "--tokens", 10_000_000, "--go-on", "--save", written]
    writing = _start(endless, stdout=subprocess.PIPE)
    assert writing.stdout is not None
    writing.stdout.read(1)
    writing.send_signal(signal.SIGINT)
    _, error = writing.communicate(timeout=120)
    assert writing.returncode == 130
    assert written.is_file()
    assert "Traceback" not in error


def test_ctrl_c_keeps_what_was_read_of_a_prompt(files, monkeypatch):
    from block_recurrent.inference import text_input

    def interrupted(path):
        yield TEXT
        raise KeyboardInterrupt

    monkeypatch.setattr(text_input, "check_text", lambda path: None)
    monkeypatch.setattr(text_input, "read_text", interrupted)
    saved = files / "prompt.memory"
    assert main(["write", str(files / RUN), "--prompt-file", str(files / "text.txt"), "--save", str(saved)]) == 130
    assert read_memory_file(saved).tokens == len(TEXT)


@pytest.mark.parametrize(
    "command", [["read", RUN, "text.txt", "--memory"], ["write", RUN, "--prompt-file", "text.txt", "--save"]]
)
def test_ctrl_c_before_anything_was_read_replaces_no_memory(command, files, monkeypatch, capsys):
    from block_recurrent.inference.session import Session

    def interrupted(self, text):
        raise KeyboardInterrupt

    monkeypatch.chdir(files)
    monkeypatch.setattr(Session, "read", interrupted)
    before = Path(f"{RUN}.memory").read_bytes()
    assert main([*command, f"{RUN}.memory", "--overwrite"]) == 130
    assert capsys.readouterr().err == "brt: stopped\n"
    assert Path(f"{RUN}.memory").read_bytes() == before


def test_an_invalid_byte_loses_nothing_that_was_read(files, monkeypatch, capsys):
    monkeypatch.chdir(files)
    good = TEXT.encode() * 1600 + "…".encode()
    assert len(good) > 2 * FILE_BYTES
    Path("bad.txt").write_bytes(good + b"\xff more")
    at, memory = f"(byte 0xFF at offset {len(good):,})", ["--memory", "new.memory"]

    def fails(command: list[str], name: str) -> str:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(Path("bad.txt").read_bytes())))
        assert main(command) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"brt: error: '{name}' is not UTF-8 {at}")
        assert error.count("\n") == 1
        return error

    with monkeypatch.context() as unread:
        unread.setattr("block_recurrent.checkpoint.load_run", lambda *_: pytest.fail("the work has begun"))
        fails(["read", RUN, "text.txt", "bad.txt", *memory], "bad.txt")
        fails(["write", RUN, "--prompt-file", "bad.txt", "--save", "new.memory"], "bad.txt")
        fails(["score", RUN, "bad.txt"], "bad.txt")
        fails(["score", RUN, "-"], "-")
    assert not Path("new.memory").exists()
    for command in (
        ["read", RUN, "-", *memory, "--json", "read.json"],
        ["write", RUN, "--prompt-file", "-", "--save", "new.memory", "--overwrite"],
    ):
        assert "is in 'new.memory'" in fails(command, "-")
        assert read_memory_file("new.memory").tokens == len(good)
    assert json.loads(Path("read.json").read_text())["stopped_at_byte"] == len(good)


@pytest.mark.parametrize("bad", [b"\xff", "…".encode()[:2], b"\x80", "…".encode()[:1] + b"a"])
@pytest.mark.parametrize("place", [0, 5, FILE_BYTES - 1, FILE_BYTES, FILE_BYTES + 3])
def test_the_offset_of_an_invalid_byte_is_exact(bad, place, tmp_path):
    (tmp_path / "bad.txt").write_bytes(b"a" * place + bad)
    pieces = []
    with pytest.raises(DataError, match=rf"byte 0x{bad[0]:02X} at offset {place:,}\)"):
        pieces += read_text(tmp_path / "bad.txt")
    assert "".join(pieces) == "a" * place


def test_ctrl_c_while_starting_is_one_line(files, monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("importlib.import_module", interrupted)
    assert main(["score", str(files / RUN), str(files / "text.txt")]) == 130
    assert capsys.readouterr().err == "brt: stopped\n"


def test_an_unwritable_place_is_found_before_the_work(files, monkeypatch, capsys):
    monkeypatch.setattr("block_recurrent.checkpoint.load_run", lambda *_: pytest.fail("the work has begun"))
    data = ["--data", str(files / "data")]
    names = {"--json": "x.json", "--per-token": "x.csv", "--plot": "x.html"}
    for option in names:
        assert main(["eval", str(files / RUN), *data, option, str(files / "nowhere" / names[option])]) == 2
        assert "there is no folder" in capsys.readouterr().err


def test_an_interval_over_few_documents_is_flagged(files, capsys):
    data = ["--data", str(files / "data")]
    assert main(["eval", str(files / RUN), *data]) == 0
    assert "warning: 2 documents are too few for a reliable interval" in capsys.readouterr().out
    assert main(["eval", str(files / RUN), *data, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["few_documents"] is True


def test_every_default_is_in_the_help():
    for name in COMMANDS:
        for parser in _parsers(parser_of(name)):
            formatter = parser._get_formatter()
            for action in (action for action in parser._actions if action.option_strings):
                text = formatter._expand_help(action)
                has_default = action.default not in (None, "", argparse.SUPPRESS, []) and action.default is not False
                assert not has_default or str(action.default) in text or "default" in text, (name, action.dest)
                assert "....)" not in text, (name, action.dest)


def _parsers(parser):
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from _parsers(below)


def test_a_size_has_the_unit_that_suits_it():
    sizes = {36_000: "35.2 KiB", 12: "12 bytes", 5 << 20: "5.0 MiB", 3 << 30: "3.0 GiB"}
    assert {count: size(count) for count in sizes} == sizes


def test_a_small_model_has_a_size(files, capsys):
    assert main(["models", "pack", str(files / RUN), "--name", "x", "--out", str(files / "new")]) == 0
    assert re.search(r"\(\d+\.\d KiB\)", capsys.readouterr().out)


def test_the_learning_rate_has_a_short_name(files):
    arguments = [*train_arguments(files, RUN, 1), "--out", str(files / "new"), "--lr", "0.25"]
    assert main(arguments) == 0
    assert RunConfig.from_dict(read_toml(files / "new" / "config.toml")).schedule.learning_rate == 0.25


class _Tty(io.StringIO):
    def isatty(self):
        return True


def test_progress_is_shown_while_starting_and_while_validating(files, monkeypatch):
    from block_recurrent.train.report import Reporter

    told = []
    monkeypatch.setattr(Reporter, "status", lambda self, text: told.append(text))
    terminal = _Tty()
    with contextlib.redirect_stderr(terminal):
        assert main([*train_arguments(files, RUN, 2), "--out", str(files / "new")]) == 0
    assert "loading torch" in terminal.getvalue()
    assert f"opening '{files / 'new'}'" in terminal.getvalue()
    assert told[0] == "validating"
    assert any(re.fullmatch(r"validating: [\d,]+ of [\d,]+ tokens", text) for text in told)


def test_beams_without_end_are_refused(files, capsys):
    assert main(["write", str(files / RUN), "--beams", "100000"]) == 2
    assert "to 1024" in capsys.readouterr().err
