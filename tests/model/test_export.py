"""torch.export: the check of tokens reads values, which an exported graph does not have."""

from __future__ import annotations

import torch

from block_recurrent import BlockRecurrentLM, preset


def test_a_model_can_be_exported() -> None:
    torch.manual_seed(0)
    model = BlockRecurrentLM(preset("rec-fixed-skip", "micro", vocab_size=64)).eval()
    tokens = torch.randint(64, (1, 32))
    with torch.no_grad():
        exported = torch.export.export(model, (tokens,)).module()
        assert torch.allclose(exported(tokens)[0], model(tokens)[0], atol=1e-5)
