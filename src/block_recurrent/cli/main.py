"""The command `brt`: a table of commands, each in its own module, which is imported only when it is run.

A command module has `add_arguments(parser)` and `run(args)`. It imports torch inside `run`, never at the top, so that
help and usage errors appear immediately.
"""

from __future__ import annotations

import argparse
import importlib
import io
import math
import os
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NoReturn, TextIO

from block_recurrent.allocator import keep_freed_memory
from block_recurrent.errors import FAILURE, INTERRUPTED, USAGE, BlockRecurrentError, did_you_mean, printable
from block_recurrent.io.door import COUNT_LIMIT

COMMANDS = {
    # name: (module, summary, example)
    "demo": ("demo", "read, generate, train and resume in five minutes", "brt demo"),
    "models": ("models", "list the bundled models, and show their cards", "brt models show code"),
    "train": (
        "train",
        "train a model, or resume training it",
        "brt train --system rec-fixed-skip --size tiny --data build/books --out runs/first",
    ),
    "export": ("export", "write a run as a Hugging Face folder, or as one file", "brt export runs/first hf/first"),
    "eval": (
        "eval",
        "compute bits per token, bits per byte and word-level perplexity of a run",
        "brt eval runs/first --data build/books --split test --json scores.json",
    ),
    "compare": (
        "compare",
        "compare two runs, or one with and without its memory, token by token",
        "brt compare runs/rec runs/slide --data build/books --out reports/rec-slide",
    ),
    "headroom": (
        "headroom",
        "measure what a plain cache of the document would still save",
        "brt headroom runs/first --data build/books --split test",
    ),
    "inspect": (
        "inspect_memory",
        "inspect the recurrent state while a text is read",
        "brt inspect runs/first book.txt --out memory.html",
    ),
    "harness": (
        "harness",
        "run tasks of lm-evaluation-harness on whole documents",
        "brt harness runs/first --books books/",
    ),
    "recall": (
        "recall",
        "train on planted names, and measure recall by distance",
        "brt recall --system rec-fixed-skip --out build/recall",
    ),
    "tasks": (
        "tasks",
        "train and measure memory tasks: copy, recall, regular languages, needles",
        "brt tasks run copy-24 --system rec-fixed-skip --against slide-plus --out build/tasks",
    ),
    "read": (
        "read",
        "read a text once, and save its memory to a file",
        "brt read runs/first book.txt --memory book.memory",
    ),
    "write": (
        "write",
        "generate from a memory or a prompt",
        "brt write runs/first --memory book.memory --tokens 200 --temperature 0.8",
    ),
    "score": (
        "score",
        "score a text, given a memory",
        "brt score runs/first next.txt --memory book.memory",
    ),
    "memory": ("memory", "inspect, compare and rewind memory files", "brt memory info book.memory"),
    "serve": (
        "serve",
        "serve models over HTTP: completions, named memories, and a web page",
        "brt serve runs/first --memories memories",
    ),
    "data": ("data", "prepare, inspect and verify documents", "brt data prepare books/ --out build/books"),
    "tokenizer": (
        "tokenizer",
        "train a tokenizer",
        "brt tokenizer train --vocab-size 8000 --out books.model books/",
    ),
    "reproduce": (
        "reproduce",
        "reproduce a table of the paper at a small size",
        "brt reproduce table1 --size tiny --data build/books --budget 20",
    ),
    "bench": ("bench", "run benchmarks", "brt bench data"),
    "presets": ("presets", "list the systems and sizes of the paper", "brt presets --size tiny"),
    "doctor": ("doctor", "show hardware and the settings chosen", "brt doctor"),
    "completion": ("completion", "print a script for tab completion", "brt completion bash > ~/.brt && . ~/.brt"),
}


class OneLineParser(argparse.ArgumentParser):
    """An ArgumentParser with one-line errors: what was wrong, a suggestion, and where to find help."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.register("type", int, _whole_number)
        self.register("type", float, _number)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Unknown arguments are an error of the subcommand that they were given to, which knows its options."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        message = re.sub(r" \(choose from .*\)$", "", message) if "invalid choice" in message else message
        wrong = re.search(r"unrecognized arguments: (--[\w-]+)|invalid choice: '([^']*)'", message)
        if wrong:
            message += did_you_mean(wrong[1] or wrong[2], self._known(wrong[1] is not None))
        self.exit(USAGE, f"{self.prog}: error: {printable(message)}; see '{self.prog} --help'\n")

    def _known(self, flags: bool) -> list[str]:
        """The flags, or the choices, of this command and of its subcommands."""
        known: list[str] = []
        for action in self._actions:
            known += [*action.option_strings] if flags else [*map(str, action.choices or ())]
            if isinstance(action, argparse._SubParsersAction):
                known += [word for parser in action.choices.values() for word in parser._known(flags)]
        return known


def _whole_number(text: str) -> int:
    """An option's value; a number that no count can be is invalid, like a word."""
    if abs(value := int(text)) >= COUNT_LIMIT:
        raise ValueError
    return value


def _number(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError
    return value


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Adds the default to every help text that does not mention it."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text = action.help or ""
        has_none = any(action.default is none for none in (None, False, argparse.SUPPRESS)) or action.default == []
        return text if has_none or "default" in text or not action.option_strings else f"{text} (default: %(default)s)"

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        """Wraps descriptions; examples stay on one line, to be copied."""
        if text.startswith("example:"):
            return super()._fill_text(text, width, indent)
        return argparse.HelpFormatter._fill_text(self, text, width, indent)


class _Terminal:
    """Standard output with control characters escaped: untrusted text can't send commands to the terminal."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, text: str) -> int:
        return self._file.write(printable(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def _overview() -> str:
    from block_recurrent import __version__

    width = max(map(len, COMMANDS))
    lines = [
        f"brt {__version__}: Block-Recurrent Transformers, language models that read whole books",
        "",
        "usage: brt COMMAND [options]",
        "",
        *(f"  {name:{width}}  {summary}" for name, (_, summary, _) in COMMANDS.items()),
        "",
        "'brt COMMAND --help' shows the options and an example. 'brt --version' prints the version.",
    ]
    return "\n".join(lines)


def dispatch(argv: Sequence[str]) -> int:
    """Run one command; raises BlockRecurrentError."""
    if argv and argv[0] == "help" and len(argv) > 1:
        argv = [*argv[1:], "--help"]
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(_overview())
        return 0
    name, *rest = argv
    if name == "--version":
        from block_recurrent import __version__

        print(__version__)
        return 0
    if name not in COMMANDS:
        raise BlockRecurrentError(f"there is no command '{name}'{did_you_mean(name, COMMANDS)}; see 'brt --help'")
    module = importlib.import_module(f"block_recurrent.cli.{COMMANDS[name][0]}")
    args = parser_of(name).parse_args(rest)
    keep_freed_memory()
    return module.run(args) or 0


def parser_of(name: str) -> OneLineParser:
    """The parser of a command."""
    module_name, summary, example = COMMANDS[name]
    parser = OneLineParser(
        prog=f"brt {name}",
        description=summary,
        epilog=f"example: {example}",
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    importlib.import_module(f"block_recurrent.cli.{module_name}").add_arguments(parser)
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                below.formatter_class = HelpFormatter
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 2 for wrong usage, 1 for a failure, each with one line on stderr."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # in any locale: names and texts may contain any character
            stream.reconfigure(errors="backslashreplace")
    if sys.stdout.isatty():
        sys.stdout = _Terminal(sys.stdout)
    try:
        code = dispatch(sys.argv[1:] if argv is None else argv)
        sys.stdout.flush()
        return code
    except BlockRecurrentError as error:
        return _failed(str(error), error.exit_code)
    except KeyboardInterrupt:
        print("brt: stopped", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of the output (`brt ... | head`) has exited: there is nothing to report.
        _discard_output()
        return 0
    except (OSError, MemoryError, RuntimeError) as error:
        is_full = isinstance(error, MemoryError) or ("memory" in str(error) and "alloc" in str(error))
        if isinstance(error, OSError):
            _discard_output()
            named = f" ('{error.filename}')" if error.filename else ""
            return _failed(f"{error.strerror or error}{named}", FAILURE)
        if not is_full:
            raise
        return _failed("out of memory: choose a smaller model, fewer lanes or fewer beams", FAILURE)


def _failed(message: str, code: int) -> int:
    print(f"brt: error: {printable(' '.join(message.splitlines()))}", file=sys.stderr)
    return code


def _discard_output() -> None:
    """Prevents a second attempt to write the output at exit."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
