"""Needle in a book: a sentence planted before thousands of tokens of a real book, and queried after them.

    needle, d tokens of the book, question -> answer

A trained model reads the book once, and is queried at each distance from a copy of its memory: with the memory, with
the state reset (the window's cache is kept), and with an empty memory. The answer's
rank is among all possible answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from block_recurrent.data import Tokenizer
from block_recurrent.errors import ConfigError, DataError
from block_recurrent.evaluate.state_edits import initial_states
from block_recurrent.inference.engine import Engine
from block_recurrent.io.progress import Progress
from block_recurrent.model.language_model import BlockRecurrentLM
from block_recurrent.model.memory import DocumentMemory

ANSWERS = "Lisbon,Cairo,Vienna,Oslo,Delhi,Quebec,Naples,Havana,Athens,Geneva,Dublin,Prague,Boston,Tokyo,Lima,Madrid"
HOW = ("memory", "without state", "nothing")


@dataclass(frozen=True)
class Needle:
    """The planted sentence and the question. The answer directly follows the question."""

    sentence: str = "\n\nRemember this: the treasure of Captain Harker is hidden in {answer}.\n\n"
    question: str = "\n\nRemember this: the treasure of Captain Harker is hidden in"
    answers: tuple[str, ...] = tuple(f" {name}" for name in ANSWERS.split(","))
    distances: tuple[int, ...] = (1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000, 200_000)
    tries: int = 4  # per book, each with another answer

    def __post_init__(self) -> None:
        if "{answer}" not in self.sentence:
            raise ConfigError(f"--needle {self.sentence!r}: it must contain {{answer}}, the place of the answer")
        if len(set(self.answers)) < 2:
            raise ConfigError(f"--answers has {len(set(self.answers))}: a rank needs at least 2 different ones")
        if not self.distances or min(self.distances) < 1:
            raise ConfigError(f"--distances is {list(self.distances)}: each must be at least 1 token")


def find_needles(
    model: BlockRecurrentLM, tokenizer: Tokenizer, books: dict[str, str], needle: Needle, progress: Progress
) -> list[dict[str, Any]]:
    """Rank and bits of the answer by book, answer, distance and memory."""
    engine, results = Engine(model), []
    shortest = min(needle.distances)
    texts = {name: tokenizer.encode(text) for name, text in books.items()}
    for name, tokens in texts.items():
        if len(tokens) < shortest:
            raise DataError(f"'{name}' has {len(tokens):,} tokens, fewer than the shortest distance, {shortest:,}")
    whole = sum(min(max(needle.distances), len(tokens)) for tokens in texts.values()) * needle.tries
    done = 0
    for name, tokens in texts.items():
        for number in range(needle.tries):
            rng = np.random.default_rng(number)
            chosen = int(rng.integers(len(needle.answers)))
            for row in _one_needle(engine, model, tokenizer, tokens, needle, chosen):
                results.append({"book": name, "answer": needle.answers[chosen].strip(), **row})
                progress(done + row["distance"], whole)
            done += min(max(needle.distances), len(tokens))
    return results


def _one_needle(
    engine: Engine,
    model: BlockRecurrentLM,
    tokenizer: Tokenizer,
    book: NDArray[np.int32],
    needle: Needle,
    chosen: int,
) -> list[dict[str, Any]]:
    """One pass over the book; a memory is a value, so queries do not affect the reading."""
    answer = needle.answers[chosen]
    planted = tokenizer.encode(needle.sentence.format(answer=answer.strip() if answer.startswith(" ") else answer))
    question = tokenizer.encode(needle.question)
    options = [_after(tokenizer, needle.question, option) for option in needle.answers]
    _, memory = engine.prefill([np.concatenate([[engine.config.eos_token_id], planted])])
    nothing = _asked(engine, None, np.concatenate([[engine.config.eos_token_id], question]), options, chosen)
    rows, read = [], 0
    for distance in sorted(d for d in needle.distances if d <= len(book)):
        _, memory = engine.prefill([book[read:distance]], memory)
        read = distance
        forgetful = _without_state(memory, model) if model.config.recurrent_layers else memory
        found = [_asked(engine, known, question, options, chosen) for known in (memory, forgetful)] + [nothing]
        values = {how: {"rank": rank, "bits": bits} for how, (rank, bits) in zip(HOW, found, strict=True)}
        rows.append({"distance": distance, **values})
    return rows


def _after(tokenizer: Tokenizer, question: str, option: str) -> NDArray[np.int32]:
    """The tokens of an answer as they follow the question."""
    before, both = tokenizer.encode(question), tokenizer.encode(question + option)
    if not np.array_equal(both[: len(before)], before):
        raise ConfigError(
            f"the answer {option!r} changes the tokens of the question before it: end the question with a whole word"
        )
    return both[len(before) :]


def _asked(
    engine: Engine,
    memory: DocumentMemory | None,
    question: NDArray[Any],
    options: Sequence[NDArray[np.int32]],
    chosen: int,
) -> tuple[int, float]:
    """Rank, from 1, and bits of the chosen answer after the question."""
    lanes = None if memory is None else DocumentMemory.cat([memory] * len(options))
    rows = [np.concatenate([question, option[:-1]]) for option in options]
    targets = [np.concatenate([question[1:], option]) for option in options]
    scored = engine.score(rows, targets, lanes)
    bits = [float(nats[len(question) - 1 :].sum() / np.log(2)) for nats in scored.nats]
    return 1 + sum(other < bits[chosen] for other in bits), bits[chosen]


def _without_state(memory: DocumentMemory, model: BlockRecurrentLM) -> DocumentMemory:
    """The same memory with the learned initial state."""
    first = initial_states(model)
    layers = [
        layer if layer.state is None else replace(layer, state=first[i].to(layer.state)[None].expand_as(layer.state))
        for i, layer in enumerate(memory.layers)
    ]
    return replace(memory, layers=tuple(layers))


def summary(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Means by distance."""
    rows = []
    for distance in sorted({row["distance"] for row in results}):
        here = [row for row in results if row["distance"] == distance]
        means = {
            f"{how}, {what}": float(np.mean([row[how][what] for row in here]))
            for how in HOW
            for what in ("rank", "bits")
        }
        rows.append({"distance": distance, "asked": len(here), **means})
    return rows
