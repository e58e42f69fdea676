"""The systems and sizes of the paper as data. A system and a size are independent choices."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from block_recurrent.config import ModelConfig
from block_recurrent.errors import ConfigError, did_you_mean

DEFAULT_VOCAB_SIZE = 32000


@dataclass(frozen=True)
class System:
    """A row of the paper's main table: an architecture, at any size."""

    in_paper: str  # the paper's name for it
    step_time: float | None = None  # the paper's step time, relative to Slide:13L
    windows: int | None = None
    """Segment and window are this many base windows, as in Transformer-XL; None: the size's own segment and window."""
    extra_layers: bool = False
    """One extra layer for each recurrent layer of the size, so that the cost equals a recurrent system's."""
    recurrent: bool = False
    memorizing: bool = False
    model: dict[str, Any] = field(default_factory=dict)  # further fields of ModelConfig


def _recurrent(in_paper: str, step_time: float, gate: str, gate_config: str, feedback: bool = False) -> System:
    model = {"gate": gate, "gate_config": gate_config, "feedback": feedback}
    return System(in_paper, step_time, recurrent=True, model=model)


SYSTEMS = {
    "xl": System("XL:512", 0.88, windows=1),
    "xl-2w": System("XL:1024", 1.20, windows=2),
    "xl-4w": System("XL:2048", 2.11, windows=4),
    "xl-plus": System("XL:512, 13 layers", windows=1, extra_layers=True),
    "slide": System("Slide:12L", 0.93),
    "slide-plus": System("Slide:13L", 1.00, extra_layers=True),
    "rec-lstm-dual": _recurrent("Rec:lstm:dual", 1.06, "lstm", "dual"),
    "rec-lstm-single": _recurrent("Rec:lstm:single", 1.05, "lstm", "single"),
    "rec-lstm-skip": _recurrent("Rec:lstm:skip", 1.00, "lstm", "skip"),
    "rec-fixed-dual": _recurrent("Rec:fixed:dual", 1.01, "fixed", "dual"),
    "rec-fixed-single": _recurrent("Rec:fixed:single", 1.02, "fixed", "single"),
    "rec-fixed-skip": _recurrent("Rec:fixed:skip", 0.99, "fixed", "skip"),
    "feedback-lstm-single": _recurrent("Feedback:lstm:single", 1.40, "lstm", "single", feedback=True),
    "feedback-fixed-skip": _recurrent("Feedback:fixed:skip", 1.35, "fixed", "skip", feedback=True),
    "memorizing": System("Memorizing Trans. 64k", 1.94, windows=1, memorizing=True),
}


@dataclass(frozen=True)
class Size:
    """The dimensions that all systems share. Letters as in docs/model.md."""

    layers: int
    recurrent_layers: tuple[int, ...]
    D: int
    H: int
    K: int
    F: int
    W: int
    N: int
    S: int
    memory_size: int
    memory_neighbors: int
    lanes: int
    """Lanes of N tokens in a training step: 32 lanes of 4096 in the paper; at smaller sizes, chosen for two cores."""


SIZES = {
    #              layers recurrent  D    H   K    F    W    N    S   M      n  lanes
    "micro": Size(3, (2,), 48, 4, 12, 96, 16, 64, 16, 64, 8, 8),
    "tiny": Size(4, (3,), 128, 4, 32, 512, 64, 512, 64, 4096, 32, 8),
    "small": Size(8, (7,), 320, 5, 64, 1280, 128, 1024, 128, 16384, 64, 8),
    "40m": Size(12, (10,), 512, 8, 64, 2048, 512, 4096, 512, 65536, 128, 32),
    "80m": Size(12, (10,), 512, 8, 128, 4096, 512, 4096, 512, 65536, 128, 32),
    "160m": Size(12, (10,), 1024, 8, 128, 4096, 512, 4096, 512, 65536, 128, 32),
    "325m": Size(12, (10,), 1024, 16, 128, 8192, 512, 4096, 512, 65536, 128, 32),
    "650m": Size(24, (10, 20), 1024, 16, 128, 8192, 512, 4096, 512, 65536, 128, 32),
    "1.3b": Size(24, (10, 20), 2048, 16, 128, 8192, 512, 4096, 512, 65536, 128, 32),
}


def preset(system: str, size: str, vocab_size: int = DEFAULT_VOCAB_SIZE, **overrides: Any) -> ModelConfig:
    """The configuration of a system at a size; `overrides` are further fields of ModelConfig."""
    kind, dims = _look_up(system, size)
    layers = dims.layers + (len(dims.recurrent_layers) if kind.extra_layers else 0)
    values: dict[str, Any] = {
        "vocab_size": vocab_size,
        "d_model": dims.D,
        "num_layers": layers,
        "num_heads": dims.H,
        "head_dim": dims.K,
        "mlp_dim": dims.F,
        "window": dims.W * (kind.windows or 1),
        "segment": dims.W * kind.windows if kind.windows else dims.N,
        "recurrent_layers": dims.recurrent_layers if kind.recurrent else (),
        "num_states": dims.S,
        "memory_layers": (round(3 * layers / 4),) if kind.memorizing else (),
        "memory_size": dims.memory_size,
        "memory_neighbors": dims.memory_neighbors,
        **kind.model,
    }
    return ModelConfig.from_dict(values | overrides)


def preset_lanes(system: str, size: str) -> int:
    """Lanes of a training step, so that every system of a size sees the same number of tokens per step."""
    _, dims = _look_up(system, size)
    return dims.lanes * dims.N // preset(system, size).segment


def _look_up(system: str, size: str) -> tuple[System, Size]:
    for what, name, known in (("system", system, SYSTEMS), ("size", size, SIZES)):
        if not isinstance(name, str) or name not in known:
            raise ConfigError(f"there is no {what} '{name}'{did_you_mean(str(name), known)}; known: {', '.join(known)}")
    return SYSTEMS[system], SIZES[size]
