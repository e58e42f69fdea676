"""The memory of a document as the key-value cache of transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from block_recurrent.model.memory import DocumentMemory


class BlockRecurrentCache:
    """A `DocumentMemory` as `past_key_values`. It is immutable: the model returns a new one."""

    is_compileable = False

    def __init__(self, memory: DocumentMemory) -> None:
        self.memory = memory

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """0: `generate` cuts this many tokens from the front of its input, and none of it has been read yet.

        `tokens_read` has the total number of tokens.
        """
        return 0

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        """No limit: a memory never fills up."""
        return -1

    @property
    def tokens_read(self) -> list[int]:
        """Number of tokens that each lane has read, including the document mark."""
        return self.memory.tokens_read.tolist()

    @property
    def lanes(self) -> int:
        return self.memory.lanes

    def select(self, lanes: Sequence[int] | Tensor) -> BlockRecurrentCache:
        """The given lanes, in that order: for beam search."""
        return BlockRecurrentCache(self.memory.select(lanes.tolist() if isinstance(lanes, Tensor) else lanes))

    def repeat(self, times: int) -> BlockRecurrentCache:
        """Every lane repeated, as in `torch.repeat_interleave`."""
        return self.select([lane for lane in range(self.lanes) for _ in range(times)])

    def save(self, path: str | Path) -> None:
        """Write a memory file; see `DocumentMemory.save`."""
        self.memory.save(path)

    @classmethod
    def load(cls, path: str | Path) -> BlockRecurrentCache:
        """Load a memory file. The model checks that the memory belongs to it."""
        return cls(DocumentMemory.load(path))
