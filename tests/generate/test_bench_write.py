"""`brt bench write` runs and says what it promises; how fast anything is, no test asserts."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch

from block_recurrent import BlockRecurrentLM, preset
from block_recurrent.bench import write
from block_recurrent.cli.main import main
from block_recurrent.generate.int8 import quantize


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"WIDTH": 32, "DEPTH": 6, "HEADS": 2, "HEAD_SIZE": 16}.items():
        monkeypatch.setattr(f"block_recurrent.bench.contenders.{name}", value)
    for name, value in {"WINDOW": 16, "NEAR": 32, "CONTEXTS": (20, 40), "BANDWIDTH_BYTES": 1 << 20}.items():
        monkeypatch.setattr(write, name, value)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("flags", [[], ["--int8"]])
def test_every_part_gives_its_rows(tmp_path: Path, flags: list[str]) -> None:
    parts = "position,batch,limit,gpt2"
    command = ["bench", "write", "--parts", parts, "--tokens", "32", "--far", "160", "--json"]
    assert main([*command, str(tmp_path / "x.json"), *flags]) == 0
    result = json.loads((tmp_path / "x.json").read_text())
    rows = result["rows"]
    assert [(row["part"], row["position"], row["lanes"]) for row in rows] == [
        ("position", 32, 1),
        ("position", 160, 1),
        ("batch", 32, 1),
        ("batch", 32, 4),
        ("batch", 32, 16),
        ("limit", 32, 1),
        *(("gpt2", position, 1) for position in (20, 20, 40, 40)),
    ]
    assert all(row["tokens_per_second"] > 0 and row["ratio"] > 0 for row in rows)
    assert ("int8" in rows[0]["model"]) == bool(flags)


@pytest.mark.usefixtures("small")
@pytest.mark.skipif(
    importlib.util.find_spec("block_recurrent_transformer_pytorch") is None, reason="the extra 'peers' is not installed"
)
def test_the_peer_writes_beside_ours(tmp_path: Path) -> None:
    command = ["bench", "write", "--parts", "peer", "--tokens", "16", "--json"]
    assert main([*command, str(tmp_path / "x.json")]) == 0
    ours, peer = json.loads((tmp_path / "x.json").read_text())["rows"]
    assert ours["ratio"] == 1
    assert peer["ratio"] == pytest.approx(ours["tokens_per_second"] / peer["tokens_per_second"], rel=0.05)


def test_an_unknown_part_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "write", "--parts", "position,sped"]) == 2
    assert "there is no part 'sped': known are position, batch, limit, peer, gpt2" in capsys.readouterr().err


def test_bytes_of_a_token() -> None:
    """Counted by hand: weights of all layers, the output table, and what the window and the states hold."""
    config = preset("rec-fixed-skip", "micro", vocab_size=50)
    model = BlockRecurrentLM(config)
    cell = sum(p.numel() for p in model.layers[1].cell.parameters())
    weights = sum(p.numel() for p in model.parameters()) - cell + cell / 16
    memory = 2 * 48 * (3 * 16 + 16)
    assert write.bytes_per_token(model, config) == pytest.approx(4 * (weights + memory))
    plain = preset("slide", "micro", vocab_size=50)
    torch.manual_seed(0)
    wide = BlockRecurrentLM(plain)
    assert write.bytes_per_token(quantize(wide.eval()), plain) < 0.6 * write.bytes_per_token(wide, plain)
