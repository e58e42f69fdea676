"""The memory of a document in the place where transformers has its key-value cache."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from block_recurrent.model.memory import DocumentMemory


class BlockRecurrentCache:
    """A `DocumentMemory` as `past_key_values`. A value: the model returns the next one and leaves this as it is."""

    is_compileable = False

    def __init__(self, memory: DocumentMemory) -> None:
        self.memory = memory

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """0: `generate` cuts this many tokens from the front of its input, and none of it has been read yet.

        How much the memory has read in all is `tokens_read`.
        """
        return 0

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        """No limit: a memory never fills up."""
        return -1

    @property
    def tokens_read(self) -> list[int]:
        """Tokens that each lane has read, the document mark counted."""
        return self.memory.tokens_read.tolist()

    @property
    def lanes(self) -> int:
        return self.memory.lanes

    def select(self, lanes: Sequence[int] | Tensor) -> BlockRecurrentCache:
        """The lanes named, in that order: for beam search."""
        return BlockRecurrentCache(self.memory.select(lanes.tolist() if isinstance(lanes, Tensor) else lanes))

    def repeat(self, times: int) -> BlockRecurrentCache:
        """Every lane so many times, side by side."""
        return self.select([lane for lane in range(self.lanes) for _ in range(times)])

    def save(self, path: str | Path) -> None:
        """Write a memory file; see `DocumentMemory.save`."""
        self.memory.save(path)

    @classmethod
    def load(cls, path: str | Path) -> BlockRecurrentCache:
        """Read a memory file. The model that gets it checks that it made it."""
        return cls(DocumentMemory.load(path))
