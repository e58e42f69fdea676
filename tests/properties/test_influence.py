"""What a token changes and what it can't: never the past, and the far future only through a memory that carries on."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from block_recurrent import DocumentMemory, preset
from block_recurrent.presets import SIZES, SYSTEMS

WINDOWED = [name for name in SYSTEMS if name.startswith(("xl", "slide"))]
RECURRENT = [name for name in SYSTEMS if name.startswith(("rec", "feedback"))]


@torch.no_grad()
def influence(model, text, place):
    """For each position, the largest change of its logits when the token at `place` is another."""
    other = text.clone()
    other[:, place] = (other[:, place] + 1) % model.config.vocab_size
    return (model(other)[0] - model(text)[0]).abs().amax(dim=(0, 2))


def test_a_token_changes_nothing_before_it(system, make_model, tokens):
    model = make_model(system)
    W = model.config.window
    for place in (1, W - 1, W, W + 1, 2 * W + 2):
        change = influence(model, tokens(2, 3 * W + 3), place)
        assert not change[:place].any()
        assert change[place] > 1e-6
        assert change[place + 1] > 1e-6


@torch.no_grad()
def test_a_token_changes_nothing_before_it_in_any_later_call(system, make_model, tokens):
    """The memory before a token does not know it: the same memory goes into both continuations."""
    model = make_model(system)
    W = model.config.window
    text = tokens(1, 2 * W + 4)
    _, before = model(text[:, : W + 2])
    other = text.clone()
    other[:, W + 2 :] = (other[:, W + 2 :] + 1) % model.config.vocab_size
    _, before_other = model(other[:, : W + 2])
    assert before.equals(before_other)


@pytest.mark.parametrize("system", WINDOWED)
def test_without_a_state_influence_ends_after_l_windows(system, make_model, tokens):
    """Each layer carries a token W positions on: the last logits that it can change are those at distance L*W."""
    model = make_model(system)
    reach = model.config.num_layers * model.config.window
    change = influence(model, tokens(2, reach + model.config.window + 6), place=3)
    assert change[3 + reach] > 0
    assert not change[3 + reach + 1 :].any()


@pytest.mark.parametrize("system", WINDOWED)
@torch.no_grad()
def test_without_a_state_influence_ends_across_calls_too(system, make_model, tokens):
    model = make_model(system)
    reach = model.config.num_layers * model.config.window
    text = tokens(1, reach + 4)
    other = text.clone()
    other[:, 0] = (other[:, 0] + 1) % model.config.vocab_size
    memories = [model(x[:, : reach // 2 + 1])[1] for x in (text, other)]
    one, two = (model(text[:, reach // 2 + 1 :], memory)[0] for memory in memories)
    last = reach - (reach // 2 + 1)
    assert not torch.equal(one[:, last], two[:, last])
    assert torch.equal(one[:, last + 1 :], two[:, last + 1 :])


@pytest.mark.parametrize("system", [*RECURRENT, "memorizing"])
def test_a_state_or_a_memory_carries_influence_beyond_l_windows(system, make_model, tokens):
    model = make_model(system, memory_size=32, memory_neighbors=32)
    reach = model.config.num_layers * model.config.window
    change = influence(model, tokens(2, 2 * reach), place=3)
    assert (change[3 + reach + 1 :] > 1e-12).all()


@pytest.mark.parametrize("system", RECURRENT)
@torch.no_grad()
def test_a_new_token_reaches_the_state_at_the_end_of_its_block(system, make_model, tokens):
    """Not before: until then the state is that of the block's start."""
    model = make_model(system)
    W, index = model.config.window, model.config.recurrent_layers[0] - 1
    _, memory = model(tokens(1, W))
    for token in range(W - 1):
        state = memory.layers[index].state
        _, memory = model(tokens(1, 1, seed=token), memory)
        assert torch.equal(memory.layers[index].state, state)
    _, memory = model(tokens(1, 1), memory)
    assert not torch.equal(memory.layers[index].state, state)


@pytest.mark.parametrize("system", RECURRENT)
@torch.no_grad()
def test_the_state_reads_its_block_and_the_one_before(system, make_model, tokens):
    """2W tokens, the first of them included, and none before: with the state itself held fixed."""
    model = make_model(system, num_layers=1, recurrent_layers=(1,))
    W = model.config.window
    text = tokens(1, 4 * W)
    _, memory = model(text[:, : 3 * W])
    for place, matters in ((W - 1, False), (W, False), (2 * W - 1, False), (2 * W, True), (3 * W - 1, True)):
        other = text.clone()
        other[:, place] = (other[:, place] + 1) % model.config.vocab_size
        _, changed = model(other[:, : 3 * W])
        layer = replace(changed.layers[0], state=memory.layers[0].state)
        next_state = model(text[:, 3 * W :], replace(changed, layers=(layer,)))[1].layers[0].state
        expected = model(text[:, 3 * W :], memory)[1].layers[0].state
        assert torch.equal(next_state, expected) != matters, place


@pytest.mark.parametrize("system", RECURRENT)
@torch.no_grad()
def test_changing_the_state_changes_every_logit(system, make_model, tokens):
    model = make_model(system)
    W, index = model.config.window, model.config.recurrent_layers[0] - 1
    _, memory = model(tokens(1, W + 2))
    layers = list(memory.layers)
    layers[index] = replace(layers[index], state=layers[index].state + torch.randn_like(layers[index].state))
    text = tokens(1, 2 * W, seed=1)
    change = model(text, replace(memory, layers=tuple(layers)))[0] - model(text, memory)[0]
    assert (change.abs().amax(dim=2) > 1e-9).all()


@torch.no_grad()
def test_changing_what_is_remembered_changes_every_logit(make_model, tokens):
    """The recalled entries alone: keys and values of the window are those of the same text."""
    model = make_model("memorizing")
    W = model.config.window
    one, two = (model(tokens(1, 5 * W, seed=seed))[1] for seed in (0, 1))
    mixed = [replace(a, knn=b.knn) for a, b in zip(one.layers, two.layers, strict=True)]
    text = tokens(1, W, seed=2)
    change = model(text, replace(one, layers=tuple(mixed)))[0] - model(text, one)[0]
    assert (change.abs().amax(dim=2) > 1e-9).all()


@pytest.mark.parametrize(("slide", "xl"), [("slide", "xl"), ("slide-plus", "xl-plus")])
@torch.no_grad()
def test_slide_with_a_segment_of_one_window_is_xl(slide, xl, make_model, tokens):
    """The same configuration; and reading window by window is reading all at once."""
    for size in SIZES:
        assert preset(slide, size, segment=preset(slide, size).window) == preset(xl, size)
    sliding, segmented = make_model(slide), make_model(xl)
    sliding.load_state_dict(segmented.state_dict())
    W, text, memory = segmented.config.segment, tokens(2, 24), None
    whole, whole_memory = sliding(text)
    for start in range(0, 24, W):
        logits, memory = segmented(text[:, start : start + W], memory)
        torch.testing.assert_close(logits, whole[:, start : start + W], atol=1e-9, rtol=0)
    assert memory.equals(whole_memory, 1e-9)


@pytest.mark.parametrize("what", ["keys", "values", "state"])
@torch.no_grad()
def test_a_memory_that_is_edited_is_read_as_edited(system, what, make_model, tokens):
    """Each layer's keys, values or state, replaced in a memory that was written token by token."""
    model = make_model(system)

    def write() -> DocumentMemory:
        memory = None
        for token in range(6):
            _, memory = model(tokens(1, 1, seed=token), memory)
        return memory

    expected, _ = model(tokens(1, 1), write())
    for index in range(model.config.num_layers):
        memory = write()
        layers = list(memory.layers)
        if (value := getattr(layers[index], what)) is None:
            continue
        noise = torch.randn(value.shape, generator=torch.Generator().manual_seed(0), dtype=value.dtype)
        layers[index] = replace(layers[index], **{what: value + noise})
        logits, _ = model(tokens(1, 1), replace(memory, layers=tuple(layers)))
        assert (logits - expected).abs().max() > 1e-9, f"layer {index + 1}"
