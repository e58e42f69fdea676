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
    """Where a memory's newest entry lies: before `end` on a tape."""

    tape: Tape
    end: int


class Extended(NamedTuple):
    """A memory's C entries and N new ones, (B, H, C + N, K)."""

    keys: Tensor
    values: Tensor
    place: Place | None


def extend(keys: Tensor, values: Tensor, place: Place | None, new_keys: Tensor, new_values: Tensor) -> Extended:
    """The entries of a memory with new ones behind them; nothing that any memory sees is changed."""
    cached, more = keys.shape[2], new_keys.shape[2]
    if torch.is_grad_enabled() or not 0 < more <= cached // 4:
        return Extended(torch.cat([keys, new_keys], dim=2), torch.cat([values, new_values], dim=2), None)
    if place is None or not (_holds(place, keys, values) and _may_write(place, more)):
        place = _begin(keys, values)
    tape, end = place
    tape.keys.narrow(2, end, more).copy_(new_keys)
    tape.values.narrow(2, end, more).copy_(new_values)
    tape.written = end + more
    first, visible = end - cached, cached + more
    return Extended(tape.keys.narrow(2, first, visible), tape.values.narrow(2, first, visible), Place(tape, end + more))


def _holds(place: Place, keys: Tensor, values: Tensor) -> bool:
    """Whether these are the tape's own entries: somebody may put others into a memory."""
    (tape, end), cached = place, keys.shape[2]
    skipped = (end - cached) * tape.keys.stride(2) * tape.keys.element_size()
    return all(mine.data_ptr() + skipped == x.data_ptr() for mine, x in ((tape.keys, keys), (tape.values, values)))


def _may_write(place: Place, more: int) -> bool:
    tape, end = place
    # A tensor made in inference mode may be written only there, and the other way round.
    same_mode = tape.keys.is_inference() == torch.is_inference_mode_enabled()
    return same_mode and tape.written == end and end + more <= tape.keys.shape[2]


def _begin(keys: Tensor, values: Tensor) -> Place:
    """A tape with the entries at its beginning and as much room again behind them."""
    B, H, cached, K = keys.shape
    tape = Tape(keys.new_empty(B, H, 2 * cached, K), values.new_empty(B, H, 2 * cached, K), cached)
    tape.keys[:, :, :cached] = keys
    tape.values[:, :, :cached] = values
    return Place(tape, cached)
