"""The command `brt`: a table of commands, each in a module of its own that is imported only when asked for.

A command module has `add_arguments(parser)` and `run(args)`. It imports torch inside `run`, never at the top, so that
help and usage errors come at once.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from block_recurrent.allocator import keep_freed_memory
from block_recurrent.errors import BlockRecurrentError, did_you_mean

COMMANDS = {
    # name: (module, what it does, an example)
    "demo": ("demo", "all of it in five minutes, on text that every machine has", "brt demo"),
    "train": (
        "train",
        "train a model, or go on training it",
        "brt train --system rec-fixed-skip --size tiny --data build/books --out runs/first",
    ),
    "export": ("export", "write a run as a Hugging Face folder, or as one file", "brt export runs/first hf/first"),
    "eval": (
        "eval",
        "bits per token, bits per byte and word-level perplexity of a run",
        "brt eval runs/first --data build/books --split test --json scores.json",
    ),
    "compare": (
        "compare",
        "two runs, or one with and without its memory, token by token, as a report",
        "brt compare runs/rec runs/slide --data build/books --out reports/rec-slide",
    ),
    "headroom": (
        "headroom",
        "what a plain cache of the document would still save, and what the memory has taken of it",
        "brt headroom runs/first --data build/books --split test",
    ),
    "inspect": (
        "inspect_memory",
        "what the recurrent state does while a text is read",
        "brt inspect runs/first book.txt --out memory.html",
    ),
    "recall": (
        "recall",
        "train on planted names, and measure recall by distance",
        "brt recall --system rec-fixed-skip --out build/recall",
    ),
    "read": (
        "read",
        "read a text once, and keep its memory in a file",
        "brt read runs/first book.txt --memory book.memory",
    ),
    "write": (
        "write",
        "write on from a memory or a prompt",
        "brt write runs/first --memory book.memory --tokens 200 --temperature 0.8",
    ),
    "score": (
        "score",
        "how well a text is predicted from a memory",
        "brt score runs/first --memory book.memory --text next.txt",
    ),
    "memory": ("memory", "look at memory files, compare them", "brt memory info book.memory"),
    "data": ("data", "prepare documents, look at them, check them", "brt data prepare books/ --out build/books"),
    "tokenizer": (
        "tokenizer",
        "train a vocabulary of your own",
        "brt tokenizer train --vocab-size 8000 --out books.model books/",
    ),
    "reproduce": (
        "reproduce",
        "a table of the paper, at a size that this machine can train",
        "brt reproduce table1 --size tiny --data build/books --budget 20",
    ),
    "bench": ("bench", "measure speed, side by side", "brt bench data"),
    "presets": ("presets", "list the systems and sizes of the paper", "brt presets --size tiny"),
    "doctor": ("doctor", "what this machine has, and what is made of it", "brt doctor"),
    "completion": ("completion", "complete commands with the tab key", "brt completion bash > ~/.brt && . ~/.brt"),
}

USER_ERROR = 2
INTERRUPTED = 130


class OneLineParser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one line: what was wrong and where help is."""

    def error(self, message: str) -> NoReturn:
        self.exit(USER_ERROR, f"{self.prog}: error: {message}; see '{self.prog} --help'\n")


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
        "'brt COMMAND --help' says more, with an example. 'brt --version' prints the version.",
    ]
    return "\n".join(lines)


def dispatch(argv: Sequence[str]) -> int:
    """Run one command; errors of ours are raised."""
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
    module_name, summary, example = COMMANDS[name]
    module = importlib.import_module(f"block_recurrent.cli.{module_name}")
    parser = OneLineParser(
        prog=f"brt {name}",
        description=summary,
        epilog=f"example: {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    module.add_arguments(parser)
    args = parser.parse_args(rest)
    keep_freed_memory()
    return module.run(args) or 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code. A user's error is one line on stderr and exit code 2."""
    try:
        return dispatch(sys.argv[1:] if argv is None else argv)
    except BlockRecurrentError as error:
        print(f"brt: error: {error}", file=sys.stderr)
        return USER_ERROR
    except KeyboardInterrupt:
        print("brt: stopped", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of our output (`brt ... | head`) has gone: nothing to say, and nobody to say it to.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


if __name__ == "__main__":
    sys.exit(main())
