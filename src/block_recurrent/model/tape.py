"""Room to write the keys and values of the next tokens behind those of the last ones.

Copying a window of W keys for every token would cost a quarter of the time of writing. A `Tape` is storage with room at
its end; a memory sees the part before its own place. The next token is written into the room, which no memory can see
yet; if another memory has written there already (a fork), or the tape is full, a new tape is begun. So memories share
storage, and none sees another's writes. In training there is no tape: gradients need every segment's own tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass
class Tape:
    """Keys and values (B, H, capacity, K), and how much of them has been written."""

    keys: Tensor
    values: Tensor
    written: int


class Place(NamedTuple):
    """Where a memory lies on a tape: its newest entry before `end`, and the very tensors that it sees there."""

    tape: Tape
    end: int
    keys: Tensor
    values: Tensor


class Extended(NamedTuple):
    """A memory's C entries and N new ones; on a tape: all `length` from `first` on, and the place of the newest C."""

    keys: Tensor
    values: Tensor
    first: int
    length: int
    place: Place | None

    def all(self) -> tuple[Tensor, Tensor]:
        """All keys and values, (B, H, C + N, K)."""
        if self.place is None:
            return self.keys, self.values
        return self.keys.narrow(2, self.first, self.length), self.values.narrow(2, self.first, self.length)


def extend(keys: Tensor, values: Tensor, place: Place | None, new_keys: Tensor, new_values: Tensor) -> Extended:
    """The entries of a memory with new ones behind them, in its precision; nothing that any memory sees is changed."""
    cached, more = keys.shape[2], new_keys.shape[2]
    if torch.is_grad_enabled() or not 0 < more <= cached // 4:
        new_keys, new_values = new_keys.to(keys.dtype), new_values.to(values.dtype)
        keys, values = torch.cat([keys, new_keys], dim=2), torch.cat([values, new_values], dim=2)
        return Extended(keys, values, first=0, length=cached + more, place=None)
    if place is None or not _may_write(place, keys, values, more):
        place = _begin(keys, values)
    tape, start = place.tape, place.end
    tape.keys.narrow(2, start, more).copy_(new_keys)
    tape.values.narrow(2, start, more).copy_(new_values)
    tape.written = end = start + more
    newest = Place(tape, end, tape.keys.narrow(2, end - cached, cached), tape.values.narrow(2, end - cached, cached))
    return Extended(tape.keys, tape.values, start - cached, cached + more, newest)


def _may_write(place: Place, keys: Tensor, values: Tensor, more: int) -> bool:
    """Whether these are the entries at the place (somebody may put others into a memory), and there is room behind."""
    tape, end = place.tape, place.end
    same = place.keys is keys and place.values is values
    # A tensor made in inference mode may be written only there, and the other way round.
    same_mode = tape.keys.is_inference() == torch.is_inference_mode_enabled()
    return same and same_mode and tape.written == end and end + more <= tape.keys.shape[2]


def _begin(keys: Tensor, values: Tensor) -> Place:
    """A tape with the entries at its beginning and as much room again behind them."""
    B, H, cached, K = keys.shape
    tape = Tape(keys.new_empty(B, H, 2 * cached, K), values.new_empty(B, H, 2 * cached, K), cached)
    tape.keys[:, :, :cached] = keys
    tape.values[:, :, :cached] = values
    return Place(tape, cached, keys, values)
