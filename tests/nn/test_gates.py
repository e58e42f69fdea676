"""The gates, by hand."""

from __future__ import annotations

import pytest
import torch

from block_recurrent.nn.gates import GATES

SETTINGS = pytest.mark.parametrize(("has_bias", "has_tanh"), [(a, b) for a in (False, True) for b in (False, True)])


def gate_of(kind, has_bias, has_tanh):
    torch.manual_seed(0)
    return GATES[kind](5, 3, has_bias, has_tanh).double()


def candidate(gate, h, has_bias, has_tanh):
    z = h @ gate.candidate.map.weight.T
    if has_bias:
        z = z + gate.candidate.bias
    return torch.tanh(z) if has_tanh else z


@SETTINGS
def test_fixed(has_bias, has_tanh):
    gate = gate_of("fixed", has_bias, has_tanh)
    h, c = torch.randn(2, 4, 5).double(), torch.randn(2, 4, 3).double()
    g = torch.sigmoid(gate.bias)
    expected = c * g + candidate(gate, h, has_bias, has_tanh) * (1 - g)
    torch.testing.assert_close(gate(h, c), expected, atol=1e-12, rtol=0)
    assert gate.bias.shape == (3,)


@SETTINGS
def test_lstm(has_bias, has_tanh):
    gate = gate_of("lstm", has_bias, has_tanh)
    h, c = torch.randn(2, 4, 5).double(), torch.randn(2, 4, 3).double()
    i = torch.sigmoid(h @ gate.input.weight.T + gate.input_bias - 1)
    f = torch.sigmoid(h @ gate.forget.weight.T + gate.forget_bias + 1)
    expected = c * f + candidate(gate, h, has_bias, has_tanh) * i
    torch.testing.assert_close(gate(h, c), expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("kind", GATES)
def test_without_bias_there_is_no_such_parameter(kind):
    assert "candidate.bias" not in dict(gate_of(kind, False, False).named_parameters())
    assert "candidate.bias" in dict(gate_of(kind, True, False).named_parameters())


def test_a_new_lstm_gate_remembers_more_than_it_takes_in():
    gate = gate_of("lstm", True, True)
    c = torch.ones(1, 3).double()
    kept = gate(torch.zeros(1, 5).double(), c)
    assert ((kept > 0.6) & (kept < 0.85)).all()
