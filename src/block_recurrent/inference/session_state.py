"""Where a session stands, as a value: nothing in it is ever changed, so a fork is a second name for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from block_recurrent.inference.sampling import REMEMBERED_TOKENS
from block_recurrent.inference.text_hash import TextHash
from block_recurrent.model.memory import DocumentMemory

Tokens = NDArray[np.int64]


@dataclass(frozen=True)
class SessionState:
    """The memory of all tokens but the last, the last one, and what belongs to the text around it."""

    memory: DocumentMemory  # one lane: everything that the model was given, the document mark first
    pending: int  # the token that the model gets next: the last one of the text, or the document mark before the first
    recent: tuple[int, ...] = ()  # the last tokens of the text, at most 512
    held: bytes = b""  # text that has come, but whose tokens are not settled
    text: TextHash = field(default_factory=TextHash)  # hash of the text whose tokens have come

    @property
    def position(self) -> int:
        """Tokens of the text: the mark is none, and the pending one has not been fed."""
        return int(self.memory.tokens_read[0])

    def after(self, memory: DocumentMemory, tokens: Sequence[int] | Tokens, text: bytes) -> SessionState:
        """The state after tokens (at least one), all but the last of which are in `memory`; text: their UTF-8."""
        return replace(
            self,
            memory=memory,
            pending=int(tokens[-1]),
            recent=(*self.recent, *map(int, tokens[-REMEMBERED_TOKENS:]))[-REMEMBERED_TOKENS:],
            text=self.text.update(text),
        )

    def fed(self, tokens: Tokens) -> Tokens:
        """What the model gets when these tokens come: the pending one first, the last one not yet."""
        return np.concatenate([[self.pending], tokens[:-1]])
