"""The memory inspector against numbers worked out by other means."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from block_recurrent import BlockRecurrentLM, preset
from block_recurrent.analysis import inspector
from block_recurrent.analysis.ablation import ablate, ablation_counts
from block_recurrent.analysis.inspector import inspect
from block_recurrent.errors import ConfigError
from block_recurrent.evaluate.scoring import score
from block_recurrent.evaluate.state_edits import clear_every, initial_states

TOKENS = np.random.default_rng(0).integers(0, 256, 100).astype(np.uint16)


@pytest.mark.parametrize(
    "system", ["rec-fixed-skip", "rec-fixed-dual", "rec-lstm-single", "rec-lstm-dual", "feedback-fixed-skip"]
)
def test_states_and_reading(
    make_reader: Callable[..., BlockRecurrentLM], system: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Norms and changes are those of the memory; reading is what the model's own attention does."""
    model = make_reader(system)
    found = inspect(model, TOKENS)
    (layer,) = found.layers
    blocks = (len(TOKENS) + 1) // 16
    assert (layer.layer, found.tokens, layer.read.shape) == (2, blocks * 16, (blocks, 16))
    assert layer.read.sum(1) == pytest.approx(np.ones(blocks), abs=1e-5)

    read = torch.tensor([[256, *TOKENS.tolist()]])
    memory, before = None, initial_states(model)[1]
    for block in range(blocks):
        with torch.no_grad():
            _, memory = model(read[:, block * 16 : (block + 1) * 16], memory)
        state = memory.layers[1].state[0]
        assert layer.state_norm[block] == pytest.approx(state.norm(dim=-1).mean().item(), rel=1e-4)
        assert layer.written[block] == pytest.approx((state - before).norm(dim=-1).numpy(), abs=1e-4)
        before = state
    expected = {"keep"} if "fixed" in system else {"forget", "input"}
    assert {name.split()[-1] for name in layer.gates} == expected
    assert all(len(values) == blocks and (values > 0).all() and (values < 1).all() for values in layer.gates.values())


def test_reading_is_the_attention_of_the_model(make_reader: Callable[..., BlockRecurrentLM], monkeypatch: Any) -> None:
    """The weights of the model's own attention to the state, block by block, are the shares."""
    from block_recurrent.model import layer as layer_module

    model = make_reader("rec-fixed-skip", num_states=12, head_dim=12, num_heads=4)
    shares = []

    def attend_and_note(q: torch.Tensor, keys: list[torch.Tensor], values: list[torch.Tensor], dropout: float) -> Any:
        (k,), (v,) = keys, values
        weights = (q @ k.transpose(-1, -2)).softmax(-1)
        shares.append(weights.mean((0, 1, 2)))
        return weights @ v

    found = inspect(model, TOKENS)
    monkeypatch.setattr(layer_module, "attend_each", attend_and_note)
    read = torch.tensor([[256, *TOKENS.tolist()]])
    memory = None
    for block in range(len(found.layers[0].read)):
        with torch.no_grad():
            _, memory = model(read[:, block * 16 : (block + 1) * 16], memory)
    assert found.layers[0].read == pytest.approx(torch.stack(shares).numpy(), abs=1e-5)


def test_a_window_of_a_few_tokens() -> None:
    """The engine decodes so short a call with its kernel, which calls no modules and no hooks."""
    model = BlockRecurrentLM(preset("rec-fixed-skip", "micro", 257, window=4, num_heads=2, head_dim=64))
    (layer,) = inspect(model, TOKENS[:15]).layers
    assert [len(values) for values in layer.gates.values()] == [4]
    assert layer.read.sum(1) == pytest.approx(np.ones(4), abs=1e-5)


def test_hooks_are_gone_afterwards(make_reader: Callable[..., BlockRecurrentLM]) -> None:
    model = make_reader()
    inspect(model, TOKENS)
    assert all(not module._forward_hooks for module in model.modules())


def test_a_text_shorter_than_a_block(make_reader: Callable[..., BlockRecurrentLM]) -> None:
    (layer,) = inspect(make_reader(), TOKENS[:5]).layers
    assert len(layer.change) == 0
    assert layer.most_changed == []


def test_systems_without_a_state_are_refused(make_reader: Callable[..., BlockRecurrentLM]) -> None:
    with pytest.raises(ConfigError, match="no recurrent state"):
        inspect(make_reader("slide"), TOKENS)


def test_taking_all_vectors_away_is_clearing_at_every_block(make_reader: Callable[..., BlockRecurrentLM]) -> None:
    model = make_reader()
    taken = ablate(model, TOKENS, inspect(model, TOKENS))
    assert [r.count for r in taken] == [1, 4, 16] == ablation_counts(16)
    cleared = np.concatenate([piece.nats for piece in score(model, [TOKENS], edit=clear_every(model, 16))])
    normal = np.concatenate([piece.nats for piece in score(model, [TOKENS])])
    assert taken[-1].most_read == pytest.approx(cleared.mean() / np.log(2), abs=1e-5)
    assert taken[-1].least_read == pytest.approx(taken[-1].most_read, abs=1e-6)
    assert taken[0].normal == pytest.approx(normal.mean() / np.log(2), abs=1e-5)
    assert len({r.most_read for r in taken} | {taken[0].normal}) == 4


def test_most_changed_blocks_come_first(make_reader: Callable[..., BlockRecurrentLM]) -> None:
    (layer,) = inspect(make_reader(), TOKENS).layers
    changes = [layer.change[block] for block in layer.most_changed]
    assert changes == sorted(changes, reverse=True)
    assert 0 not in layer.most_changed
    assert len(layer.most_changed) == min(inspector.MOST_CHANGED, len(layer.change) - 1)
