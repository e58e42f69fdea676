"""`brt completion`: print a shell script for tab completion of commands and options."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from block_recurrent.presets import SIZES, SYSTEMS

SHELLS = ("bash", "zsh", "fish")
_VALUES = {"--system": list(SYSTEMS), "--against": list(SYSTEMS), "--size": list(SIZES)}

# Commands come first, then subcommands (`brt data prepare`), then options; file names complete as usual.
_BASH = """_brt() {{
    local words="" path="${{COMP_WORDS[1]}}"
    case "${{COMP_WORDS[COMP_CWORD-1]}}" in
        --system|--against) COMPREPLY=($(compgen -W "{systems}" -- "${{COMP_WORDS[COMP_CWORD]}}")); return;;
        --size) COMPREPLY=($(compgen -W "{sizes}" -- "${{COMP_WORDS[COMP_CWORD]}}")); return;;
    esac
    if [ "$COMP_CWORD" -eq 1 ]; then path=""; fi
    if [ "$COMP_CWORD" -gt 2 ]; then path="$path ${{COMP_WORDS[2]}}"; fi
    case "$path" in
{cases}
    esac
    COMPREPLY=($(compgen -W "$words" -- "${{COMP_WORDS[COMP_CWORD]}}"))
}}
complete -o default -F _brt brt
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS, help="the shell to print a script for")


def run(args: argparse.Namespace) -> int:
    tree = dict(_words())
    if args.shell == "fish":
        print("\n".join(_fish(tree)))
        return 0
    if args.shell == "zsh":
        print("autoload -U +X bashcompinit && bashcompinit")
    cases = "\n".join(
        f'        "{path}"{_any_below(path, tree)}) words="{" ".join(words)}";;' for path, words in tree.items()
    )
    print(_BASH.format(cases=cases, systems=" ".join(SYSTEMS), sizes=" ".join(SIZES)), end="")
    return 0


def _any_below(path: str, tree: dict[str, list[str]]) -> str:
    """Commands without subcommands match any first argument."""
    has_commands = any(other.startswith(f"{path} ") for other in tree)
    return "" if not path or " " in path or has_commands else "*"


def _words() -> Iterator[tuple[str, list[str]]]:
    """What may follow `brt`, `brt COMMAND` and `brt COMMAND COMMAND`."""
    from block_recurrent.cli.main import COMMANDS, parser_of

    yield "", [*COMMANDS, "help", "--help", "--version"]
    for name in COMMANDS:
        parser = parser_of(name)
        below = _commands_of(parser)
        yield name, [*below, *_options_of(parser)]
        for command, sub in below.items():
            yield f"{name} {command}", _options_of(sub)


def _commands_of(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


def _options_of(parser: argparse.ArgumentParser) -> list[str]:
    return [option for action in parser._actions for option in action.option_strings if option.startswith("--")]


def _fish(tree: dict[str, list[str]]) -> Iterator[str]:
    for path, words in tree.items():
        names = path.split()
        condition = (
            "__fish_use_subcommand" if not names else "; and ".join(f"__fish_seen_subcommand_from {n}" for n in names)
        )
        for word in words:
            values = _VALUES.get(word, [])
            what = f"-l {word[2:]}" if word.startswith("--") else f"-f -a {word}"
            what += f" -x -a '{' '.join(values)}'" if values else ""
            yield f"complete -c brt -n '{condition}' {what}"
