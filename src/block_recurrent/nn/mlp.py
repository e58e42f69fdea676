"""The two-layer MLP of a token layer."""

from __future__ import annotations

from torch import Tensor, nn

from block_recurrent.nn.bare import adding, bare
from block_recurrent.nn.linear import linear
from block_recurrent.nn.rows import AddTo


class MLP(nn.Module):
    """relu(x W1) W2."""

    def __init__(self, width: int, hidden_width: int) -> None:
        super().__init__()
        self.hidden = linear(width, hidden_width)
        self.output = linear(hidden_width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.hidden(x).relu_())

    def adding(self) -> AddTo:
        hidden, add_output = bare(self.hidden), adding(self.output)
        return lambda x, y: add_output(x, hidden(y).relu_())
