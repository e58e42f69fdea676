"""A memory is a value: whatever is read on from it, it stays what it was."""

from __future__ import annotations

import random

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from block_recurrent import DocumentMemory
from block_recurrent.model.memory import LayerMemory


def snapshot(memory: DocumentMemory) -> list[torch.Tensor]:
    """Copies of all numbers, the recalled ones too."""
    return [x.clone() for layer in memory.layers for x in layer.named_tensors().values()] + [memory.tokens_read.clone()]


def unchanged(memory: DocumentMemory, before: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(snapshot(memory), before, strict=True))


@torch.no_grad()
def test_a_call_leaves_its_memory_alone(system, make_model, tokens):
    model = make_model(system)
    W = model.config.window
    _, memory = model(tokens(2, 2 * W + 1))
    before, text = snapshot(memory), tokens(2, 2 * W + 3, seed=1)
    logits, after = model(text, memory)
    assert unchanged(memory, before)
    again, after_again = model(text, memory)
    assert torch.equal(logits, again)
    assert unchanged(after, snapshot(after_again))
    model(text, memory, starts=torch.tensor([True, False]))
    assert unchanged(memory, before)


@torch.no_grad()
def test_an_old_memory_is_still_right_after_twenty_blocks(system, make_model, tokens):
    model = make_model(system)
    W = model.config.window
    _, old = model(tokens(2, 3 * W + 1))
    before, text = snapshot(old), tokens(2, W + 2, seed=1)
    expected, _ = model(text, old)
    newest = old
    for block in range(20):
        _, newest = model(tokens(2, W, seed=block), newest)
        assert unchanged(old, before), f"changed by block {block}"
    # Exact but for the order in which recalled entries are summed.
    torch.testing.assert_close(model(text, old)[0], expected, atol=1e-13, rtol=0)


@torch.no_grad()
def test_two_continuations_of_one_memory_do_not_meet(system, make_model, tokens):
    """Read on in turns from one memory with two texts; each gets what it gets on its own."""
    model = make_model(system)
    W = model.config.window
    _, root = model(tokens(1, 2 * W + 1))
    texts = [tokens(1, 8 * W, seed=seed) for seed in (1, 2)]
    together, found = [root, root], [[], []]
    for start in range(0, 8 * W, W + 1):
        for i, text in enumerate(texts):
            logits, together[i] = model(text[:, start : start + W + 1], together[i])
            found[i].append(logits)
    for i, text in enumerate(texts):
        alone, memory = model(text, model(tokens(1, 2 * W + 1))[1])
        torch.testing.assert_close(torch.cat(found[i], dim=1), alone, atol=1e-9, rtol=0)
        assert together[i].equals(memory, 1e-9)


def test_the_backward_pass_survives_later_calls(system, make_model, tokens):
    """What the graph of a call has kept is not overwritten by the calls after it."""
    model = make_model(system)
    W, parameters = model.config.window, list(model.parameters())
    _, memory = model(tokens(1, 2 * W))
    memory = memory.detach()
    text = tokens(1, 2 * W, seed=1)
    expected = torch.autograd.grad(model(text, memory)[0].square().sum(), parameters, allow_unused=True)
    loss = model(text, memory)[0].square().sum()
    newest = memory
    for block in range(12):
        newest = model(tokens(1, W, seed=block), newest)[1].detach()
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    for one, other in zip(found, expected, strict=True):
        assert (one is None and other is None) or torch.equal(one, other)


@settings(max_examples=4, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 10**6))
def test_any_tree_of_continuations(system, make_model, seed):
    """Read on from any memory so far, again and again, mostly token by token, with and without gradient.

    However values share storage behind the scenes, each lane of each memory is what its own text makes it.
    """
    model, chance = make_model(system), random.Random(seed)
    W, V = model.config.window, model.config.vocab_size
    alive = [(None, [[], []])]
    for _ in range(16):
        memory, texts = chance.choice(alive[-3:])
        if memory is not None and chance.random() < 0.2:
            memory, texts = memory.select([1, 0]), texts[::-1]
        starts = [chance.random() < 0.05 for _ in range(2)]
        width = chance.choice([1, 1, 1, 2, W - 1, W, W + 2])
        lengths = [width if chance.random() < 0.9 else chance.randint(0, width) for _ in range(2)]
        new = [[chance.randrange(V) for _ in range(width)] for _ in range(2)]
        with torch.set_grad_enabled(chance.random() < 0.3):
            logits, memory = model(torch.tensor(new), memory, torch.tensor(starts), torch.tensor(lengths))
        texts = [
            ([] if start else text) + more[:n] for text, more, n, start in zip(texts, new, lengths, starts, strict=True)
        ]
        for lane, (text, n) in enumerate(zip(texts, lengths, strict=True)):
            if n:
                expected = read_alone(model, text)[0][0, -n:]
                torch.testing.assert_close(logits[lane, :n].detach(), expected, atol=1e-9, rtol=0)
        alive.append((memory, texts))
    for memory, texts in alive[1:]:
        for lane, text in enumerate(texts):
            if text:
                assert memory.select([lane]).equals(read_alone(model, text)[1], 1e-9)


@torch.no_grad()
def read_alone(model, text):
    return model(torch.tensor([text]))


def test_weights_that_change_change_what_a_memory_shows(system, make_model, tokens):
    """A memory kept through a training step is read with the new weights, whatever was worked out from the old ones."""
    model = make_model(system)
    W, text = model.config.window, tokens(1, 3, seed=1)
    with torch.no_grad():
        _, memory = model(tokens(1, W + 1))
        _, memory = model(tokens(1, 1), memory)
        plain = DocumentMemory(
            tuple(LayerMemory(x.keys, x.values, x.state, x.knn) for x in memory.layers),
            memory.tokens_read,
            memory.config,
        )
        before, _ = model(text, memory)
        for parameter in model.parameters():
            parameter.mul_(1.1).add_(0.05)
        after, _ = model(text, memory)
        expected, _ = model(text, plain)
    assert not torch.allclose(before, after)
    torch.testing.assert_close(after, expected, atol=1e-12, rtol=0)


def test_a_memory_made_without_gradient_trains_like_any_other(system, make_model, tokens):
    """Reading under `no_grad`, token by token, then a step with gradient from there."""
    model = make_model(system)
    W, parameters = model.config.window, list(model.parameters())
    text, more = tokens(1, W + 2), tokens(1, W + 1, seed=1)
    expected = torch.autograd.grad(
        model(more, model(text)[1].detach())[0].square().sum(), parameters, allow_unused=True
    )
    memory = None
    with torch.no_grad():
        for place in range(W + 2):
            _, memory = model(text[:, place : place + 1], memory)
    found = torch.autograd.grad(model(more, memory)[0].square().sum(), parameters, allow_unused=True)
    for (name, _), one, other in zip(model.named_parameters(), found, expected, strict=True):
        assert (one is None) == (other is None), name
        if one is not None:
            torch.testing.assert_close(one, other, atol=1e-9, rtol=1e-9)


def test_inference_mode_and_back(system, make_model, tokens):
    """A memory may go from `inference_mode` to `no_grad` and from `no_grad` to `inference_mode`, token by token."""
    model = make_model(system)
    W = model.config.window
    text = tokens(1, 3 * W)
    with torch.no_grad():
        expected, _ = model(text)
    for modes in ((torch.inference_mode, torch.no_grad), (torch.no_grad, torch.inference_mode)):
        memory, logits = None, []
        for place in range(3 * W):
            with modes[place // 2 % 2]():
                out, memory = model(text[:, place : place + 1], memory)
            logits.append(out)
        torch.testing.assert_close(torch.cat(logits, dim=1), expected, atol=1e-9, rtol=0)
