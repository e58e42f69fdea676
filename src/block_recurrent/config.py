"""`ModelConfig`: the configuration of a model, validated on creation. No torch here."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from block_recurrent.errors import ConfigError, did_you_mean

# Lists, because `register_gate` and `register_update` add to them.
GATE_NAMES = ["fixed", "lstm"]
GATE_CONFIGS = ["dual", "single", "skip"]
MOST, MOST_LAYERS, LARGEST = 2**40, 4096, 1e19
"""Far more than any model has: layers are made one by one, and a wrong number of them would keep a machine busy.
The largest value of other settings: the product of two fits into float32."""


@dataclass(frozen=True)
class ModelConfig:
    """One model. The defaults are the paper's base size (160m) as a plain sliding-window model (`slide`)."""

    vocab_size: int = 32000  # V: size of the vocabulary, including the document mark
    d_model: int = 1024  # D: embedding width
    num_layers: int = 12  # L: layers
    num_heads: int = 8  # H: attention heads
    head_dim: int = 128  # K: width of a head; H*K need not equal D
    mlp_dim: int = 4096  # F: hidden width of the MLP
    window: int = 512  # W: a token attends to the W tokens before it; also the block length
    segment: int = 4096  # N: tokens of one training step per lane, a multiple of the window
    recurrent_layers: tuple[int, ...] = ()  # layers with a recurrent state, counted from 1
    num_states: int = 512  # S: recurrent state vectors
    gate: str = "fixed"  # gate of the recurrent cell: "fixed" or "lstm"
    gate_config: str = "skip"  # the horizontal direction: "dual", "single" or "skip"
    gate_bias: bool | None = None  # whether z has a bias; unset: as in the paper (it has)
    gate_tanh: bool | None = None  # whether z goes through tanh; unset: as in the paper (only for lstm)
    feedback: bool = False  # block feedback: the stack runs block by block, and every layer reads the recurrent state
    memory_layers: tuple[int, ...] = ()
    """Layers with a memory of past keys and values (Memorizing Transformer), counted from 1."""
    memory_size: int = 65536  # M: entries of that memory per lane and head
    memory_neighbors: int = 128  # n: entries retrieved per query
    scale_init: float = 1.0
    """Initial value of the attention scales: a logit is the head's scale times a cosine. 1 in the paper."""
    gate_init: float = 0.5  # initial share of the old state that a fixed gate keeps. 0.5 in the paper.
    gate_horizon: float = 0.0
    """Initial number of blocks that the slowest channel of a fixed gate remembers; the others are spread down to one
    block, evenly in the logarithm. 0: all channels use gate_init."""
    copy_init: bool = False
    """Whether heads start as copying heads, and the state as a table of what followed what (model/copying.py). In the
    paper, they start at random."""
    dropout: float = 0.05  # dropout after the first norm, after the MLP and before the logits
    attention_dropout: float = 0.05  # dropout of the attention matrix

    def __post_init__(self) -> None:
        for name in _SIZES:
            check_size(name, getattr(self, name))
        for name in ("recurrent_layers", "memory_layers"):
            object.__setattr__(self, name, _layer_numbers(name, getattr(self, name), self.num_layers))
        for name in ("dropout", "attention_dropout"):
            rate = getattr(self, name)
            _check(name, rate, _is_number(rate) and 0 <= rate < 1, "a number of at least 0 and less than 1")
        ranges = [("scale_init", 0, LARGEST), ("gate_init", 0, 1)]
        for name, low, high in ranges + [("gate_horizon", 1, LARGEST)] * (self.gate_horizon != 0):
            value = getattr(self, name)
            _check(name, value, _is_number(value) and low < value < high, f"a number between {low} and {high}")
        for name in ("gate_bias", "gate_tanh"):
            _check(
                name, getattr(self, name), isinstance(getattr(self, name), (bool, type(None))), "true, false or unset"
            )
        for name in ("feedback", "copy_init"):
            _check(name, getattr(self, name), isinstance(getattr(self, name), bool), "true or false")
        _check_choice("gate", self.gate, GATE_NAMES)
        _check_choice("gate_config", self.gate_config, GATE_CONFIGS)
        if self.segment % self.window:
            raise ConfigError(
                f"segment {self.segment} is not a multiple of window {self.window}: "
                "a segment is divided into blocks of one window each; "
                f"try {max(1, self.segment // self.window) * self.window}"
            )
        if self.feedback and not self.recurrent_layers:
            raise ConfigError("feedback is true, but recurrent_layers is empty: feedback needs a recurrent layer")
        if both := set(self.recurrent_layers) & set(self.memory_layers):
            raise ConfigError(
                f"layer {min(both)} is in recurrent_layers and in memory_layers: a layer has one kind of memory"
            )
        if self.memory_neighbors > self.memory_size:
            raise ConfigError(
                f"memory_neighbors {self.memory_neighbors} is more than memory_size {self.memory_size}: "
                "a query can't retrieve more entries than the memory has"
            )

    @property
    def has_gate_bias(self) -> bool:
        """`gate_bias`, or the paper's choice if it is unset."""
        return True if self.gate_bias is None else self.gate_bias

    @property
    def has_gate_tanh(self) -> bool:
        """`gate_tanh`, or the paper's choice if it is unset."""
        return self.gate == "lstm" if self.gate_tanh is None else self.gate_tanh

    @property
    def eos_token_id(self) -> int:
        """The document mark, the last token of the vocabulary: it precedes a document, and as a prediction ends it."""
        return self.vocab_size - 1

    @property
    def bos_token_id(self) -> int:
        """The same mark, read before a document's first token."""
        return self.eos_token_id

    def layer_reads_state(self, layer: int) -> bool:
        """Whether layer number `layer` (from 1) cross-attends to a recurrent state."""
        return layer in self.recurrent_layers or self.feedback

    def shape_json(self) -> str:
        """The fields that must agree to exchange weights and memories: all but segment, dropout, initial values."""
        fields = self.to_dict() | {"gate_bias": self.has_gate_bias, "gate_tanh": self.has_gate_tanh}
        return json.dumps({k: v for k, v in fields.items() if k not in _NOT_SHAPE}, sort_keys=True)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON and TOML."""
        values = dataclasses.asdict(self)
        return {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ModelConfig:
        """The configuration from a mapping; an unknown key is an error that names the nearest one."""
        return cls(**_known(values))

    def replace(self, **changes: Any) -> ModelConfig:
        """A copy with some fields changed, validated again."""
        return dataclasses.replace(self, **_known(changes))


_SIZES = [item.name for item in dataclasses.fields(ModelConfig) if item.type == "int"]
_NOT_SHAPE = ("segment", "dropout", "attention_dropout", "scale_init", "gate_init", "gate_horizon", "copy_init")


def _known(values: Mapping[str, Any]) -> dict[str, Any]:
    names = [field.name for field in dataclasses.fields(ModelConfig)]
    for key in values:
        if key not in names:
            raise ConfigError(
                f"unknown model key '{key}'{did_you_mean(str(key), names)}; the keys are {', '.join(names)}"
            )
    return dict(values)


def check_size(name: str, value: Any) -> None:
    """Raise an error if the field is a size, and the value is none."""
    if name in _SIZES:
        most = MOST_LAYERS if name == "num_layers" else MOST
        _check(name, value, _is_int(value) and value >= 1, "a whole number of at least 1")
        _check(name, value, value <= most, f"at most {most}")


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check(name: str, value: Any, holds: bool, rule: str) -> None:
    if not holds:
        raise ConfigError(f"{name} is {value!r}: it must be {rule}")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _check_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    _check(name, value, value in choices, f"one of {', '.join(choices)}{did_you_mean(str(value), choices)}")


def _layer_numbers(name: str, value: Any, num_layers: int) -> tuple[int, ...]:
    if isinstance(value, (str, bytes)) or not hasattr(value, "__iter__"):
        raise ConfigError(f"{name} is {value!r}: it must be a list of layer numbers, such as [10]")
    numbers = tuple(value)
    for number in numbers:
        if not _is_int(number) or not 1 <= number <= num_layers:
            raise ConfigError(f"{name} has {number!r}: layers are counted from 1 to num_layers = {num_layers}")
    if len(set(numbers)) != len(numbers):
        raise ConfigError(f"{name} is {list(numbers)}: each layer may be listed only once")
    return tuple(sorted(numbers))
