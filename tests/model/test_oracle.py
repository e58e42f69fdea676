"""The fast model equals the oracle: logits, next memory, and every gradient."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from block_recurrent.model.meliad import from_meliad
from block_recurrent.model.oracle import Document, Oracle
from block_recurrent.presets import SYSTEMS

from ..golden import check

GOLDEN = Path(__file__).parents[1] / "golden"

TOLERANCE = 1e-9
TWO_RECURRENT_LAYERS = {"num_layers": 4, "recurrent_layers": (1, 3)}

CASES = {name: (name, {}) for name in SYSTEMS}
CASES |= {
    f"{gate}-{gate_config}-{'bias' if bias else 'plain'}-{'tanh' if tanh else 'linear'}": (
        "rec-fixed-skip",
        {"gate": gate, "gate_config": gate_config, "gate_bias": bias, "gate_tanh": tanh},
    )
    for gate, gate_config, bias, tanh in itertools.product(
        ("fixed", "lstm"), ("dual", "single", "skip"), (False, True), (False, True)
    )
}
CASES |= {
    "two-recurrent-layers": ("rec-lstm-dual", TWO_RECURRENT_LAYERS),
    "recurrence-in-every-layer": ("rec-fixed-single", {"num_layers": 2, "recurrent_layers": (1, 2)}),
    "feedback-two-recurrent-layers": ("feedback-fixed-skip", TWO_RECURRENT_LAYERS),
    "feedback-lstm-two-recurrent-layers": ("feedback-lstm-single", TWO_RECURRENT_LAYERS),
    "more-states-than-window": ("rec-fixed-skip", {"num_states": 7}),
    "window-of-one": ("rec-lstm-skip", {"window": 1}),
    "wide-heads": ("slide", {"num_heads": 3, "head_dim": 8}),
    "window-beyond-exact-buckets-and-a-tile": ("slide", {"window": 24, "segment": 48}),
    "memorizing-top-3": ("memorizing", {"memory_neighbors": 3}),
    "memorizing-less-than-a-window": ("memorizing", {"memory_size": 3, "memory_neighbors": 2}),
    "memorizing-two-layers": ("memorizing", {"memory_layers": (1, 3)}),
    "memorizing-and-recurrent": ("rec-fixed-skip", {"memory_layers": (3,)}),
    "memorizing-and-feedback": ("feedback-fixed-skip", {"memory_layers": (1,)}),
}


@pytest.fixture(params=CASES)
def model(request, make_model):
    system, fields = CASES[request.param]
    return make_model(system, **fields)


def test_two_segments_with_the_memory_cut_from_the_graph(model, tokens):
    """Whole blocks, as in training; both lanes read on."""
    W = model.config.window
    compare(model, tokens, lengths=[3 * W, 2 * W], cut=True)


def test_gradients_through_the_memory_at_any_cut_with_a_start(model, tokens):
    """Cuts inside blocks; lane 1 of 2 starts a new document in the last segment; the graph goes all the way back."""
    W = model.config.window
    compare(model, tokens, lengths=[2 * W + 1, W + W // 2, W + 2], cut=False, restart=2)


def compare(model, tokens, lengths, cut, restart=None):
    oracle = Oracle(model.config, dict(model.named_parameters()))
    memory, documents = None, None
    fast_loss, slow_loss = 0.0, 0.0
    text = tokens(2, sum(lengths) + 1)
    for segment, (start, length) in enumerate(zip(itertools.accumulate([0, *lengths]), lengths, strict=False)):
        here, targets = text[:, start : start + length], text[:, start + 1 : start + length + 1]
        starts = torch.tensor([False, True]) if segment == restart else None
        logits, memory = model(here, memory, starts)
        expected, documents = oracle(here, documents, starts)
        assert_close(logits, expected, f"logits of segment {segment}")
        compare_memory(model, memory, documents)
        fast_loss += F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        slow_loss += F.cross_entropy(expected.flatten(0, 1), targets.flatten())
        if cut:
            memory, documents = memory.detach(), [document.detach() for document in documents]
    compare_gradients(model, fast_loss, slow_loss)


def compare_memory(model, memory, documents):
    """Keys and values of the last W or 2W tokens, states, and recalled entries."""
    assert memory.tokens_read.tolist() == [document.length for document in documents]
    for lane, document in enumerate(documents):
        for number, layer in enumerate(memory.layers, start=1):
            what = f"lane {lane}, layer {number}"
            cached = layer.keys.shape[2]
            assert cached == model.config.window * (2 if number in model.config.recurrent_layers else 1)
            newest = range(document.length - cached, document.length)
            assert_close(layer.keys[lane], entries(document.keys, number, newest, layer.keys), f"keys of {what}")
            assert_close(layer.values[lane], entries(document.values, number, newest, layer.keys), f"values of {what}")
            assert (layer.state is None) == (number not in document.states)
            if layer.state is not None:
                assert_close(layer.state[lane], document.states[number], f"state of {what}")
            if layer.knn is not None:
                committed = document.length - document.length % model.config.window
                held = range(max(0, committed - layer.knn.size), committed)
                assert layer.knn.counts[lane] == len(held)
                for name, found in zip(("keys", "values"), layer.knn.tensors(), strict=True):
                    expected = entries(getattr(document, name), number, held, layer.keys)
                    assert_close(found[lane, :, : len(held)], expected, f"recalled {name} of {what}")
                    assert not found[lane, :, len(held) :].any()


def entries(by_position, number, positions, like):
    """(H, positions, K) of one layer; zeros before the document."""
    nothing = like.new_zeros(like.shape[1], like.shape[3])
    rows = [by_position[number, p] if p >= 0 else nothing for p in positions]
    return torch.stack(rows, dim=1) if rows else like.new_zeros(like.shape[1], 0, like.shape[3])


def compare_gradients(model, fast_loss, slow_loss):
    parameters = dict(model.named_parameters())
    fast = torch.autograd.grad(fast_loss, list(parameters.values()))
    slow = torch.autograd.grad(slow_loss, list(parameters.values()))
    for name, ours, expected in zip(parameters, fast, slow, strict=True):
        # Over a single key, attention is 1 whatever the query, the key and the scale.
        assert expected.any() or model.config.window == 1, f"the oracle has no gradient for {name}"
        assert_close(ours, expected, f"gradient of {name}")


def assert_close(ours, expected, what):
    assert ours.dtype == expected.dtype == torch.float64
    assert ours.shape == expected.shape, what
    if ours.numel():
        error = (ours - expected).abs().max().item()
        assert error <= TOLERANCE * max(1.0, expected.abs().max().item()), f"{what}: {error:.1e}"


MODEL_FILES = [path for path in sorted(GOLDEN.glob("*.safetensors")) if path.stem not in ("adafactor", "t5_buckets")]


@pytest.mark.parametrize("path", MODEL_FILES, ids=lambda path: path.stem)
def test_the_oracle_reproduces_the_golden_files(path):
    """The authors' numbers, so that the oracle is not merely equal to the model it judges."""
    golden, tensors = check.load(path)
    assert golden is not None
    config = check.config_of(golden)
    params = {name.removeprefix("param/"): x for name, x in tensors.items() if name.startswith("param/")}
    model = from_meliad(params, config)
    oracle, documents = Oracle(config, dict(model.named_parameters())), None
    for segment in range(len(tensors["tokens"])):
        starts = tensors["start_of_document"][segment]
        with torch.no_grad():
            logits, documents = oracle(tensors["tokens"][segment], documents, starts)
        torch.testing.assert_close(logits.float(), tensors[f"logits/{segment}"], atol=2e-5, rtol=0)
        for layer in config.recurrent_layers:
            states = torch.stack([document.states[layer] for document in documents])
            expected = check._state(tensors, segment, layer - 1)
            torch.testing.assert_close(states.float(), expected, atol=2e-5, rtol=0)


def test_the_oracle_leaves_a_document_as_it_was(make_model, tokens):
    model = make_model("rec-fixed-skip")
    oracle = Oracle(model.config, dict(model.named_parameters()))
    _, document = oracle.read(tokens(1, 6)[0].tolist(), Document())
    once, _ = oracle.read([1, 2, 3], document)
    again, _ = oracle.read([1, 2, 3], document)
    assert document.length == 6
    assert torch.equal(once, again)
