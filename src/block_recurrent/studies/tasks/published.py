"""Published accuracies, for comparison."""

from __future__ import annotations

from typing import NamedTuple


class Published(NamedTuple):
    """One published result."""

    system: str
    at: str  # setting of the measurement
    accuracy: float
    numbers: int = 0  # size of the state, if stated


def _rmt(at: str, xl: float, rmt: float) -> tuple[Published, ...]:
    return Published("Transformer-XL", at, xl), Published("Recurrent Memory Transformer", at, rmt)


# Bulatov et al. 2022: 4 layers, width 128; 200k to 1M updates of 32 to 256 examples.
RMT = {
    "copy-24": _rmt("24 in 9 x 8", 0.28, 1.00),
    "reverse-24": _rmt("24 in 6 x 8", 0.67, 0.90),
    "retrieval": _rmt("4 pairs in 5 x 2", 0.99, 0.96),
    "copy-120": _rmt("120 in 9 x 40", 0.14, 1.00),
    "copy-240": _rmt("240 in 6 x 120", 0.13, 0.98),
    "copy-360": _rmt("360 in 9 x 120", 0.13, 0.58),
}

# Read off a figure, +-0.02; vocabulary 8192, 2 layers, 32 epochs of 24M tokens, the best of 4 learning rates.
MQAR_BY_STATE = tuple(
    Published(system, f"{numbers // 1000}k numbers", accuracy, numbers)
    for system, points in {
        "sliding window": ((34_000, 0.31), (66_000, 0.51), (131_000, 0.66)),
        "Mamba-2": ((8_000, 0.52), (33_000, 0.78), (65_000, 0.83)),
        "DeltaNet": ((9_000, 0.79), (34_000, 0.96)),
        "Gated DeltaNet": ((17_000, 0.89), (66_000, 0.99)),
    }.items()
    for numbers, accuracy in points
)

# Trained to length 40. The Block-Recurrent is a port with 2 state vectors.
LANGUAGES_AT_500 = (
    Published("Transformer", "length 500", 0.52),
    Published("Block-Recurrent (a port, 2 states)", "length 500, about", 0.61),
    Published("staircase recurrence", "length 500", 1.00),
)
