"""Weights that copy from the start (`copy_init`)."""

from __future__ import annotations

import pytest
import torch

from block_recurrent import BlockRecurrentLM, preset
from block_recurrent.presets import SYSTEMS

V = 300


def model_of(system, **changes):
    torch.manual_seed(0)
    sizes = {"d_model": 96, "num_heads": 3, "head_dim": 32, "window": 32, "segment": 64, "scale_init": 10.0}
    return BlockRecurrentLM(preset(system, "micro", V, **sizes, copy_init=True, **changes)).eval()


def rank_of_the_next(model):
    """Where the token that comes again stands among all, at the second time of a passage of 16 tokens; 0 is first."""
    torch.manual_seed(1)
    passage = torch.randint(0, V - 1, (16, 12))
    text = torch.cat([passage, torch.randint(0, V - 1, (16, 4)), passage], dim=1)
    with torch.no_grad():
        logits = model(text)[0][:, 17:-1]
    right = logits.gather(2, text[:, 18:, None])
    return (logits > right).sum(2).double().mean()


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_passage_in_the_window_is_found_again_before_any_training(system):
    copying = model_of(system)
    random = BlockRecurrentLM(copying.config.replace(copy_init=False)).eval()
    assert rank_of_the_next(copying) < 0.75 * rank_of_the_next(random)


def test_dimensions_that_do_not_divide():
    for sizes in ({"d_model": 50, "num_heads": 1, "head_dim": 7}, {"d_model": 20, "num_heads": 3, "head_dim": 16}):
        config = preset("rec-fixed-skip", "micro", V, **sizes, copy_init=True)
        logits, _ = BlockRecurrentLM(config)(torch.randint(0, V, (2, 40)))
        assert logits.isfinite().all()


def test_it_is_no_part_of_the_shape():
    config = preset("rec-fixed-skip", "micro", V)
    assert config.shape_json() == config.replace(copy_init=True).shape_json()
