"""`brt write`: generate from a memory, a prompt, or nothing."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from block_recurrent.cli.output import add_json, check_outputs, give_json, text_of
from block_recurrent.cli.read import (
    add_run_arguments,
    bytes_of,
    check_memory_target,
    check_texts,
    not_empty,
    open_session,
)
from block_recurrent.errors import INTERRUPTED, ConfigError, DataError, OutputError

if TYPE_CHECKING:
    from block_recurrent.inference.sampling import Sampling
    from block_recurrent.inference.session import Session

# Options of Sampling: flag -> (type, help).
_SAMPLING: dict[str, tuple[type, str]] = {
    "--temperature": (float, "divides the logits; 0 is greedy (default: 1)"),
    "--top-k": (int, "sample from the k most likely tokens (default: all)"),
    "--top-p": (float, "sample from the most likely tokens that add up to this probability (default: 1)"),
    "--min-p": (float, "drop tokens less likely than this fraction of the most likely one (default: 0)"),
    "--repetition-penalty": (float, "values above 1 penalize tokens among the last 512 (default: 1)"),
    "--seed": (int, "random seed (default: 0)"),
    "--beams": (int, "use beam search with this many beams, instead of sampling"),
    "--length-penalty": (float, "for beam search: values above 0 favor longer texts (default: 1)"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_arguments(parser)
    parser.add_argument("--memory", metavar="FILE", help="the memory to start from (default: an empty memory)")
    parser.add_argument("--prompt", metavar="TEXT", help="text to read first")
    parser.add_argument(
        "--prompt-file", metavar="FILE", help="UTF-8 file to read first, of any length; - for standard input"
    )
    parser.add_argument("--tokens", type=int, default=256, metavar="N", help="number of tokens to generate")
    for flag, (kind, text) in _SAMPLING.items():
        parser.add_argument(flag, type=kind, metavar=kind.__name__.upper(), help=text)
    parser.add_argument("--stop", action="append", metavar="TEXT", help="stop before this text (repeatable)")
    parser.add_argument("--ignore-eos", "--go-on", action="store_true", help="generate all --tokens, without eos")
    parser.add_argument("--log-probs", metavar="FILE", help="write every token with its log-probability, as JSON lines")
    parser.add_argument("--save", metavar="FILE", help="save the memory after generating")
    add_json(parser)
    parser.add_argument(
        "--interactive", action="store_true", help="type text and let the model continue it; /help lists the commands"
    )


def run(args: argparse.Namespace) -> int:
    from block_recurrent.inference.interactive import Conversation
    from block_recurrent.inference.sampling import check_max_tokens
    from block_recurrent.inference.session_file import save_session
    from block_recurrent.inference.trail import Trail, continued

    sampling = _sampling(args)
    check_max_tokens(args.tokens)
    _check_paths(args)
    session = open_session(args, args.memory)
    has_trail = args.save and not args.interactive  # in a conversation, other memories may be loaded
    trail = continued(args.memory, Path(args.save)) if has_trail else Trail()
    stopped, start, written = False, 0, []
    problem, before = None, bytes_of(session)
    try:
        _read_prompt(session, args)
        start = session.position
        if args.interactive:
            Conversation(session, args.tokens, sampling).run()
        for piece in _pieces(session, args, sampling):
            written.append(piece)
            with text_of(args):
                print(piece, end="", flush=True)
    except KeyboardInterrupt:
        if bytes_of(session) == before:
            raise
        stopped = True  # what was read and generated so far is kept and saved
    except DataError as error:
        if not args.save or bytes_of(session) == before:
            raise
        problem = error  # what was read and generated before it is saved
    except BrokenPipeError:
        pass  # as well as what a pipe did not take
    if args.save:
        save_session(session, Path(args.save), trail.to_notes())
    if problem is not None:
        raise type(problem)(f"{problem}; what precedes it is in '{args.save}'")
    if not args.interactive:
        with text_of(args):
            print()
    facts = {
        "text": "".join(written),
        "tokens": session.position - start if written else 0,
        "position": session.position,
    }
    give_json(args, facts | {"stopped": stopped})
    return INTERRUPTED if stopped else 0


def _pieces(session: Session, args: argparse.Namespace, sampling: Sampling) -> Iterator[str]:
    """The generated text in pieces."""
    if args.interactive:
        return iter(())
    return _log_probs(session, args, sampling) if args.log_probs else session.write(args.tokens, sampling)


def _sampling(args: argparse.Namespace) -> Sampling:
    from block_recurrent.inference.sampling import Sampling

    options: dict[str, Any] = {
        name: value for flag in _SAMPLING if (value := getattr(args, name := flag[2:].replace("-", "_"))) is not None
    }
    return Sampling.of(**options, stop=args.stop or (), end_at_mark=not args.ignore_eos)


def _check_paths(args: argparse.Namespace) -> None:
    """Raise errors before the model is loaded, rather than after the text is generated."""
    if args.prompt == "":
        raise ConfigError("the prompt is empty: omit --prompt to generate from the memory, or unconditionally")
    if args.prompt is not None and args.prompt_file:
        raise ConfigError("--prompt and --prompt-file are both given: give one of them")
    if args.prompt_file:
        check_texts([args.prompt_file])
    if args.json and args.interactive:
        raise ConfigError("--json can't be combined with --interactive: a conversation has no single result")
    if args.log_probs and (args.interactive or (args.beams or 1) > 1):
        raise ConfigError("--log-probs can't be combined with --interactive or --beams")
    check_outputs(args, "log_probs", "json", beside=args.save)
    if args.save:
        check_memory_target(args.save, args.memory, args.overwrite)


def _read_prompt(session: Session, args: argparse.Namespace) -> None:
    if args.prompt:
        session.read(args.prompt)
    elif args.prompt_file:
        from block_recurrent.inference.text_input import read_text

        for piece in not_empty(args.prompt_file, read_text(args.prompt_file)):
            session.read(piece)


def _log_probs(session: Session, args: argparse.Namespace, sampling: Sampling) -> Iterator[str]:
    """The text of each token, whose line is written first."""
    try:
        with open(args.log_probs, "w", encoding="utf-8") as file:
            for written in session.write_tokens(args.tokens, sampling):
                file.write(json.dumps({"token": written.token, "log_prob": written.log_prob, "text": written.text}))
                file.write("\n")
                file.flush()
                yield written.text
    except OSError as error:
        raise OutputError(f"'{args.log_probs}' can't be written: {error.strerror or error}") from None
