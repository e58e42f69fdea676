"""Gates: how the recurrent state is updated (paper section 3.2).

`register_gate` adds custom ones: docs/extending.md.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from block_recurrent import config
from block_recurrent.nn.linear import linear, normal
from block_recurrent.ops import Average, is_changed, stated

# Small and not zero: Adafactor scales updates by the size of a parameter, so a bias of zero would never train.
BIAS_DEVIATION = 0.1
GATE_VARIANCE = 0.1


class Gate(nn.Module):
    """`gate(h, state)` returns the next state (B, S, D); `h` (B, S, in_dim) is the input of the last linear map."""

    depends_on_input = True
    """Whether `activations` differ from block to block."""

    def __init__(self, in_dim: int, width: int, has_bias: bool, has_tanh: bool) -> None:
        super().__init__()
        self.candidate = Candidate(in_dim, width, has_bias, has_tanh)

    def forward(self, h: Tensor, state: Tensor) -> Tensor:
        raise NotImplementedError

    def start_at(self, keep: float, horizon: float) -> None:
        """Set the initial share of the old state to keep (ModelConfig.gate_init, gate_horizon), if there is one."""

    def activations(self, h: Tensor) -> dict[str, Tensor]:
        """For metrics: means by name, such as the share of the old state that is kept."""
        return {}


class Candidate(nn.Module):
    """z, the update proposed to the state: a linear map, with bias and tanh as configured."""

    def __init__(self, in_dim: int, width: int, has_bias: bool, has_tanh: bool) -> None:
        super().__init__()
        self.map = linear(in_dim, width)
        self.bias = normal(width, deviation=BIAS_DEVIATION) if has_bias else None
        self.has_tanh = has_tanh

    def forward(self, h: Tensor) -> Tensor:
        z = self.map(h) if self.bias is None else nn.functional.linear(h, self.map.weight, self.bias)
        return z.tanh() if self.has_tanh else z

    def affine(self) -> tuple[Tensor, Tensor] | None:
        """Weight and bias of z, if that is all there is to it: the map may have been replaced."""
        if self.has_tanh or type(self.map) is not nn.Linear or is_changed(self.map):
            return None
        return self.map.weight, self.map.weight.new_zeros(len(self.map.weight)) if self.bias is None else self.bias


class FixedGate(Gate):
    """A learned average, the same for every token and state: c' = c g + z (1 - g)."""

    depends_on_input = False

    def __init__(self, in_dim: int, width: int, has_bias: bool, has_tanh: bool) -> None:
        super().__init__(in_dim, width, has_bias, has_tanh)
        self.bias = normal(width, deviation=BIAS_DEVIATION)

    def forward(self, h: Tensor, state: Tensor) -> Tensor:
        return torch.lerp(self.candidate(h).to(state.dtype), state, self.bias.sigmoid())

    def average(self) -> Average | None:
        """The gate as an average of the state and an affine map of h; None if z is not one."""
        affine = stated(self.candidate, "affine")
        if affine is None:
            return None
        map, bias = affine
        return Average(map, bias, self.bias.sigmoid())

    @torch.no_grad()
    def start_at(self, keep: float, horizon: float) -> None:
        blocks = torch.logspace(0, math.log10(horizon), len(self.bias)) if horizon else None
        self.bias.add_(torch.logit(torch.tensor(keep) if blocks is None else (-1 / blocks).exp()))

    def activations(self, h: Tensor) -> dict[str, Tensor]:
        return {"keep": self.bias.sigmoid().mean()}


class LSTMGate(Gate):
    """Input and forget gates that depend on h: c' = c f + z i. The constants make it remember initially."""

    def __init__(self, in_dim: int, width: int, has_bias: bool, has_tanh: bool) -> None:
        super().__init__(in_dim, width, has_bias, has_tanh)
        self.input = linear(in_dim, width, GATE_VARIANCE)
        self.input_bias = normal(width, deviation=BIAS_DEVIATION)
        self.forget = linear(in_dim, width, GATE_VARIANCE)
        self.forget_bias = normal(width, deviation=BIAS_DEVIATION)

    def forward(self, h: Tensor, state: Tensor) -> Tensor:
        return state * self._forget(h) + self.candidate(h) * self._input(h)

    def activations(self, h: Tensor) -> dict[str, Tensor]:
        return {"forget": self._forget(h).mean(), "input": self._input(h).mean()}

    def _input(self, h: Tensor) -> Tensor:
        return (self.input(h) + (self.input_bias - 1)).sigmoid()

    def _forget(self, h: Tensor) -> Tensor:
        return (self.forget(h) + (self.forget_bias + 1)).sigmoid()


GATES: dict[str, type[Gate]] = {"fixed": FixedGate, "lstm": LSTMGate}


def gate_biases(model: nn.Module) -> list[nn.Parameter]:
    """The biases of all gates: a gate's own parameters, without those of its linear maps."""
    return [p for module in model.modules() if isinstance(module, Gate) for p in module.parameters(recurse=False)]


def register_gate(name: str, gate: type[Gate]) -> None:
    """Register a gate, under the name for `ModelConfig.gate`."""
    if name not in config.GATE_NAMES:
        config.GATE_NAMES.append(name)
    GATES[name] = gate
