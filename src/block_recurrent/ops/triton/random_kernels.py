"""Random numbers of dropout in Triton: from counters, so that a backward pass draws the same ones again."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def row_words(seed, pair, rows):
    """Two random words for every row, of a head or of a matrix: Philox, whose counter is the row and the head."""
    zero = rows * 0
    first, second, _, _ = tl.philox(seed, rows, zero + pair, zero, zero)
    return first, second


@triton.jit
def kept(first, second, places, dropped):
    """Which numbers stay, from the words of their row and their place in it: two rounds of a 32-bit mixer.

    Philox for every number would take several times as long as the products.
    """
    x = (places.to(tl.uint32) * 0x9E3779B9) ^ first
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = x ^ second
    x = (x ^ (x >> 15)) * 0x846CA68B
    return ((x ^ (x >> 16)) >> 1).to(tl.int32) >= dropped
