"""Converts the input of transformers (a padded matrix, a mask, marks anywhere) to that of the model.

Padding is removed: rows are shifted to the left and have individual lengths. The document mark starts a document
anywhere, so the call is split where a row has one.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from block_recurrent.errors import InputError


@dataclass(frozen=True)
class Rows:
    """Tokens (B, N) without padding in front, and where they came from."""

    tokens: Tensor
    lengths: list[int]  # real tokens of each row, followed by padding without effect
    first: list[int]  # column of the input where each row's first real token was

    @classmethod
    def of(cls, input_ids: Tensor, attention_mask: Tensor | None) -> Rows:
        """Remove the padding, which may be on the left or on the right of a row, not inside."""
        lanes, width = input_ids.shape
        if attention_mask is None:
            return cls(input_ids, [width] * lanes, [0] * lanes)
        if attention_mask.ndim != 2 or attention_mask.shape[0] != lanes or attention_mask.shape[1] < width:
            raise InputError(
                f"attention_mask has shape {tuple(attention_mask.shape)}: it must be ({lanes}, {width}), one entry for "
                "each token"
            )
        # While generating, the mask is that of everything so far.
        real = attention_mask[:, -width:].bool()
        lengths, first = real.sum(1).tolist(), real.int().argmax(1).tolist()
        columns = torch.arange(width, device=real.device)
        begin, count = (torch.tensor(x, device=real.device)[:, None] for x in (first, lengths))
        if not torch.equal(real, (columns >= begin) & (columns < begin + count)):
            raise InputError("attention_mask has zeros between ones: padding must be before or after a text")
        return cls(input_ids, lengths, first).moved_left()

    def moved_left(self) -> Rows:
        """Shift the first token of every row to column 0."""
        if not any(self.first):
            return self
        width = self.tokens.shape[1]
        shift = torch.tensor(self.first, device=self.tokens.device)[:, None]
        columns = (torch.arange(width, device=self.tokens.device) + shift).clamp(max=width - 1)
        longest = max(self.lengths)
        return Rows(self.tokens.gather(1, columns)[:, :longest], self.lengths, self.first)

    def from_last_mark(self, mark: int) -> Rows:
        """Drop everything before a row's last mark: it does not affect the logits of the last token."""
        columns = torch.arange(self.tokens.shape[1], device=self.tokens.device)
        last = torch.where((self.tokens == mark) & self._inside(), columns, 0).amax(1).tolist()
        if not any(last):
            return self
        lengths = [length - cut for length, cut in zip(self.lengths, last, strict=True)]
        moved = Rows(self.tokens, lengths, last).moved_left()
        return Rows(moved.tokens, lengths, [a + b for a, b in zip(self.first, last, strict=True)])

    def calls(self, mark: int, size: int) -> Iterator[tuple[int, int, Tensor | None]]:
        """First and last column of every call of the model, and which rows start a document there."""
        width = self.tokens.shape[1]
        marks = (self.tokens == mark) & self._inside()
        cuts = {*range(0, width, size), *marks.any(0).nonzero().flatten().tolist(), width}
        for start, end in itertools.pairwise(sorted(cuts)):
            yield start, end, marks[:, start].cpu() if marks[:, start].any() else None

    def _inside(self) -> Tensor:
        """(B, N) bool: which tokens are real."""
        columns = torch.arange(self.tokens.shape[1], device=self.tokens.device)
        return columns < torch.tensor(self.lengths, device=self.tokens.device)[:, None]
