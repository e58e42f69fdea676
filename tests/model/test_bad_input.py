"""Calls that can't be right are refused with the value and the rule; nothing is broadcast silently."""

from __future__ import annotations

import pytest
import torch

from block_recurrent import BlockRecurrentLM, DocumentMemory
from block_recurrent.errors import InputError, MemoryMismatchError

GOOD = torch.tensor([[1, 2, 3], [4, 5, 6]])


@pytest.fixture
def model(make_model) -> BlockRecurrentLM:
    return make_model("rec-fixed-skip")


BAD_TOKENS = [
    (GOOD + 20, r"tokens has 26: tokens must be from 0 to vocab_size - 1 = 22"),
    (GOOD.where(GOOD != 3, 23), r"tokens has 23: tokens must be from 0 to vocab_size - 1 = 22"),
    (GOOD - 2, r"tokens has -1: tokens must be from 0"),
    (GOOD.float(), "tokens has dtype float32: it must be an integer type, such as int64"),
    (GOOD.bool(), "tokens has dtype bool: it must be an integer type"),
    (GOOD[0], r"tokens has shape \(3,\): it must be \(lanes, length\)"),
    (GOOD[None], r"tokens has shape \(1, 2, 3\): it must be \(lanes, length\)"),
    (torch.tensor(3), r"tokens has shape \(\): it must be \(lanes, length\)"),
    (GOOD[:0], r"tokens has shape \(0, 3\): .* at least one lane"),
    (GOOD.tolist(), r"tokens is a list: it must be a tensor of integers, \(lanes, length\)"),
    (GOOD.to("meta"), "tokens is on meta, the model on cpu: move one of them"),
]


@pytest.mark.parametrize(("tokens", "message"), BAD_TOKENS, ids=[message[:40] for _, message in BAD_TOKENS])
def test_tokens(model, tokens, message):
    with pytest.raises(InputError, match=message):
        model(tokens)
    with pytest.raises(InputError, match=message):
        model.hidden(tokens)


BAD_STARTS = [
    (torch.tensor([True]), r"starts has shape \(1,\): it must be \(2,\), one entry per lane of tokens"),
    (torch.tensor([True, False, True]), r"starts has shape \(3,\): it must be \(2,\)"),
    (torch.tensor(True), r"starts has shape \(\): it must be \(2,\)"),
    (torch.tensor([[True], [False]]), r"starts has shape \(2, 1\): it must be \(2,\)"),
    (torch.tensor([1, 0]), "starts is int64: it must be a tensor of dtype bool, one entry per lane"),
    ([True, False], "starts is list: it must be a tensor of dtype bool, one entry per lane"),
    (True, "starts is bool: it must be a tensor of dtype bool"),
]


@pytest.mark.parametrize(("starts", "message"), BAD_STARTS, ids=[message[:40] for _, message in BAD_STARTS])
def test_starts(model, starts, message):
    with pytest.raises(InputError, match=message):
        model(GOOD, None, starts)


BAD_LENGTHS = [
    (torch.tensor([4, 1]), "lengths has 4 for lane 0: it must be from 0 to 3, the number of tokens"),
    (torch.tensor([1, -1]), "lengths has -1 for lane 1: it must be from 0 to 3, the number of tokens"),
    (torch.tensor([3]), r"lengths has shape \(1,\): it must be \(2,\)"),
    (torch.tensor([1.0, 2.0]), "lengths is float32: it must be a tensor of dtype an integer type"),
    (torch.tensor([True, False]), "lengths is bool: it must be a tensor of dtype an integer type"),
    ([1, 2], "lengths is list: it must be a tensor"),
]


@pytest.mark.parametrize(("lengths", "message"), BAD_LENGTHS, ids=[message[:40] for _, message in BAD_LENGTHS])
def test_lengths(model, lengths, message):
    with pytest.raises(InputError, match=message):
        model(GOOD, lengths=lengths)


def test_the_memory_must_be_a_memory(model):
    with pytest.raises(MemoryMismatchError, match="memory is a dict: it must be a DocumentMemory or None"):
        model(GOOD, {})
    with pytest.raises(MemoryMismatchError, match="memory is a tuple"):
        model(GOOD, model(GOOD))


def test_the_memory_must_have_the_lanes_of_the_tokens(model):
    for lanes in (1, 3):
        memory = DocumentMemory.empty(model.config, lanes, dtype=torch.float64)
        with pytest.raises(MemoryMismatchError, match=f"the memory has {lanes} lanes, tokens has 2: .*select.*cat"):
            model(GOOD, memory)


def test_the_memory_must_have_the_model_s_shape(model, make_model):
    memory = DocumentMemory.empty(make_model("slide").config, 2, dtype=torch.float64)
    with pytest.raises(MemoryMismatchError, match=r"another shape than this one: recurrent_layers \[\] against \[2\]"):
        model(GOOD, memory)
    memory = DocumentMemory.empty(model.config.replace(window=8), 2, dtype=torch.float64)
    with pytest.raises(MemoryMismatchError, match="window 8 against 4"):
        model(GOOD, memory)


def test_the_memory_must_be_of_this_model(model, make_model):
    other = make_model("rec-fixed-skip", seed=1)
    with pytest.raises(MemoryMismatchError, match="belongs to another model"):
        model(GOOD, other(GOOD)[1])


def test_the_memory_must_have_the_model_s_precision(model):
    with pytest.raises(
        MemoryMismatchError, match=r"is torch.float32 on cpu, the model torch.float64 on cpu: use memory.to"
    ):
        model(GOOD, DocumentMemory.empty(model.config, 2))


@pytest.mark.parametrize("lanes", [0, -1, 1.0, "2", True, None])
def test_a_memory_has_at_least_one_lane(model, lanes):
    with pytest.raises(InputError, match=r"lanes is .*: a memory has at least 1 lane"):
        DocumentMemory.empty(model.config, lanes)


BAD_LOSS = [
    ({"targets": GOOD[:1]}, r"targets has shape \(1, 3\): it must be the shape of tokens, \(2, 3\)"),
    ({"targets": GOOD[:, :1]}, r"targets has shape \(2, 1\): it must be the shape of tokens, \(2, 3\)"),
    ({"targets": GOOD + 20}, "targets has 26: tokens must be from 0 to vocab_size - 1 = 22"),
    ({"targets": GOOD * -100}, "targets has -600: tokens must be from 0"),
    ({"targets": GOOD.double()}, "targets has dtype float64: it must be an integer type"),
    ({"mask": torch.ones(2, 3)}, "mask is float32: it must be a tensor of dtype bool"),
    (
        {"mask": torch.ones(1, 3, dtype=torch.bool)},
        r"mask has shape \(1, 3\): it must be the shape of tokens, \(2, 3\)",
    ),
    ({"mask": torch.ones(2, dtype=torch.bool)}, r"mask has shape \(2,\): it must be the shape of tokens"),
    ({"mask": [[True] * 3] * 2}, "mask is list: it must be a tensor of dtype bool"),
    ({"tokens": GOOD + 20}, "tokens has 26"),
    ({"starts": torch.tensor([True])}, r"starts has shape \(1,\)"),
]


@pytest.mark.parametrize(("changed", "message"), BAD_LOSS, ids=[message[:40] for _, message in BAD_LOSS])
def test_loss(model, changed, message):
    with pytest.raises(InputError, match=message):
        model.loss(**{"tokens": GOOD, "targets": GOOD} | changed)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.uint8], ids=str)
def test_integers_of_any_width_are_read(system, make_model, dtype):
    model = make_model(system)
    assert torch.equal(model(GOOD.to(dtype))[0], model(GOOD)[0])
    assert torch.equal(model.loss(GOOD.to(dtype), GOOD.to(dtype)).sum, model.loss(GOOD, GOOD).sum)


def test_no_tokens_change_nothing(system, make_model, tokens):
    model = make_model(system)
    memory = model(tokens(2, 7))[1]
    logits, after = model(tokens(2, 0), memory)
    assert logits.shape == (2, 0, model.config.vocab_size)
    assert after.equals(memory)
    assert model(tokens(2, 3), memory, lengths=torch.tensor([0, 0]))[1].equals(memory)


@pytest.mark.skipif(not hasattr(torch.compiler, "is_exporting"), reason="torch does not tell")
def test_torch_export_is_refused_in_one_line(model):
    with pytest.raises(InputError, match=r"^torch\.export can't trace this model[^\n]*$"):
        torch.export.export(model, (torch.zeros(1, 16, dtype=torch.int64),))
