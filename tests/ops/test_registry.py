"""The table of kernels: what it chooses, how a backend is forced, and what the user sees of it."""

from __future__ import annotations

import pytest
import torch

from block_recurrent.cli.main import main
from block_recurrent.errors import ConfigError
from block_recurrent.ops import backend, cpp, registry


def test_every_operation_ends_with_the_reference_for_all_calls():
    for op, rows in registry.TABLE.items():
        assert rows[-1].backend == "reference", op
        assert all(row.why for row in rows)


def test_other_devices_and_dtypes_take_the_reference():
    for x in (torch.empty(1, device="meta"), torch.empty(1, dtype=torch.bfloat16)):
        assert registry.select("window_attention", x, queries=1000) == "reference"
        assert registry.select("norm", x, rows=1000, width=64) == "reference"


@pytest.mark.skipif(cpp.LIBRARY is None, reason="this installation has no kernels (brt doctor)")
def test_sizes_decide():
    x = torch.empty(1)
    assert registry.select("window_attention", x, queries=31) == "tiled"
    assert registry.select("window_attention", x, queries=32) == "cpp"
    assert registry.select("norm", x, rows=64, width=48) == "cpp"
    assert registry.select("norm", x, rows=64, width=50) == "reference"


def test_a_backend_is_forced_inside_and_nowhere_else():
    x = torch.empty(1)
    before = registry.select("window_attention", x, queries=1000)
    with backend("reference"):
        assert registry.select("window_attention", x, queries=1000) == "reference"
        with backend("tiled"):
            assert registry.select("window_attention", x, queries=1000) == "tiled"
            assert registry.select("norm", x, rows=1000, width=64) == "reference", "it has no such backend"
    assert registry.select("window_attention", x, queries=1000) == before


def test_an_unknown_backend_is_named():
    with (
        pytest.raises(ConfigError, match=r"no backend 'referense' \(did you mean 'reference'\?\)"),
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
