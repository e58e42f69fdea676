"""Reading text in calls that end at fixed positions: at multiples of a number of tokens of the document.

The calls depend only on the text, not on other requests, and reading from a checkpoint at such a
position gives the same result, bit for bit, as reading the text from its beginning.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from block_recurrent.analysis.inspector import watched_gates
from block_recurrent.data import Tokenizer
from block_recurrent.data.utf8 import to_utf8
from block_recurrent.inference.engine import Engine
from block_recurrent.inference.session import Session
from block_recurrent.inference.session_state import SessionState
from block_recurrent.inference.text_hash import TextHash
from block_recurrent.inference.text_input import settled, tokens_of
from block_recurrent.model.memory import DocumentMemory
from block_recurrent.serve.scheduler import Scheduler

CALL_TOKENS = 512
"""Tokens per call, in whole blocks: more are faster, fewer let generation continue sooner."""
SHARED_TOKENS = 16
"""Up to this number, tokens are read one by one in the calls that generate other texts. For a text alone, a call of its
own is as fast for 8 of them; among 16 others, those of its own are 16 times the work."""
MOST_POINTS = 64
"""Maximum number of points of a trace: beyond it, the one that stands closest to others is dropped."""
Tokens = NDArray[np.int64]


@dataclass(frozen=True)
class Served:
    """A served model."""

    id: str
    name: str
    """Its name in memory files."""
    engine: Engine
    tokenizer: Tokenizer
    scheduler: Scheduler
    created: int

    @property
    def call_tokens(self) -> int:
        window = self.engine.config.window
        return max(1, CALL_TOKENS // window) * window

    def session(self, state: SessionState | None = None) -> Session:
        return Session(self.engine, self.tokenizer, name=self.name, state=state)

    @cached_property
    def beginning(self) -> SessionState:
        """The state of the beginning of a document. One for all requests: it is prepared for decoding once."""
        return self.session().state


class Piece(NamedTuple):
    """Tokens that can no longer change, their text, and the text held back after them."""

    tokens: Tokens
    raw: bytes
    held: bytes


def encoded(tokenizer: Tokenizer, state: SessionState, texts: Iterable[str], last: bool = False) -> Iterator[Piece]:
    """The tokens of a text that follows a state, as in `Session.read`; last: nothing is held back."""
    held, begun = state.held, state.position > 0
    for text in texts:
        buffer = held + to_utf8(text)
        ready = len(buffer) if last else settled(tokenizer, buffer)
        tokens = tokens_of(tokenizer, buffer[:ready], at_beginning=not begun)
        begun, held = begun or len(tokens) > 0, buffer[ready:]
        yield Piece(tokens, buffer[:ready], held)


class Prefix(NamedTuple):
    """The hash chain of a document's tokens from its beginning, for one model."""

    chain: TextHash

    @classmethod
    def of(cls, model: Served) -> Prefix:
        return cls(TextHash().update(model.engine.fingerprint().encode()))

    def then(self, tokens: Tokens) -> Prefix:
        return Prefix(self.chain.update(tokens.astype("<i4").tobytes()))

    def key(self) -> str:
        return self.chain.hexdigest()[:32]


class Reading:
    """A document being read."""

    def __init__(self, model: Served, state: SessionState, prefix: Prefix | None = None, watch: bool = False) -> None:
        """prefix: hash of the tokens before, if all of them were read in calls that ended at the fixed positions."""
        self.model, self.state, self.prefix = model, state, prefix
        self.trace: dict[str, Any] = {}
        self._watch = watch
        self._rest: Tokens = np.empty(0, np.int64)

    async def add(self, tokens: Tokens, reached: Callable[[Reading], Awaitable[None]] | None = None) -> None:
        """Read as many whole calls as possible. `reached` is called at each of the fixed positions."""
        tokens = np.concatenate([self._rest, tokens])
        start, size = 0, self.model.call_tokens
        while len(tokens) - start >= (count := size - self.state.position % size):
            await self._call(tokens[start : start + count])
            start += count
            if reached:
                await reached(self)
        self._rest = tokens[start:]

    async def finish(self) -> SessionState:
        """Read the rest; the end of a text is not a fixed position."""
        if len(self._rest):
            await self._call(self._rest)
            self._rest = self._rest[:0]
        return self.state

    async def _call(self, tokens: Tokens) -> None:
        before, scheduler = self.state.memory, self.model.scheduler
        fed, gates = self.state.fed(tokens), dict[tuple[int, str], list[float]]()
        if len(fed) <= SHARED_TOKENS and not self._watch:
            memory = await scheduler.read(fed, before)
        else:
            memory = await scheduler.call(
                partial(_read, self.model.engine, fed, before, gates if self._watch else None)
            )
        raw = self.model.tokenizer.decode_bytes(tokens, begin=self.state.position == 0)
        self.state = self.state.after(memory, tokens, raw)
        if self.prefix is not None:
            self.prefix = self.prefix.then(tokens)
        if self._watch:
            self.trace = _with_point(self.trace, before, self.state, gates)


def prompt_tokens(model: Served, state: SessionState, prompt: str | list[int]) -> Piece:
    """The tokens of a prompt that follows a state, including the text held back there; nothing is held back after."""
    (piece,) = encoded(model.tokenizer, state, [prompt if isinstance(prompt, str) else ""], last=True)
    if isinstance(prompt, str):
        return piece
    tokens = model.session().checked(prompt).astype(np.int64)
    begins = state.position == 0 and len(piece.tokens) == 0
    raw = piece.raw + model.tokenizer.decode_bytes(tokens, begin=begins)
    return Piece(np.concatenate([piece.tokens, tokens]), raw, b"")


async def in_pieces(texts: Iterator[Piece]) -> AsyncGenerator[Piece]:
    """The same, encoded in another thread."""
    while (piece := await asyncio.to_thread(next, texts, None)) is not None:
        yield piece


def _read(
    engine: Engine, tokens: Tokens, memory: DocumentMemory, gates: dict[tuple[int, str], list[float]] | None
) -> DocumentMemory:
    """The memory after these tokens. gates: to which the means of all gates are added."""
    if gates is None:
        return engine.prefill([tokens], memory)[1]
    with watched_gates(
        engine.snapshot.model, lambda layer, name, mean: gates.setdefault((layer, name), []).append(mean)
    ):
        return engine.prefill([tokens], memory)[1]


def _with_point(
    trace: dict[str, Any], before: Any, after: SessionState, gates: dict[tuple[int, str], list[float]]
) -> dict[str, Any]:
    """The trace extended by this call: gates, norm and change of the state, for each recurrent layer."""
    point: dict[str, float] = {"at": after.position}
    for i, (old, new) in enumerate(zip(before.layers, after.memory.layers, strict=True)):
        if new.state is not None:
            point[f"{i + 1} state length"] = new.state.norm(dim=-1).mean().item()
            point[f"{i + 1} state change"] = ((new.state - old.state).norm() / new.state.norm().clamp_min(1e-12)).item()
    point |= {f"{i + 1} {name}": sum(means) / len(means) for (i, name), means in gates.items()}
    longer = {name: [*trace.get(name, []), round(value, 4)] for name, value in point.items()}
    while len(at := longer["at"]) > MOST_POINTS:
        closest = min(range(1, len(at) - 1), key=lambda i: at[i + 1] - at[i - 1])
        longer = {name: values[:closest] + values[closest + 1 :] for name, values in longer.items()}
    return longer
