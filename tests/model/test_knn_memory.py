"""`KNNMemory`, the memory that is searched: exact, bounded, and a value although values share storage."""

from __future__ import annotations

import gc
import pickle
import random
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from block_recurrent.model.knn_memory import SPARE_BLOCKS, KNNMemory
from block_recurrent.model.language_model import BlockRecurrentLM
from block_recurrent.model.memory import DocumentMemory
from block_recurrent.ops import knn
from block_recurrent.presets import preset

H, K = 2, 3


def empty(lanes=2, size=8, block=4):
    return KNNMemory.empty((lanes, H, size, K), SPARE_BLOCKS * block, torch.empty(0, dtype=torch.float64))


def block_of(seed, lanes=2, length=4):
    random_numbers = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(lanes, H, length, K, generator=random_numbers, dtype=torch.float64) for _ in range(2))


def entries(memory, lane):
    """What a lane holds, oldest first: (H, count, 2K)."""
    keys, values = memory.tensors()
    count = memory.counts[lane]
    assert not keys[lane, :, count:].any()
    assert not values[lane, :, count:].any()
    return torch.cat([keys[lane, :, :count], values[lane, :, :count]], dim=-1)


def test_the_oldest_are_overwritten():
    memory, history = empty(), []
    for seed in range(7):
        memory = memory.append(*block_of(seed), [True, seed % 2 == 0])
        history.append(torch.cat(block_of(seed), dim=-1))
        assert torch.equal(entries(memory, 0), torch.cat(history, dim=2)[0, :, -8:])
        assert torch.equal(entries(memory, 1), torch.cat(history[::2], dim=2)[1, :, -8:])
    assert memory.counts == (8, 8)


@pytest.mark.parametrize("size", [1, 3, 5, 8, 11])
def test_sizes_that_are_no_multiple_of_a_block(size):
    memory, history = empty(size=size), []
    for seed in range(9):
        memory = memory.append(*block_of(seed), [True, True])
        history.append(torch.cat(block_of(seed), dim=-1))
        assert torch.equal(entries(memory, 1), torch.cat(history, dim=2)[1, :, -size:])


def test_nothing_appended_is_the_same_value():
    memory = empty().append(*block_of(0), [True, True])
    assert memory.append(*block_of(1), [False, False]) is memory
    assert memory.reset([False, False]) is memory


def test_reset_forgets_the_marked_lanes():
    memory = empty().append(*block_of(0), [True, True])
    after = memory.reset([True, False])
    assert after.counts == (0, 4)
    assert memory.counts == (4, 4)
    assert torch.equal(entries(after, 1), entries(memory, 1))
    grown = after.append(*block_of(1), [True, True])
    assert grown.counts == (4, 8)
    assert torch.equal(entries(grown, 0), torch.cat(block_of(1), dim=-1)[0])


def test_select_cat_and_to():
    memory = empty().append(*block_of(0), [True, True]).append(*block_of(1), [False, True])
    chosen = memory.select([1, 0, 1])
    assert chosen.counts == (8, 4, 8)
    assert torch.equal(entries(chosen, 2), entries(memory, 1))
    joined = KNNMemory.cat([memory.select([0]), memory.select([1])])
    assert all(torch.equal(entries(joined, lane), entries(memory, lane)) for lane in (0, 1))
    single = memory.to(None, torch.float32)
    assert single.nbytes * 2 == memory.nbytes
    assert single.tensors()[0].dtype == torch.float32
    assert all(x.spare == memory.spare for x in (chosen, joined, single))


def test_appended_entries_have_no_gradient_and_are_copies():
    keys, values = (x.requires_grad_() for x in block_of(0))
    memory = empty().append(keys, values, [True, True])
    assert not any(x.requires_grad for x in memory.tensors())
    before = entries(memory, 0).clone()
    keys.data.zero_()
    assert torch.equal(entries(memory, 0), before)


# --- search ---


def search_by_definition(memory, queries, n):
    """Per lane, head and query: the set of the n nearest entries, zeros where there are fewer."""
    keys, values = memory.tensors()
    found = []
    for lane in range(queries.shape[0]):
        for head in range(H):
            for q in queries[lane, head]:
                held = range(memory.counts[lane])
                nearest = sorted(held, key=lambda i: -float(q @ keys[lane, head, i]))[:n]
                rows = [torch.cat([keys[lane, head, i], values[lane, head, i]]).tolist() for i in nearest]
                found.append(sorted(rows + [[0.0] * 2 * K] * (n - len(rows))))
    return found


@pytest.mark.parametrize("n", [1, 3, 8])
@pytest.mark.parametrize("at_once", [None, 1, 20])
def test_search_is_exact(n, at_once, monkeypatch):
    """Lanes with nothing, a little and everything written; the storage wraps around; scores held piece by piece."""
    if at_once is not None:
        monkeypatch.setattr(knn, "SCORES_AT_ONCE", at_once)
    memory = empty(lanes=3)
    for seed in range(11):
        memory = memory.append(*block_of(seed, lanes=3), [True, seed == 4, False])
        queries = torch.randn(3, H, 5, K, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        keys, values = knn.search(queries, *memory.searched(n), n)
        assert keys.shape == values.shape == (3, H, 5, n, K)
        rows = torch.cat([keys, values], dim=-1).flatten(0, 2).tolist()
        assert [sorted(row) for row in rows] == search_by_definition(memory, queries, n)
        for lane, count in enumerate(memory.counts):
            assert (keys[lane].any(-1).sum(-1) == min(n, count)).all()


def test_an_entry_that_was_never_written_ranks_last():
    """Behind entries with a negative dot product too, which a zero key would beat."""
    memory = empty().append(-torch.ones(2, H, 4, K).double(), torch.ones(2, H, 4, K).double(), [True, True])
    keys, values = knn.search(torch.ones(2, H, 1, K).double(), *memory.searched(4), 4)
    assert (keys == -1).all()
    assert (values == 1).all()


def test_forgotten_and_unseen_entries_are_never_found():
    """Slots that other values have written, or that a lane has forgotten, are in the storage but not in the value."""
    old = empty().append(*block_of(0), [True, True])
    old.append(*[10 * x for x in block_of(1)], [True, True])
    fresh = old.reset([True, False])
    keys, _ = knn.search(torch.randn(2, H, 6, K).double(), *old.searched(8), 8)
    assert keys.any(-1).sum(-1).unique().tolist() == [4]
    assert keys.abs().max() <= block_of(0)[0].abs().max()
    keys, values = knn.search(torch.randn(2, H, 6, K).double(), *fresh.searched(8), 8)
    assert keys[1].any()
    assert not keys[0].any()
    assert not values[0].any()


# --- values that share storage ---


def test_reading_on_shares_storage_and_copies_nothing():
    """As in training: each value is dropped for the next, and all live in one storage."""
    memory = empty()
    storage = memory._storage
    for seed in range(50):
        memory = memory.append(*block_of(seed), [True, True])
    assert memory._storage is storage
    assert storage.capacity == 8 + SPARE_BLOCKS * 4


def test_a_value_in_use_is_never_overwritten():
    kept = empty().append(*block_of(0), [True, True]).append(*block_of(1), [True, True])
    before = [entries(kept, lane).clone() for lane in (0, 1)]
    newest = kept
    for seed in range(2, 30):
        newest = newest.append(*block_of(seed), [True, True])
        assert all(torch.equal(entries(kept, lane), before[lane]) for lane in (0, 1)), seed
    expected = torch.cat([torch.cat(block_of(seed), dim=-1) for seed in (28, 29)], dim=2)
    assert torch.equal(entries(newest, 1), expected[1])


def test_siblings_do_not_see_each_other():
    parent = empty().append(*block_of(0), [True, True])
    one, two = (parent.append(*block_of(seed), [True, True]) for seed in (1, 2))
    for child, seed in ((one, 1), (two, 2)):
        expected = torch.cat([torch.cat(block_of(s), dim=-1) for s in (0, seed)], dim=2)
        assert torch.equal(entries(child, 0), expected[0])
    assert parent.counts == (4, 4)


def test_memory_is_bounded_when_values_are_dropped():
    memory = empty()
    kept = memory
    for seed in range(30):
        memory = memory.append(*block_of(seed), [True, True])
    del kept
    gc.collect()
    assert len(memory._storage.users) <= SPARE_BLOCKS + 2


@settings(max_examples=30, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6), size=st.integers(1, 13), block=st.integers(1, 6))
def test_any_family_of_values_stays_right(seed, size, block):
    """A random tree of appends, resets and selections, some values dropped: every living one is what it should be."""
    chance = random.Random(seed)
    alive = [(empty(2, size, block), [torch.zeros(H, 0, 2 * K).double()] * 2)]
    for step in range(25):
        value, expected = chance.choice(alive)
        lanes = [chance.random() < 0.7 for _ in range(2)]
        what = chance.choice(["append", "append", "append", "reset", "select"])
        if what == "append":
            keys, values = block_of(step, length=block)
            rows = torch.cat([keys, values], dim=-1)
            after = value.append(keys, values, lanes)
            now = [
                torch.cat([e, r], dim=1)[:, -size:] if m else e for e, r, m in zip(expected, rows, lanes, strict=True)
            ]
        elif what == "reset":
            after = value.reset(lanes)
            now = [e[:, :0] if m else e for e, m in zip(expected, lanes, strict=True)]
        else:
            after, now = value.select([1, 0]), expected[::-1]
        alive.append((after, now))
        if len(alive) > 5:
            alive.pop(chance.randrange(len(alive)))
        for memory, expected_entries in alive:
            for lane in range(2):
                assert torch.equal(entries(memory, lane), expected_entries[lane])


# --- attention over what was found ---


def filled(size, block, blocks, spare):
    memory = KNNMemory.empty((2, H, size, K), spare, torch.empty(0))
    for seed in range(blocks):
        memory = memory.append(*[x.float() for x in block_of(seed, length=block)], [True, seed < 1])
    return memory


@pytest.mark.parametrize("w", [1, 40])
@pytest.mark.parametrize("blocks", [0, 1, 3, 13])
def test_attention_is_over_what_search_finds(w, blocks):
    """By the kernels where there are many queries, and without them."""
    memory = filled(size=96, block=16, blocks=blocks, spare=64)
    queries = torch.randn(2, H, w, K, requires_grad=True)
    keys, values = knn.search(queries, *memory.searched(20), 20)
    weights = (queries[..., None, :] * keys).sum(-1).softmax(-1)
    expected = (weights[..., None] * values).sum(-2)
    found = memory.attend(queries, 20)
    torch.testing.assert_close(found, expected)
    upstream = torch.randn_like(found)
    gradients = [torch.autograd.grad(x, queries, upstream)[0] for x in (found, expected)]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("spare", [32, 512])
def test_the_backward_pass_sees_what_the_forward_pass_saw(spare):
    """However much is appended in between, with room for it and without."""
    memory = filled(size=96, block=32, blocks=3, spare=spare)
    queries = torch.randn(2, H, 40, K, requires_grad=True)
    at_once = torch.autograd.grad(memory.attend(queries, 10).square().sum(), queries)[0]
    later = memory.attend(queries, 10).square().sum()
    for seed in range(3, 20):
        memory = memory.append(*[x.float() for x in block_of(seed, length=32)], [True, True])
    assert torch.equal(torch.autograd.grad(later, queries)[0], at_once)


def test_training_over_many_blocks_copies_no_storage():
    """The backward pass of a segment, and of the one before, reads the memory as it was at each of their blocks."""
    config = preset("memorizing", "micro", vocab_size=50, window=32, segment=12 * 32, memory_size=64)
    model, document = BlockRecurrentLM(config), DocumentMemory.empty(config, lanes=2)
    (number,) = config.memory_layers
    storage = document.layers[number - 1].knn._storage
    for _ in range(4):
        tokens = torch.randint(50, (2, config.segment))
        loss = model.loss(tokens, tokens, document)  # while the loss before is still there
        loss.sum.backward()
        document = loss.memory.detach()
        assert document.layers[number - 1].knn._storage is storage


def test_copies_and_pickles_hold_the_entries():
    memory = filled(size=96, block=16, blocks=7, spare=64)
    for copy in (deepcopy(memory), pickle.loads(pickle.dumps(memory))):
        assert all(torch.equal(one, other) for one, other in zip(copy.tensors(), memory.tensors(), strict=True))
        assert (copy.counts, copy.ends, copy.spare) == (memory.counts, memory.ends, memory.spare)


def test_forks_that_append_in_threads_do_not_see_each_other():
    parent = empty().append(*block_of(0), [True, True])

    def grow(seed):
        memory = parent
        for step in range(20):
            memory = memory.append(*block_of(1000 * seed + step), [True, True])
        return memory

    with ThreadPoolExecutor(8) as pool:
        grown = list(pool.map(grow, range(8)))
    for seed, memory in enumerate(grown):
        expected = torch.cat([torch.cat(block_of(1000 * seed + step), dim=-1) for step in (18, 19)], dim=2)
        assert torch.equal(entries(memory, 1), expected[1])
