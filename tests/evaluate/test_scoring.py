"""Every token once, the same number whatever the lanes and the chunks, and the memory carried throughout."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from block_recurrent import BlockRecurrentLM
from block_recurrent.errors import ConfigError
from block_recurrent.evaluate.scoring import score
from block_recurrent.evaluate.state_edits import (
    StateEdit,
    clear_every,
    freeze_after_first_segment,
    initial_states,
    states_after,
)

LENGTHS = (1, 15, 16, 17, 64, 65, 130, 3, 200, 0)


def draw_documents(lengths: tuple[int, ...] = LENGTHS) -> list[NDArray[np.uint16]]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, 256, length).astype(np.uint16) for length in lengths]


def losses(
    model: BlockRecurrentLM,
    documents: list[NDArray[np.uint16]],
    lanes: int = 4,
    chunk: int | None = None,
    edit: StateEdit | None = None,
) -> list[NDArray[np.float32]]:
    """The losses of each document, after making sure that every token comes once and in order."""
    found: list[list[NDArray[np.float32]]] = [[] for _ in documents]
    for piece in score(model, documents, lanes, chunk, edit):
        assert piece.start == sum(map(len, found[piece.document]))
        found[piece.document].append(piece.nats)
    joined = [np.concatenate([np.empty(0, np.float32), *parts]) for parts in found]
    assert [len(x) for x in joined] == [len(x) for x in documents]
    return joined


def whole(model: BlockRecurrentLM, document: NDArray[np.uint16]) -> NDArray[np.float32]:
    """The losses of one document in one call, straight from the logits."""
    tokens = torch.tensor([[256, *document[:-1].tolist()]])
    with torch.no_grad():
        logits, _ = model(tokens)
    return torch.nn.functional.cross_entropy(
        logits[0], torch.from_numpy(document.astype(np.int64)), reduction="none"
    ).numpy()


@pytest.mark.parametrize("system", ["rec-fixed-skip", "rec-lstm-dual", "feedback-fixed-skip", "slide", "xl-2w"])
@pytest.mark.parametrize(("lanes", "chunk"), [(1, None), (3, 16), (20, 64), (4, 7), (2, 1000)])
def test_lanes_and_chunks_change_nothing(
    make_reader: Callable[..., BlockRecurrentLM], system: str, lanes: int, chunk: int | None
) -> None:
    model = make_reader(system)
    documents = draw_documents()
    for found, document in zip(losses(model, documents, lanes, chunk), documents, strict=True):
        if len(document):
            assert found == pytest.approx(whole(model, document), abs=1e-5)


def test_nothing_to_score(make_reader: Callable[..., BlockRecurrentLM]) -> None:
    assert list(score(make_reader(), [])) == []
    assert list(score(make_reader(), draw_documents((0, 0)))) == []
    for lanes, chunk in ((0, None), (1, 0)):
        with pytest.raises(ConfigError, match="at least 1"):
            list(score(make_reader(), draw_documents(), lanes, chunk))


@pytest.mark.parametrize("lanes", [1, 3])
@pytest.mark.parametrize("chunk", [None, 16, 40])
def test_clearing_by_hand(make_reader: Callable[..., BlockRecurrentLM], lanes: int, chunk: int | None) -> None:
    """The same with the state put back by hand, in calls of 48 tokens: the window cache goes on."""
    from dataclasses import replace

    model = make_reader()
    documents = draw_documents((200, 96, 150))
    cleared = losses(model, documents, lanes, chunk, clear_every(model, 48))
    start = initial_states(model)
    for document, found in zip(documents, cleared, strict=True):
        read = np.concatenate([[256], document[:-1].astype(np.int64)])
        memory, expected = None, []
        for begin in range(0, len(read), 48):
            part = slice(begin, begin + 48)
            with torch.no_grad():
                loss = model.loss(
                    torch.from_numpy(read[part])[None], torch.from_numpy(document[part].astype(np.int64))[None], memory
                )
            layers = tuple(
                replace(layer, state=start[i][None] if i in start else None)
                for i, layer in enumerate(loss.memory.layers)
            )
            memory = replace(loss.memory, layers=layers)
            expected.append(loss.per_token[0].numpy())
        assert found == pytest.approx(np.concatenate(expected), abs=1e-5)


def test_clearing_changes_what_comes_after_the_border_only(make_reader: Callable[..., BlockRecurrentLM]) -> None:
    model = make_reader()
    (document,) = draw_documents((256,))
    (normal,), (cleared,) = losses(model, [document]), losses(model, [document], edit=clear_every(model, 64))
    assert normal[:64] == pytest.approx(cleared[:64], abs=1e-6)
    for begin in (64, 128, 192):
        assert np.abs(normal[begin : begin + 16] - cleared[begin : begin + 16]).max() > 1e-4
    (longer,) = losses(model, [document], edit=clear_every(model, 1024))
    assert normal == pytest.approx(longer, abs=1e-6)


def test_freezing_stops_updates_after_the_first_segment(make_reader: Callable[..., BlockRecurrentLM]) -> None:
    """What a frozen state knows of is the first segment; beyond the reach of the window, nothing newer is known."""
    model = make_reader()
    (document,) = draw_documents((400,))
    frozen = losses(model, [document, document[:300]], 2, 100, freeze_after_first_segment(model))
    (normal,) = losses(model, [document])
    assert frozen[0][:64] == pytest.approx(normal[:64], abs=1e-6)
    assert np.abs(frozen[0][96:] - normal[96:]).max() > 1e-4
    assert frozen[0][:300] == pytest.approx(frozen[1], abs=1e-5)
    changed = document.copy()
    changed[100:150] = (changed[100:150] + 1) % 256
    (after_change,) = losses(model, [changed], edit=freeze_after_first_segment(model))
    (normal_change,) = losses(model, [changed])
    # The window reaches 3 layers x 16 tokens; only the recurrent state could tell of tokens 100 to 150 after that.
    assert after_change[200:] == pytest.approx(frozen[0][200:], abs=1e-6)
    assert np.abs(normal_change[200:] - normal[200:]).max() > 1e-6


def test_swapped_state_is_the_one_that_the_other_document_left(make_reader: Callable[..., BlockRecurrentLM]) -> None:
    from block_recurrent.evaluate.state_edits import ReplaceState

    model = make_reader()
    document, other = draw_documents((200, 130))
    read = torch.tensor([256, *other.tolist()])
    states = states_after(model, read.numpy())
    with torch.no_grad():
        _, memory = model(read[None, : len(read) // 16 * 16])
    for i, state in states.items():
        assert state.numpy() == pytest.approx(memory.layers[i].state[0].numpy(), abs=1e-5)
    (swapped,) = losses(model, [document], edit=ReplaceState(64, states))
    (cleared,) = losses(model, [document], edit=clear_every(model, 64))
    assert np.abs(swapped[64:] - cleared[64:]).max() > 1e-4
    assert swapped[:64] == pytest.approx(cleared[:64], abs=1e-6)


def test_refusals(make_reader: Callable[..., BlockRecurrentLM]) -> None:
    with pytest.raises(ConfigError, match=r"multiple of the model's window 16.*try 32"):
        clear_every(make_reader(), 30)
    with pytest.raises(ConfigError, match=r"multiple of the model's window 16.*try 16"):
        clear_every(make_reader(), 0)
    with pytest.raises(ConfigError, match="no recurrent state"):
        clear_every(make_reader("slide"), 64)
