"""Fixtures of the whole suite: models so small that a test of every system takes a moment."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Triton reads it when it is imported, which torch may do at any time.
os.environ["TRITON_INTERPRET"] = "1"
# Some virtual machines report AMX without having it: bfloat16 products would crash.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import pytest
import torch

from block_recurrent import BlockRecurrentLM, preset
from block_recurrent.ops import cpp
from block_recurrent.presets import SYSTEMS

VOCAB = 23
CAPABILITY = torch.backends.cpu.get_cpu_capability()
BUILDS = {"AVX512": ["AVX512", "AVX2"], "AVX2": ["AVX2"]}
"""Of the C kernels, that a processor can run."""
# H*K is neither D nor 2D, S is not W, M is no multiple of W; n = M, so that retrieval does not hang on rounding.
SIZES = {"d_model": 10, "num_heads": 2, "head_dim": 3, "mlp_dim": 14, "num_states": 3} | {
    "memory_size": 10,
    "memory_neighbors": 10,
}


@pytest.fixture(params=SYSTEMS)
def system(request: pytest.FixtureRequest) -> str:
    """Each of the 15 systems."""
    return request.param


@pytest.fixture(params=BUILDS.get(CAPABILITY, ["none"]))
def build(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every build of the C kernels that this processor can run."""
    monkeypatch.setattr(cpp, "LIBRARY", cpp.load(request.param))
    if cpp.LIBRARY is None:
        pytest.skip(f"there are no kernels for {request.param} in this installation (brt doctor)")
    return request.param


@pytest.fixture
def make_model() -> Callable[..., BlockRecurrentLM]:
    """`make_model(system, **fields)`: a float64 model for reading, of window 4 (xl-2w: 8, xl-4w: 16)."""

    def make(system: str, seed: int = 0, **fields: Any) -> BlockRecurrentLM:
        micro = preset(system, "micro", vocab_size=VOCAB)
        config = micro.replace(**SIZES | {"window": micro.window // 4, "segment": micro.segment // 4} | fields)
        torch.manual_seed(seed)
        model = BlockRecurrentLM(config).double().eval()
        # Away from the ones and zeros of a new model, where many mistakes would not show.
        for name, parameter in model.named_parameters():
            parameter.data += 0.2 * torch.randn_like(parameter)
            if name.endswith("scale"):
                parameter.data[0] *= -1
        return model

    return make


@pytest.fixture
def tokens() -> Callable[..., torch.Tensor]:
    """`tokens(lanes, length)`: random tokens, always the same ones."""

    def draw(lanes: int, length: int, seed: int = 0) -> torch.Tensor:
        return torch.randint(VOCAB, (lanes, length), generator=torch.Generator().manual_seed(seed))

    return draw


@pytest.fixture
def shared_folder() -> Path:
    """The folder beside the checkout with the definition of the model and its golden files."""
    folder = Path(__file__).parents[2] / "shared"
    if not folder.is_dir():
        pytest.skip("there is no folder 'shared' beside the checkout")
    return folder
