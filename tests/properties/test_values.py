"""A memory is a value: whatever is read on from it, it stays what it was."""

from __future__ import annotations

import torch

from block_recurrent import DocumentMemory


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
