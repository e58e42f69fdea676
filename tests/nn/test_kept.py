"""What is kept from token to token is made anew when the weights change."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import nn

from block_recurrent import BlockRecurrentLM, preset
from block_recurrent.nn.bare import adding, bare
from block_recurrent.nn.kept import Kept, Watch
from block_recurrent.nn.linear import linear
from block_recurrent.nn.mlp import MLP
from block_recurrent.nn.norm import RMSNorm


def test_made_once_until_a_weight_changes() -> None:
    module, calls = linear(1, 3), []

    def work() -> torch.Tensor:
        calls.append(1)
        return module.weight * 2

    kept = Kept()
    with torch.no_grad():
        module.weight.fill_(1)
        assert kept.get(work, module) is kept.get(work, module)
        assert len(calls) == 1
        module.weight.add_(1)
        assert kept.get(work, module).flatten().tolist() == [4, 4, 4]
    kept.get(work, module)  # with gradients: always
    assert len(calls) == 3


def change_weight(mlp: MLP) -> None:
    with torch.no_grad():
        mlp.hidden.weight.mul_(2)


def replace_weight(mlp: MLP) -> None:
    mlp.output.weight = nn.Parameter(torch.ones_like(mlp.output.weight))


def replace_part(mlp: MLP) -> None:
    mlp.hidden = linear(4, 8)


def load_weights(mlp: MLP) -> None:
    mlp.load_state_dict(MLP(4, 8).state_dict(), assign=True)


def listen(mlp: MLP) -> None:
    mlp.hidden.register_forward_hook(lambda module, args, output: output + 1)


def to_double(mlp: MLP) -> None:
    mlp.double()


@pytest.mark.parametrize("change", [change_weight, replace_weight, replace_part, load_weights, listen, to_double])
def test_a_watch_notices(change) -> None:
    mlp = MLP(4, 8)
    watch = Watch(mlp)
    assert not watch.changed()
    change(mlp)
    assert watch.changed()
    assert not Watch(mlp).changed()


def test_a_watch_notices_what_is_replaced_again_and_again() -> None:
    """The third comes to lie where the first was, if nothing holds that one."""
    mlp = MLP(4, 8)
    watch = Watch(mlp)
    for _ in range(20):
        mlp.hidden = linear(4, 8)
        assert watch.changed()


def test_weights_whose_changes_are_not_counted_are_never_known() -> None:
    with torch.inference_mode():
        module = linear(2, 2)
    assert Watch(module).changed()


def test_copies_begin_empty() -> None:
    kept, module = Kept(), linear(1, 1)
    with torch.no_grad():
        kept.get(lambda: torch.ones(1), module)
    for other in (copy.deepcopy(kept), pickle.loads(pickle.dumps(kept))):
        assert other._kept is None
    for other in (copy.deepcopy(Watch(module)), pickle.loads(pickle.dumps(Watch(module)))):
        assert other.changed()


class LeakyMLP(MLP):
    """Somebody's own, which inherits `adding` from a module that does something else."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.output(nn.functional.leaky_relu(self.hidden(x)))


def replaced_forward() -> nn.Module:
    module = linear(4, 4)
    module.forward = lambda x: x * 2
    return module


MODULES: list[Callable[[], nn.Module]] = [
    lambda: linear(4, 6),
    lambda: RMSNorm(4),
    lambda: MLP(4, 8),
    lambda: nn.Linear(4, 4),
    nn.Identity,
    lambda: LeakyMLP(4, 8),
    replaced_forward,
]


@pytest.mark.parametrize("make", MODULES)
def test_bare_and_adding_do_what_the_module_does(make: Callable[[], nn.Module]) -> None:
    module, y = make(), torch.randn(3, 4)
    for _ in range(2):
        with torch.no_grad():
            expected = module(y)
            x = torch.randn_like(expected)
            torch.testing.assert_close(bare(module)(y), expected)
            torch.testing.assert_close(adding(module)(x, y), x + expected)
        module.register_forward_hook(lambda module, args, output: output + 1)  # and then with somebody who listens


def test_adding_keeps_the_higher_precision() -> None:
    """In autocast, products are rounded, and the sum of all layers must not be."""
    x, y, module = torch.full((1, 4), 1 + 2**-20), torch.zeros(1, 4), linear(4, 4)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(adding(module)(x, y.bfloat16()), x)


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


def test_writing_is_heard_by_hooks_that_came_later() -> None:
    model = BlockRecurrentLM(preset("rec-fixed-skip", "micro", vocab_size=50)).eval()
    heard = []
    with torch.no_grad():
        _, memory = model(torch.randint(50, (1, 1)))
        for layer in model.layers:
            layer.mlp.output.register_forward_hook(lambda module, args, output: heard.append(output.shape))
        model(torch.randint(50, (1, 1)), memory)
    assert len(heard) == len(model.layers)
