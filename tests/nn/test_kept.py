"""What is kept from token to token is made anew when the weights change."""

from __future__ import annotations

import copy
import pickle

import torch

from block_recurrent import BlockRecurrentLM, preset
from block_recurrent.nn.kept import Kept


def test_made_once_until_a_weight_changes() -> None:
    weight, calls = torch.ones(3), []

    def work() -> torch.Tensor:
        calls.append(1)
        return weight * 2

    kept = Kept()
    with torch.no_grad():
        assert kept.get(work, weight) is kept.get(work, weight)
        assert len(calls) == 1
        weight.add_(1)
        assert kept.get(work, weight).tolist() == [4, 4, 4]
    kept.get(work, weight)  # with gradients: always
    assert len(calls) == 3


def test_copies_begin_empty() -> None:
    kept = Kept()
    with torch.no_grad():
        kept.get(lambda: torch.ones(1), torch.ones(1))
    for other in (copy.deepcopy(kept), pickle.loads(pickle.dumps(kept))):
        assert other._kept is None


def test_writing_after_an_update_uses_the_new_bias() -> None:
    torch.manual_seed(0)
    model = BlockRecurrentLM(preset("slide", "micro", vocab_size=50)).eval()
    text = torch.randint(50, (1, 12))
    with torch.no_grad():
        _, memory = model(text)
        model(text[:, :1], memory)
        for layer in model.layers:
            layer.position_bias.table.add_(torch.randn_like(layer.position_bias.table))
            layer.scale.mul_(-2)
        one, _ = model(text[:, :1], memory)
        two, _ = model(text[:, :2], memory)
    assert torch.allclose(one[:, 0], two[:, 0], atol=1e-5)
