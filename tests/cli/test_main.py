"""The command line's frame: help, one-line errors, exit codes."""

from __future__ import annotations

import argparse
import importlib
import shlex
import subprocess
import sys
from collections.abc import Iterator

import pytest

from block_recurrent.cli.main import COMMANDS, main, parser_of


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
    assert stop.value.code == 0
    assert f"example: brt {command}" in capsys.readouterr().out


def parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Of a command and its subcommands."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from parsers(below)


@pytest.mark.parametrize("command", COMMANDS)
def test_its_help_has_a_description_and_valid_examples(command: str) -> None:
    for parser in parsers(parser_of(command)):
        assert parser.description, parser.prog
        example = (parser.epilog or "").removeprefix("example: ")
        brt, name, *words = shlex.split(example.split(" > ")[0])
        assert (brt, name) == ("brt", command)
        parser_of(command).parse_args(words)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_two_functions(command: str) -> None:
    module = importlib.import_module(f"block_recurrent.cli.{COMMANDS[command][0]}")
    assert callable(module.add_arguments)
    assert callable(module.run)


def test_an_unknown_command_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["preset"]) == 2
    assert "there is no command 'preset' (did you mean 'presets'?)" in capsys.readouterr().err


def test_a_wrong_option_is_one_line_and_exit_code_2() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "block_recurrent", "presets", "--vocab", "7"], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "--vocab" in done.stderr


def test_a_users_error_is_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["presets", "--size", "tinny"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("brt: error: there is no size 'tinny' (did you mean 'tiny'?)")
    assert error.count("\n") == 1


def test_a_closed_pipe_is_no_error() -> None:
    done = subprocess.run(
        f"{sys.executable} -m block_recurrent presets | head -n 1", shell=True, capture_output=True, text=True
    )
    assert "Traceback" not in done.stderr
