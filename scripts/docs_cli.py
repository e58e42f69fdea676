"""The reference of the command line, made from the parsers of `brt`."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from block_recurrent.cli.main import COMMANDS, parser_of


def page() -> str:
    """All commands as Markdown."""
    lines = [
        "# Command line",
        "",
        "Generated from the command-line parsers; `brt COMMAND --help` prints the same text. Exit codes: 0 for success,"
        " 1 for a failure, 2 for wrong usage, 130 after Ctrl-C. Errors are one line on standard error.",
        "",
        "| command | purpose |",
        "| --- | --- |",
        *(f"| [`brt {name}`](#brt-{name}) | {summary} |" for name, (_, summary, _) in COMMANDS.items()),
    ]
    for name, (_, _, example) in COMMANDS.items():
        lines += ["", *_section(parser_of(name), 2), "", "```sh", example, "```"]
    return "\n".join(lines) + "\n"


def _section(parser: argparse.ArgumentParser, level: int) -> Iterator[str]:
    yield f"{'#' * level} {parser.prog}"
    if parser.description:
        yield from ("", f"{_sentence(parser.description)}")
    nested = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    shown = [a for a in parser._actions if a not in nested and a.dest != "help" and a.help is not argparse.SUPPRESS]
    if shown:
        yield from ("", "| argument | meaning | default |", "| --- | --- | --- |")
        yield from map(_row, shown)
    for action in nested:
        for below in action.choices.values():
            yield ""
            yield from _section(below, level + 1)


def _row(action: argparse.Action) -> str:
    flags = ", ".join(f"`{flag}`" for flag in action.option_strings)
    value = action.metavar or (action.dest.upper() if action.option_strings else action.dest)
    if action.choices:
        value = ", ".join(map(str, action.choices))
    takes_value = action.nargs != 0 and not isinstance(action, argparse.BooleanOptionalAction)
    name = f"{flags} {_cell(str(value)) if takes_value else ''}".strip() if flags else f"`{value}`"
    default = action.default
    hidden = default in (None, False, argparse.SUPPRESS) or default == [] or "default" in (action.help or "")
    return f"| {name} | {_cell(_expanded(action))} | {'' if hidden else _cell(f'`{default}`')} |"


def _expanded(action: argparse.Action) -> str:
    """The help with its %(name)s filled in, as argparse does it."""
    return (action.help or "") % (vars(action) | {"prog": "brt"}) if action.help else ""


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").replace("<", "&lt;").split())


def _sentence(text: str) -> str:
    text = _cell(text)
    return text[:1].upper() + text[1:] + ("" if text.endswith(".") else ".")
