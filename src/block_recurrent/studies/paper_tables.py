"""The paper's tables as data: the models of each, and the paper's results. No torch here."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from block_recurrent.presets import SIZES, SYSTEMS

# Table 1: bits per token on PG19 (tokens).
_TABLE1 = {
    "xl": 3.62,
    "xl-2w": 3.59,
    "xl-4w": 3.58,
    "slide": 3.60,
    "slide-plus": 3.58,
    "rec-lstm-dual": 3.54,
    "rec-lstm-single": 3.54,
    "rec-lstm-skip": 3.56,
    "rec-fixed-dual": 3.52,
    "rec-fixed-single": 3.58,
    "rec-fixed-skip": 3.53,
    "feedback-lstm-single": 3.50,
    "feedback-fixed-skip": 3.49,
    "memorizing": 3.53,
}
_WINDOWS = {"rec-fixed-skip": {4: 3.58, 2: 3.54, 1: 3.53}, "slide": {4: 3.69, 2: 3.64, 1: 3.60}}
_STATES = {0.25: 3.54, 0.5: 3.535, 1: 3.53, 2: 3.51, 4: 3.55}
_SCALING = {
    "rec-fixed-skip": {"40m": 3.96, "80m": 3.79, "160m": 3.59, "325m": 3.44, "650m": 3.29, "1.3b": 3.22},
    "xl-plus": {"40m": 4.03, "80m": 3.86, "160m": 3.67, "325m": 3.51, "650m": 3.39, "1.3b": 3.31},
}
_VOCABULARIES = {
    257: 0.960,
    512: 2.125,
    1000: 2.477,
    4000: 3.021,
    8000: 3.289,
    32000: 3.647,
    64000: 3.766,
    96000: 3.801,
    128000: 3.830,
}


@dataclass(frozen=True)
class Row:
    """One model of a table."""

    label: str
    system: str
    size: str
    model: dict[str, Any] = field(default_factory=dict)  # fields of ModelConfig that differ from the preset
    data: int = 0  # which of the given data folders
    paper: float | None = None  # the paper's bits per token, at its own size and data


TABLES = {
    "table1": "all systems at one size",
    "windows": "shorter windows, with and without recurrence",
    "states": "more and fewer state vectors",
    "vocabularies": "the same model with several vocabularies: one --data folder each",
    "curve": "bits per token by position, with and without recurrence",
    "scaling": "recurrence at several sizes, up to --size",
}


def rows_of(table: str, size: str, vocabularies: list[int]) -> list[Row]:
    """The models of a table. `vocabularies`: the vocabulary sizes of the data folders."""
    dims = SIZES[size]
    if table == "table1":
        return [Row(system, system, size, paper=_TABLE1.get(system)) for system in SYSTEMS if system in _TABLE1]
    if table == "curve":
        return [Row(system, system, size, paper=_TABLE1.get(system)) for system in ("rec-fixed-skip", "xl-plus")]
    if table == "windows":
        return [
            Row(
                f"{system}, window {dims.W // part}",
                system,
                size,
                {"window": dims.W // part},
                0,
                _WINDOWS[system][part],
            )
            for part in (4, 2, 1)
            for system in ("rec-fixed-skip", "slide")
        ]
    if table == "states":
        return [
            Row(f"{int(dims.S * times)} states", "rec-fixed-skip", size, {"num_states": int(dims.S * times)}, 0, bits)
            for times, bits in _STATES.items()
        ]
    if table == "vocabularies":
        return [
            Row(f"{pieces} pieces", "rec-fixed-skip", size, {}, number, _nearest(pieces))
            for number, pieces in enumerate(vocabularies)
        ]
    upto = list(SIZES)[: list(SIZES).index(size) + 1]
    return [
        Row(f"{system}, {name}", system, name, paper=_SCALING[system].get(name))
        for name in upto
        for system in ("rec-fixed-skip", "xl-plus")
    ]


def _nearest(pieces: int) -> float | None:
    """The paper's number for a vocabulary of about this size."""
    nearest = min(_VOCABULARIES, key=lambda size: abs(size - pieces))
    return _VOCABULARIES[nearest] if abs(nearest - pieces) <= 0.1 * pieces else None
