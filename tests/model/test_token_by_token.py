"""Token by token, forked, selected, in any mode: always what the whole text in one call gives."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from block_recurrent import BlockRecurrentLM, DocumentMemory, preset

SYSTEMS = ["slide", "rec-fixed-skip", "rec-lstm-dual", "feedback-fixed-skip", "memorizing"]


def model_of(system: str) -> BlockRecurrentLM:
    torch.manual_seed(0)
    return BlockRecurrentLM(preset(system, "micro", vocab_size=30, memory_neighbors=64)).double().eval()


def feed(model: BlockRecurrentLM, tokens: Tensor, memory: DocumentMemory | None) -> tuple[Tensor, DocumentMemory]:
    """One token a call."""
    logits = []
    for token in tokens.split(1, dim=1):
        out, memory = model(token, memory)
        logits.append(out)
    assert memory is not None
    return torch.cat(logits, dim=1), memory


@pytest.mark.parametrize("system", SYSTEMS)
def test_forks_do_not_see_each_other(system: str) -> None:
    model, tokens = model_of(system), torch.randint(0, 30, (2, 90))
    other = torch.randint(0, 30, (2, 40))
    with torch.no_grad():
        _, root = feed(model, tokens[:, :50], None)
        mine, _ = feed(model, tokens[:, 50:], root)
        theirs, _ = feed(model, other, root)
        again, _ = feed(model, tokens[:, 50:], root)
        expected, _ = model(tokens)
        expected_other, _ = model(torch.cat([tokens[:, :50], other], dim=1))
    torch.testing.assert_close(mine, expected[:, 50:])
    torch.testing.assert_close(theirs, expected_other[:, 50:])
    torch.testing.assert_close(again, mine)


@pytest.mark.parametrize("system", ["rec-fixed-skip", "feedback-fixed-skip"])
def test_a_state_put_in_by_hand_is_read(system: str) -> None:
    model, tokens = model_of(system), torch.randint(0, 30, (1, 25))
    with torch.no_grad():
        _, memory = feed(model, tokens, None)
        layer = replace(memory.layers[1], state=torch.randn_like(memory.layers[1].state))
        changed = replace(memory, layers=(memory.layers[0], layer, *memory.layers[2:]))
        fresh = deepcopy(changed)
        ours, expected, unchanged = (model(tokens[:, :1], m)[0] for m in (changed, fresh, memory))
    torch.testing.assert_close(ours, expected)
    assert not torch.allclose(ours, unchanged)


def test_changed_weights_are_used_at_once() -> None:
    model, tokens = model_of("rec-fixed-skip"), torch.randint(0, 30, (1, 25))
    with torch.no_grad():
        _, memory = feed(model, tokens, None)
        before, _ = model(tokens[:, :1], memory)
        model.layers[1].cell.to_values.weight.mul_(3)
        after, _ = model(tokens[:, :1], memory)
        expected, _ = model(tokens[:, :1], memory.adopted_by(model))
    torch.testing.assert_close(after, expected)
    assert not torch.allclose(after, before)


@pytest.mark.parametrize("system", SYSTEMS)
def test_selected_lanes_go_on_as_they_were(system: str) -> None:
    model, tokens = model_of(system), torch.randint(0, 30, (3, 70))
    with torch.no_grad():
        expected, _ = model(tokens)
        _, memory = feed(model, tokens[:, :40], None)
        ours, _ = feed(model, tokens[[2, 0, 2], 40:], memory.select([2, 0, 2]))
    torch.testing.assert_close(ours, expected[[2, 0, 2], 40:])


@pytest.mark.parametrize("system", SYSTEMS)
def test_inference_mode_and_no_grad_mix(system: str) -> None:
    model, tokens = model_of(system), torch.randint(0, 30, (1, 60))
    with torch.inference_mode():
        expected, _ = model(tokens)
        first, memory = feed(model, tokens[:, :20], None)
    with torch.no_grad():
        second, memory = feed(model, tokens[:, 20:40], memory)
    with torch.inference_mode():
        third, memory = feed(model, tokens[:, 40:], memory)
    torch.testing.assert_close(torch.cat([first, second, third], dim=1), expected)


@pytest.mark.parametrize("system", SYSTEMS)
def test_gradients_after_token_by_token_reading(system: str) -> None:
    """A memory that was made token by token is as good for training as any other."""
    model, tokens = model_of(system), torch.randint(0, 30, (2, 80))
    with torch.no_grad():
        _, whole = model(tokens[:, :48])
        _, by_token = feed(model, tokens[:, :48], None)
    gradients = []
    for memory in (whole, by_token):
        loss = model.loss(tokens[:, 48:-1], tokens[:, 49:], memory)
        gradients.append(torch.autograd.grad(loss.sum, list(model.parameters()), allow_unused=True))
    for mine, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_training_after_reading_in_inference_mode() -> None:
    """Nothing that is kept between calls may be a tensor of inference mode."""
    config = preset("rec-fixed-skip", "micro", vocab_size=30, window=23, segment=46)  # a window nobody has asked for
    model, tokens = BlockRecurrentLM(config), torch.randint(0, 30, (1, 47))
    with torch.inference_mode():
        model(tokens)
    model.loss(tokens[:, :-1], tokens[:, 1:]).sum.backward()
