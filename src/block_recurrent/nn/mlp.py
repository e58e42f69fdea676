"""The two-layer MLP of a token layer."""

from __future__ import annotations

from torch import Tensor, nn

from block_recurrent.nn.linear import linear


class MLP(nn.Module):
    """relu(x W1) W2."""

    def __init__(self, width: int, hidden_width: int) -> None:
        super().__init__()
        self.hidden = linear(width, hidden_width)
        self.output = linear(hidden_width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.hidden(x).relu_())
