"""What all commands have in common: `--json`, hints, numbers that make no sense, and Ctrl-C from start to exit."""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from block_recurrent.cli.main import COMMANDS, OneLineParser, main, parser_of

NO_RESULT = {
    "completion": "prints a script",
    "data show": "prints a document",
    "serve": "answers requests in JSON",
    "train": "writes metrics.jsonl",
}


def parsers(parser: OneLineParser) -> Iterator[OneLineParser]:
    """The parsers of a command that does something: its own, and those of its subcommands."""
    below = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not below or not below[0].required:
        yield parser
    for action in below:
        for inner in action.choices.values():
            yield from parsers(inner)


ALL = [parser for name in COMMANDS for parser in parsers(parser_of(name))]


def refusal(parser: OneLineParser, words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as stop:
        parser.parse_args(words)
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.parametrize("parser", ALL, ids=lambda parser: parser.prog)
def test_json_means_the_same_everywhere(parser: OneLineParser) -> None:
    found = [action for action in parser._actions if "--json" in action.option_strings]
    if parser.prog.removeprefix("brt ") in NO_RESULT:
        assert not found
        return
    assert [(action.nargs, action.const, action.metavar) for action in found] == [("?", "-", "FILE")]
    assert "--overwrite" in parser._option_string_actions


@pytest.mark.parametrize("parser", ALL, ids=lambda parser: parser.prog)
def test_every_flag_has_a_hint(parser: OneLineParser, capsys: pytest.CaptureFixture[str]) -> None:
    for flag in (flag for flag in parser._option_string_actions if flag.startswith("--")):
        with pytest.raises(SystemExit):
            parser.error(f"unrecognized arguments: {flag}{flag[-1]}")
        assert f"(did you mean '{flag}'?); see '{parser.prog} --help'" in capsys.readouterr().err


def test_a_hint_is_of_the_subcommand_that_the_flag_was_given_to(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["data", "prepare", "books", "--out", "x", "--segmnt", "3"], ["memory", "diff", "a", "b", "--text"]):
        line = refusal(parser_of(words[0]), words[1:], capsys)
        assert line.startswith(f"brt {words[0]} {words[1]}: error: unrecognized arguments: --")
        assert "did you mean '--segment'" not in line


@pytest.mark.parametrize("parser", ALL, ids=lambda parser: parser.prog)
def test_a_number_that_makes_no_sense_is_wrong_usage(parser: OneLineParser, capsys: pytest.CaptureFixture[str]) -> None:
    for action in (action for action in parser._actions if action.type in (int, float) and action.option_strings):
        for value in ("nan", "inf", "-inf", "1e999", "x", "") + (("9" * 30, "1.5") if action.type is int else ()):
            line = refusal(parser, [f"{action.option_strings[-1]}={value}"], capsys)
            assert f"invalid {action.type.__name__} value" in line


def test_help_of_a_subcommand(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["help", "data", "prepare"])
    assert stop.value.code == 0
    assert "usage: brt data prepare" in capsys.readouterr().out


@pytest.mark.parametrize("module", ["argparse", "block_recurrent.cli.main", "block_recurrent.cli.presets", "torch"])
def test_ctrl_c_during_any_import_is_one_line(module: str) -> None:
    code = f"""
import signal, sys
class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            signal.raise_signal(signal.SIGINT)
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.modules.pop("argparse", None)
sys.meta_path.insert(0, Interrupt())
sys.argv = ["brt", "doctor" if {module!r} == "torch" else "presets"]
from block_recurrent.__main__ import main
sys.exit(main())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (130, "brt: stopped\n")


def test_ctrl_c_at_exit_is_ignored() -> None:
    """What was asked for is done, and printed."""
    code = f"""
import atexit, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
atexit.register(lambda: signal.raise_signal({int(signal.SIGINT)}))
sys.argv = ["brt", "--version"]
from block_recurrent.__main__ import main
sys.exit(main())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
