"""Several sessions in one batch: each has the same result as alone.

Sessions may be at different positions and get texts of different lengths; the model takes a different number of
tokens in each lane, so padding has no effect.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from block_recurrent.data import Tokenizer
from block_recurrent.data.utf8 import to_utf8
from block_recurrent.errors import ConfigError, InputError
from block_recurrent.inference.device_decode import DeviceWriting
from block_recurrent.inference.engine import Engine, engine_of
from block_recurrent.inference.sampling import Sampling, check_max_tokens
from block_recurrent.inference.session import Session
from block_recurrent.inference.text_input import tokens_of
from block_recurrent.inference.writer import MARK, Writer, Written, WrittenToken, chosen
from block_recurrent.model.language_model import BlockRecurrentLM
from block_recurrent.model.memory import DocumentMemory


def write_batch(
    model: BlockRecurrentLM | Engine,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    max_tokens: int = 256,
    seeds: Sequence[int] | None = None,
    **options: Any,
) -> list[Written]:
    """Generate a continuation of each prompt, as a new document, in one batch.

    Args:
        model: a model, or an `Engine`.
        tokenizer: the model's tokenizer.
        prompts: the beginnings of the texts; they may be empty, and differ in length.
        max_tokens: the maximum number of tokens per text.
        seeds: a random seed per prompt; default: `seed` for all.
        **options: the fields of `Sampling`.
    """
    sampling = Sampling.of(**options)
    check_max_tokens(max_tokens)
    if isinstance(prompts, str) or not all(isinstance(prompt, str) for prompt in prompts):
        raise InputError("prompts must be a list of strings")
    engine = engine_of(model)
    sessions = [Session(engine, tokenizer) for _ in prompts]
    read_together(sessions, prompts)
    return write_together(sessions, max_tokens, sampling, seeds)


def read_together(sessions: Sequence[Session], texts: Sequence[str]) -> None:
    """Each session reads its text to the end; nothing is held back."""
    if len(sessions) != len(texts):
        raise InputError(f"there are {len(sessions)} sessions and {len(texts)} texts: each session reads one")
    engine, tokenizer = _shared(sessions)
    raws = [session.state.held + to_utf8(text) for session, text in zip(sessions, texts, strict=True)]
    rows = [tokens_of(tokenizer, raw, session.position == 0) for session, raw in zip(sessions, raws, strict=True)]
    busy = [lane for lane, row in enumerate(rows) if len(row)]
    if not busy:
        return
    memory = DocumentMemory.cat([sessions[lane].memory for lane in busy])
    _, memory = engine.prefill([sessions[lane].state.fed(rows[lane]) for lane in busy], memory)
    for index, lane in enumerate(busy):
        state = replace(sessions[lane].state, held=b"")
        sessions[lane].state = state.after(_lane(memory, index), rows[lane], raws[lane])


def write_together(
    sessions: Sequence[Session], max_tokens: int, sampling: Sampling, seeds: Sequence[int] | None = None
) -> list[Written]:
    """Generate from each session, with the seed of the sampling or with individual ones, sharing the model's calls."""
    engine, tokenizer = _shared(sessions)
    if seeds is not None and len(seeds) != len(sessions):
        raise ConfigError(f"there are {len(seeds)} seeds for {len(sessions)} sessions: give one per session")
    if sampling.beams > 1:
        from block_recurrent.inference.beam import search

        return [search(session, max_tokens, sampling)[0] for session in sessions]
    for session in sessions:
        session.flush()
    own = [sampling if seeds is None else replace(sampling, seed=seed) for seed in seeds or [0] * len(sessions)]
    writers = [Writer(tokenizer, session.state, s, max_tokens) for session, s in zip(sessions, own, strict=True)]
    written: list[list[WrittenToken]] = [[] for _ in sessions]
    writing = engine.writing([session.state for session in sessions], own, tokenizer.eos_token_id)
    if writing is not None:
        _write_on_device(writing, sessions, writers, written)
    else:
        _write_on_host(engine, sessions, writers, written)
    return [_collect(tokens, writer, tokenizer.eos_token_id) for tokens, writer in zip(written, writers, strict=True)]


def _write_on_device(
    writing: DeviceWriting, sessions: Sequence[Session], writers: list[Writer], written: list[list[WrittenToken]]
) -> None:
    """All lanes until the last one ends: their number is fixed."""
    while not all(writer.ended for writer in writers):
        for lane, (writer, choice) in enumerate(zip(writers, writing.step(), strict=True)):
            if writer.ended:
                continue
            written[lane].append(writer.accept(choice, writer.state.memory))
            if writer.ended:
                # A mark was not fed, and the token before it has to be fed again.
                sessions[lane].state = replace(writer.state, memory=writing.memory(lane, before=writer.ended == MARK))


def _write_on_host(
    engine: Engine, sessions: Sequence[Session], writers: list[Writer], written: list[list[WrittenToken]]
) -> None:
    busy = list(range(len(sessions)))
    memory = DocumentMemory.cat([session.memory for session in sessions])
    while busy:
        logits, after = engine.decode([writers[lane].state.pending for lane in busy], memory)
        choices = chosen([writers[lane] for lane in busy], logits)
        for index, (lane, choice) in enumerate(zip(busy, choices, strict=True)):
            writer = writers[lane]
            written[lane].append(writer.accept(choice, after))
            if writer.ended:
                # A mark was not fed, and the token before it has to be fed again.
                own_memory = _lane(memory if writer.ended == MARK else after, index)
                sessions[lane].state = replace(writer.state, memory=own_memory)
        left = [index for index, lane in enumerate(busy) if not writers[lane].ended]
        memory = after if len(left) == len(busy) or not left else after.select(left)
        busy = [busy[index] for index in left]


def _collect(written: list[WrittenToken], writer: Writer, mark: int) -> Written:
    text = "".join(part.text for part in written)
    tokens = [part for part in written if part.token != mark]
    return Written(
        text, tuple(part.token for part in tokens), tuple(part.log_prob for part in tokens), ended=writer.ended
    )


def _lane(memory: DocumentMemory, index: int) -> DocumentMemory:
    return memory if memory.lanes == 1 else memory.select([index])


def _shared(sessions: Sequence[Session]) -> tuple[Engine, Tokenizer]:
    if not sessions:
        raise InputError("there are no sessions: give at least one")
    first = sessions[0]
    mine = first.engine.fingerprint()
    if any(s.engine.fingerprint() != mine or s.tokenizer is not first.tokenizer for s in sessions):
        raise InputError("the sessions have different models or tokenizers: a batch needs a single model")
    if len({id(session) for session in sessions}) < len(sessions):
        raise InputError("a session occurs twice: fork it, so that each has its own text")
    return first.engine, first.tokenizer
