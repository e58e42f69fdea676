"""Any chunking gives the same logits and the same memory as the whole."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from block_recurrent import BlockRecurrentLM, preset

TOLERANCE = 1e-9  # in float64


def read_in_chunks(model, text, sizes):
    """Read `text` in chunks of these sizes, the last one repeated."""
    memory, logits, start, sizes = None, [], 0, list(sizes)
    while start < text.shape[1]:
        size = sizes.pop(0) if len(sizes) > 1 else sizes[0]
        out, memory = model(text[:, start : start + size], memory)
        logits.append(out)
        start += size
    return torch.cat(logits, dim=1), memory


def assert_same_as_whole(model, text, sizes, tolerance=TOLERANCE):
    with torch.no_grad():
        expected, expected_memory = model(text)
        logits, memory = read_in_chunks(model, text, sizes)
    assert logits.shape == expected.shape
    assert (logits - expected).abs().max() <= tolerance
    assert memory.equals(expected_memory, tolerance), memory.difference(expected_memory)


@pytest.mark.parametrize("chunk", ["1", "W-1", "W", "W+1", "3W+5"])
def test_chunks_of_one_size(system, chunk, make_model, tokens):
    model = make_model(system)
    W = model.config.window
    size = {"1": 1, "W-1": W - 1, "W": W, "W+1": W + 1, "3W+5": 3 * W + 5}[chunk]
    assert_same_as_whole(model, tokens(2, 4 * W + 7), [size])


@settings(max_examples=20, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_random_cuts(system, make_model, tokens, data):
    model = make_model(system)
    W = model.config.window
    length = data.draw(st.integers(1, 5 * W), "length")
    sizes = data.draw(st.lists(st.integers(0, 2 * W + 1), max_size=8), "chunks")
    assert_same_as_whole(model, tokens(2, length, seed=length), [*sizes, 5 * W])


@pytest.mark.parametrize("fields", [{"num_layers": 4, "recurrent_layers": (1, 3)}, {"memory_layers": (3,)}], ids=str)
@pytest.mark.parametrize("system", ["rec-lstm-dual", "feedback-fixed-skip"])
def test_models_with_more_than_one_memory(system, fields, make_model, tokens):
    model = make_model(system, **fields)
    for sizes in ([1], [3], [5, 1, 9, 4]):
        assert_same_as_whole(model, tokens(2, 23), sizes)


def test_float32_at_a_preset_size(system):
    """What a user has: float32, 1e-4. With n = M: rounding could swap entries of almost equal rank."""
    torch.manual_seed(0)
    config = preset(system, "micro", vocab_size=257)
    model = BlockRecurrentLM(config.replace(memory_neighbors=config.memory_size)).eval()
    text = torch.randint(257, (2, 2 * config.window + 70))
    assert_same_as_whole(model, text, [1, config.window - 1, 7, config.window + 3, 30], tolerance=1e-4)


def test_gradients_do_not_depend_on_the_cuts(system, make_model, tokens):
    """Nothing in a call cuts the graph: carried without `detach`, the memory passes all gradients on."""
    model = make_model(system)
    W = model.config.window
    text, parameters = tokens(1, 2 * W + 3), list(model.parameters())
    whole = torch.autograd.grad(model(text)[0].square().sum(), parameters)
    chunked = torch.autograd.grad(read_in_chunks(model, text, [W - 1, 2, W, 1])[0].square().sum(), parameters)
    for (name, _), one, other in zip(model.named_parameters(), whole, chunked, strict=True):
        torch.testing.assert_close(one, other, atol=1e-8, rtol=1e-8, msg=lambda text, name=name: f"{name}: {text}")
