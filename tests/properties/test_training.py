"""Every weight learns, and dropout is active in training only, and never in the horizontal direction."""

from __future__ import annotations

import pytest
import torch

from block_recurrent import BlockRecurrentLM, preset


def new_model(system: str, **fields) -> BlockRecurrentLM:
    """As training starts: the initial values, float32, segments as the preset has them."""
    torch.manual_seed(0)
    return BlockRecurrentLM(preset(system, "micro", vocab_size=31, **fields)).train()


def gradients_of_segment(model, memory, seed):
    """The parameters with a non-zero gradient of one segment's mean loss, and the memory to carry on."""
    N = model.config.segment
    text = torch.randint(31, (2, N + 1), generator=torch.Generator().manual_seed(seed))
    model.zero_grad()
    loss = model.loss(text[:, :-1], text[:, 1:], memory)
    (loss.sum / loss.count).backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    learned = {name for name, p in model.named_parameters() if p.grad is not None and p.grad.any()}
    return learned, loss.memory.detach()


def test_every_weight_gets_a_gradient_within_two_segments(system):
    """Two steps of training, with dropout: each segment's own backward pass, the memory carried and detached.

    The initial state gets its gradient in the first segment; by the second, the document has a state of its own.
    """
    model = new_model(system)
    names = {name for name, _ in model.named_parameters()}
    first, memory = gradients_of_segment(model, None, seed=0)
    second, _ = gradients_of_segment(model, memory, seed=1)
    assert first | second == names
    assert names - second == {name for name in names if name.endswith("initial_state")}


@pytest.mark.parametrize(
    "fields", [{"num_layers": 4, "recurrent_layers": (2, 4)}, {"recurrent_layers": (1, 3)}], ids=str
)
@pytest.mark.parametrize("system", ["rec-lstm-dual", "feedback-fixed-skip"])
def test_every_weight_of_several_recurrent_layers_too(system, fields):
    model = new_model(system, **fields)
    first, _ = gradients_of_segment(model, None, seed=0)
    assert first == {name for name, _ in model.named_parameters()}


def test_a_document_that_starts_later_trains_the_initial_state():
    model = new_model("rec-fixed-skip")
    _, memory = gradients_of_segment(model, None, seed=0)
    model.zero_grad()
    text = torch.randint(31, (2, 64))
    model.loss(text, text, memory, torch.tensor([False, True])).sum.backward()
    assert model.layers[1].cell.initial_state.grad.any()


def test_an_empty_memory_that_was_detached_still_trains_the_initial_state(make_model, tokens):
    """Fresh lanes take the learned state at the next call, so no detaching can hide it."""
    model = make_model("rec-fixed-skip")
    _, memory = model(tokens(2, 0))
    model(tokens(2, 9), memory.detach())[0].square().sum().backward()
    assert model.layers[1].cell.initial_state.grad.any()


@torch.no_grad()
def test_reading_has_no_dropout_and_training_has(system):
    model = new_model(system, dropout=0.3, attention_dropout=0.3)
    text = torch.randint(31, (2, 40))
    assert not torch.equal(model(text)[0], model(text)[0])
    model.eval()
    assert torch.equal(model(text)[0], model(text)[0])
    torch.manual_seed(0)
    one = model(text)[0]
    torch.manual_seed(1)
    assert torch.equal(model(text)[0], one)


@torch.no_grad()
def test_each_kind_of_dropout_acts_alone(system):
    for fields in ({"dropout": 0.3, "attention_dropout": 0.0}, {"dropout": 0.0, "attention_dropout": 0.3}):
        model = new_model(system, **fields)
        text = torch.randint(31, (2, 40))
        assert not torch.equal(model(text)[0], model(text)[0]), fields
    model = new_model(system, dropout=0.0, attention_dropout=0.0)
    torch.testing.assert_close(model(text)[0], model.eval()(text)[0], atol=1e-5, rtol=0)


@pytest.mark.parametrize("gate_config", ["dual", "single", "skip"])
@torch.no_grad()
def test_the_horizontal_direction_has_no_dropout(gate_config):
    """In layer 1 with attention dropout alone, keys and values are exact; so must be the state that reads them."""
    fields = {"recurrent_layers": (1,), "gate_config": gate_config, "dropout": 0.0, "attention_dropout": 0.5}
    model = new_model("rec-fixed-skip", **fields)
    text = torch.randint(31, (2, 64))
    training, reading = model(text), model.eval()(text)
    assert not torch.allclose(training[0], reading[0], atol=1e-2)
    torch.testing.assert_close(training[1].layers[0].state, reading[1].layers[0].state, atol=1e-5, rtol=0)
