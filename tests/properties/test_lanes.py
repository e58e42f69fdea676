"""Each lane gives what it would give alone, wherever the others stand and whatever they read."""

from __future__ import annotations

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from block_recurrent import BlockRecurrentLM, preset

TOLERANCE = 1e-9


def close(one, other):
    return one.shape == other.shape and bool(((one - other).abs() <= TOLERANCE).all())


@torch.no_grad()
def test_lanes_are_independent(system, make_model, tokens):
    model = make_model(system)
    text = tokens(3, 2 * model.config.window + 3)
    logits, memory = model(text)
    other = text.clone()
    other[1] = (other[1] + 1) % model.config.vocab_size
    changed, changed_memory = model(other)
    assert torch.equal(changed[[0, 2]], logits[[0, 2]])
    assert not close(changed[1], logits[1])
    assert changed_memory.select([0, 2]).equals(memory.select([0, 2]))


@torch.no_grad()
def test_lanes_permute(system, make_model, tokens):
    model = make_model(system)
    W, order = model.config.window, [2, 0, 1]
    text = tokens(3, 3 * W + 2)
    lengths = torch.tensor([W + 1, W + 2, W - 1])
    _, memory = model(text[:, : W + 2], lengths=lengths)
    _, permuted = model(text[order, : W + 2], lengths=lengths[order])
    assert permuted.equals(memory.select(order), TOLERANCE)
    logits, after = model(text[:, W:], memory)
    permuted_logits, permuted_after = model(text[order, W:], permuted)
    assert close(permuted_logits, logits[order])
    assert permuted_after.equals(after.select(order), TOLERANCE)


@torch.no_grad()
def test_a_start_resets_exactly_to_a_fresh_document(system, make_model, tokens):
    """Mid-block, and only in some lanes; the others read on as if nothing had happened."""
    model = make_model(system)
    W = model.config.window
    _, memory = model(tokens(3, 2 * W + 3))
    text = tokens(3, 2 * W + 1, seed=1)
    logits, after = model(text, memory, torch.tensor([False, True, False]))
    fresh, fresh_after = model(text)
    on, on_after = model(text, memory)
    assert close(logits[1], fresh[1])
    assert close(logits[[0, 2]], on[[0, 2]])
    assert not close(fresh[0], on[0])
    assert after.select([1]).equals(fresh_after.select([1]), TOLERANCE)
    assert after.select([0, 2]).equals(on_after.select([0, 2]), TOLERANCE)
    assert after.tokens_read.tolist() == [4 * W + 4, 2 * W + 1, 4 * W + 4]
    all_fresh, _ = model(text, memory, torch.tensor([True] * 3))
    assert torch.equal(all_fresh, fresh)


@torch.no_grad()
def test_padding_never_matters(system, make_model, tokens):
    model = make_model(system)
    W = model.config.window
    _, memory = model(tokens(3, W + 1), lengths=torch.tensor([W + 1, 1, 0]))
    text, lengths = tokens(3, 2 * W, seed=1), torch.tensor([2 * W, 3, W])
    real = torch.arange(2 * W) < lengths[:, None]
    logits, after = model(text, memory, lengths=lengths)
    other, other_after = model(torch.where(real, text, (text + 5) % model.config.vocab_size), memory, lengths=lengths)
    assert torch.equal(logits[real], other[real])
    assert other_after.equals(after)
    longer, longer_after = model(torch.cat([text, text], dim=1), memory, lengths=lengths)
    assert close(longer[:, : 2 * W][real], logits[real])
    assert longer_after.equals(after, TOLERANCE)


def test_padding_has_no_gradient(system, make_model, tokens):
    model = make_model(system)
    W = model.config.window
    text, lengths = tokens(2, W + 2).clone(), torch.tensor([W + 2, 2])
    unused = model.config.vocab_size - 1
    text[text == unused] = 0
    text[1, 2:] = unused
    real = torch.arange(W + 2) < lengths[:, None]
    logits, after = model(text, lengths=lengths)
    # Tied embeddings get a gradient through the logits; without the unused piece's, only through the input.
    total = logits[..., :unused][real].square().sum()
    total = total + sum(layer.keys.square().sum() + layer.values.square().sum() for layer in after.layers)
    total.backward()
    assert not model.embedding.weight.grad[unused].any()
    assert model.embedding.weight.grad[:unused].any()


@settings(max_examples=20, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_history_gives_each_lane_what_it_would_give_alone(system, make_model, data):
    """Calls that bring each lane a different number of tokens, and documents that end anywhere."""
    model = make_model(system)
    W, lanes = model.config.window, 3
    call = st.tuples(
        st.lists(st.integers(0, 2 * W + 1), min_size=lanes, max_size=lanes),
        st.lists(st.sampled_from([False, False, False, True]), min_size=lanes, max_size=lanes),
        st.integers(0, 2),
    )
    history = data.draw(st.lists(call, min_size=2, max_size=5), "lengths, starts and padding of each call")
    check_history(model, history, lanes)


@torch.no_grad()
def check_history(model: BlockRecurrentLM, history, lanes):
    random = torch.Generator().manual_seed(0)
    memory = None
    documents = [[[]] for _ in range(lanes)]  # lane -> documents -> (token, logits)
    for lengths, starts, padding in history:
        text = torch.randint(model.config.vocab_size, (lanes, max(lengths) + padding), generator=random)
        logits, memory = model(text, memory, torch.tensor(starts), torch.tensor(lengths))
        for lane in range(lanes):
            if starts[lane]:
                documents[lane].append([])
            documents[lane][-1] += zip(text[lane].tolist()[: lengths[lane]], logits[lane], strict=False)
    assert memory is not None
    for lane, read in enumerate(documents):
        for document in filter(None, read):
            found = torch.stack([out for _, out in document])
            alone, alone_memory = model(torch.tensor([[token for token, _ in document]]))
            assert close(found, alone[0])
        if read[-1]:
            assert memory.select([lane]).equals(alone_memory, TOLERANCE)
        assert memory.tokens_read[lane] == len(read[-1])


def test_padding_is_no_part_of_the_loss() -> None:
    """With `lengths` and no mask, the tokens behind a lane's length count neither in the sum nor in the count."""
    torch.manual_seed(0)
    model = BlockRecurrentLM(preset("rec-fixed-skip", "micro", 50)).eval()
    tokens, targets = torch.randint(50, (2, 2, 20))
    loss = model.loss(tokens, targets, lengths=torch.tensor([7, 20]))
    alone = [model.loss(tokens[i : i + 1, :n], targets[i : i + 1, :n]).sum for i, n in ((0, 7), (1, 20))]
    assert loss.count.item() == 27
    torch.testing.assert_close(loss.sum, sum(alone))
