"""The state of a session, as an immutable value: a fork is a second reference to it."""

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
    """The memory of all tokens but the last, the last token, and the text at the end."""

    memory: DocumentMemory  # one lane: everything that was fed to the model, beginning with the document mark
    pending: int  # the token to feed next: the last one of the text, or the document mark before the first
    recent: tuple[int, ...] = ()  # the last tokens of the text, at most 512
    held: bytes = b""  # text whose tokens may still change
    text: TextHash = field(default_factory=TextHash)  # hash of the text that has been tokenized

    @property
    def position(self) -> int:
        """Number of tokens of the text, without the mark, and with the pending one."""
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
        """The tokens to feed when these are added: from the pending one to the second last."""
        return np.concatenate([[self.pending], tokens[:-1]])
