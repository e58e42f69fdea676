"""Gates: how the recurrent state takes in something new (SPEC section 4, paper section 3.2).

A gate is a module with `forward(h, state) -> state`: `h` is what enters the last linear map of the cell. To add one,
write the class and put it into GATES under the name that `ModelConfig.gate` gives it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from block_recurrent.nn.linear import linear, normal

# Small and not zero: Adafactor scales updates by the size of a parameter, so a bias of zero would never train.
BIAS_DEVIATION = 0.1
GATE_VARIANCE = 0.1


class Candidate(nn.Module):
    """z, what is offered to the state: a linear map, with bias and tanh as the configuration asks."""

    def __init__(self, in_dim: int, width: int, has_bias: bool, has_tanh: bool) -> None:
        super().__init__()
        self.map = linear(in_dim, width)
        self.bias = normal(width, deviation=BIAS_DEVIATION) if has_bias else None
        self.has_tanh = has_tanh

    def forward(self, h: Tensor) -> Tensor:
        z = self.map(h) if self.bias is None else nn.functional.linear(h, self.map.weight, self.bias)
        return z.tanh() if self.has_tanh else z


class FixedGate(nn.Module):
    """A learned average, the same for every token and state: c' = c g + z (1 - g)."""

    def __init__(self, in_dim: int, width: int, has_bias: bool, has_tanh: bool) -> None:
        super().__init__()
        self.candidate = Candidate(in_dim, width, has_bias, has_tanh)
        self.bias = normal(width, deviation=BIAS_DEVIATION)

    def forward(self, h: Tensor, state: Tensor) -> Tensor:
        return torch.lerp(self.candidate(h).to(state.dtype), state, self.bias.sigmoid())


class LSTMGate(nn.Module):
    """Input and forget gates that depend on h: c' = c f + z i. The constants make it remember at first."""

    def __init__(self, in_dim: int, width: int, has_bias: bool, has_tanh: bool) -> None:
        super().__init__()
        self.candidate = Candidate(in_dim, width, has_bias, has_tanh)
        self.input = linear(in_dim, width, GATE_VARIANCE)
        self.input_bias = normal(width, deviation=BIAS_DEVIATION)
        self.forget = linear(in_dim, width, GATE_VARIANCE)
        self.forget_bias = normal(width, deviation=BIAS_DEVIATION)

    def forward(self, h: Tensor, state: Tensor) -> Tensor:
        i = (self.input(h) + (self.input_bias - 1)).sigmoid()
        f = (self.forget(h) + (self.forget_bias + 1)).sigmoid()
        return state * f + self.candidate(h) * i


GATES: dict[str, type[nn.Module]] = {"fixed": FixedGate, "lstm": LSTMGate}
