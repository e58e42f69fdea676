"""The table of kernels: what it chooses, how a backend is forced, and what the user sees of it."""

from __future__ import annotations

import pytest
import torch

from block_recurrent import BlockRecurrentLM, preset
from block_recurrent.cli.main import main
from block_recurrent.errors import ConfigError
from block_recurrent.ops import backend, cpp, registry, triton


def test_every_operation_ends_with_the_reference_for_all_calls():
    for op, rows in registry.TABLE.items():
        assert rows[-1].backend == "reference", op
        assert all(row.why for row in rows)


def test_other_dtypes_take_the_reference():
    half = torch.empty(1, dtype=torch.bfloat16)
    assert registry.select("norm", half, rows=1000, width=64) == "reference"
    assert registry.select("window_attention", half, queries=1000, head=64) == "reference"


def test_tensors_without_data_stand_for_those_of_a_gpu(monkeypatch):
    for installed, chosen in ((True, "triton"), (False, "reference")):
        monkeypatch.setattr(triton, "INSTALLED", installed)
        for dtype in (torch.float32, torch.bfloat16):
            x = torch.empty(1, device="meta", dtype=dtype)
            assert registry.select("window_attention", x, queries=1, head=256) == chosen
            assert registry.select("window_attention", x, queries=1, head=257) == "reference"
            assert registry.select("norm", x, rows=1, width=64) == chosen
    with pytest.raises(ConfigError, match="needs triton"), backend("triton"):
        pass


@pytest.mark.skipif(cpp.LIBRARY is None, reason="this installation has no kernels (brt doctor)")
def test_sizes_decide():
    x = torch.empty(1)
    assert registry.select("window_attention", x, queries=31, head=64) == "tiled"
    assert registry.select("window_attention", x, queries=32, head=64) == "cpp"
    assert registry.select("attend", x, pairs=8, queries=512, keys=512) == "reference"
    assert registry.select("attend", x, pairs=64, queries=512, keys=512) == "cpp", "heads, lanes and blocks count"
    assert registry.select("norm", x, rows=64, width=48) == "cpp"
    assert registry.select("norm", x, rows=64, width=50) == "reference"


def test_a_backend_is_forced_inside_and_nowhere_else():
    x = torch.empty(1)
    before = registry.select("window_attention", x, queries=1000, head=64)
    with backend("reference"):
        assert registry.select("window_attention", x, queries=1000, head=64) == "reference"
        with backend("tiled"):
            assert registry.select("window_attention", x, queries=1000, head=64) == "tiled"
            assert registry.select("norm", x, rows=1000, width=64) == "reference", "it has no such backend"
    assert registry.select("window_attention", x, queries=1000, head=64) == before


@pytest.mark.parametrize("system", ["slide", "rec-lstm-dual", "memorizing"])
@pytest.mark.parametrize("name", [None, "tiled", "chunked"])
def test_gradients_of_gradients_are_the_references_or_an_error(name, system):
    """Of a model in float64, in which most operators can be differentiated twice: the others must not be passed by."""
    torch.manual_seed(0)
    model = BlockRecurrentLM(preset(system, "micro", vocab_size=20, num_layers=3, dropout=0.0)).double().eval()
    model.embedding.weight.requires_grad_(name != "chunked")  # the loss then depends on the vectors only
    tokens, parameters = torch.randint(20, (1, 17)), [p for p in model.parameters() if p.requires_grad]

    def second_order():
        loss = model.loss(tokens, tokens).sum
        first = torch.autograd.grad(loss, parameters, create_graph=True, allow_unused=True)
        return torch.autograd.grad(sum(d.square().sum() for d in first if d is not None), parameters, allow_unused=True)

    with backend("reference"):
        assert any(d is not None for d in second_order())
    with backend(name), pytest.raises(RuntimeError, match="once_differentiable"):
        second_order()


def test_an_unknown_backend_is_named():
    with (
        pytest.raises(ConfigError, match=r"unknown backend 'referense' \(did you mean 'reference'\?\)"),
        backend("referense"),
    ):
        pass


def test_doctor_prints_the_table(capsys):
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    for op, rows in registry.TABLE.items():
        for row in rows:
            assert f"{op}: {row.backend}" in printed
            assert row.why in printed
