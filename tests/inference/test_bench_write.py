"""`brt bench write` runs and says what it promises; how fast anything is, no test asserts."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from block_recurrent import BlockRecurrentLM, preset
from block_recurrent.bench import write
from block_recurrent.cli.main import main


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"WIDTH": 32, "DEPTH": 6, "HEADS": 2, "HEAD_SIZE": 16}.items():
        monkeypatch.setattr(f"block_recurrent.bench.contenders.{name}", value)
    for name, value in {"WINDOW": 16, "NEAR": 32, "CONTEXTS": (20, 40), "BANDWIDTH_BYTES": 1 << 20}.items():
        monkeypatch.setattr(write, name, value)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("weights", ["float32", "float32,bfloat16,int8"])
def test_every_part_gives_its_rows(tmp_path: Path, weights: str) -> None:
    parts = "position,batch,limit,gpt2"
    command = ["bench", "write", "--parts", parts, "--tokens", "32", "--far", "160", "--weights", weights, "--json"]
    assert main([*command, str(tmp_path / "x.json")]) == 0
    result = json.loads((tmp_path / "x.json").read_text())
    rows, kinds = result["rows"], weights.split(",")
    ours = [f"block-recurrent {kind}" for kind in kinds]
    assert [(row["part"], row["model"], row["position"], row["lanes"]) for row in rows] == [
        *(("position", name, position, 1) for name in ours for position in (32, 160)),
        *(("batch", name, 32, lanes) for name in ours for lanes in (1, 4, 16)),
        *(("limit", name, 32, lanes) for name in ours for lanes in (1, 16)),
        *(("gpt2", name, position, 1) for position in (20, 40) for name in (ours[0], "gpt2 of transformers")),
    ]
    assert all(row["tokens_per_second"] > 0 and row["ratio"] > 0 for row in rows)
    assert all(row["ratio"] == 1 for row in rows if row["part"] == "position" and row["position"] == 32)


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
    assert main(["bench", "write", "--weights", "float32,int4"]) == 2
    assert "unknown weights 'int4': choose from float32, bfloat16, int8" in capsys.readouterr().err
    assert main(["bench", "write", "--parts", "position,sped"]) == 2
    assert "unknown part 'sped': choose from position, batch, limit, peer, gpt2" in capsys.readouterr().err


def test_bytes_of_a_token() -> None:
    """Counted by hand: weights of all layers, the output table, and what the window and the states hold."""
    config = preset("rec-fixed-skip", "micro", vocab_size=50)
    model = BlockRecurrentLM(config)
    cell = sum(p.numel() for p in model.layers[1].cell.parameters())
    weights = sum(p.numel() for p in model.parameters()) - cell + cell / 16
    # Keys and values of 4 heads: 12 numbers of 3 bytes, and a scale.
    memory = 2 * 4 * (12 * 3 + 4) * (3 * 16 + 16)
    assert write.bytes_per_step(model) == pytest.approx(4 * weights + memory)
    assert write.bytes_per_step(model, lanes=5) == pytest.approx(4 * weights + 5 * memory)
    # In bfloat16: two bytes less for each weight of a matrix; per layer 4 or 5 maps of D x HK, and the MLP. One byte
    # less for each number of keys and values.
    matrices = 48 * 50 + 3 * (4 * 48 * 48 + 2 * 48 * 96) + 2 * 48 * 48
    narrow = 2 * matrices + 2 * 48 * (3 * 16 + 16)
    assert write.bytes_per_step(model, "bfloat16") == pytest.approx(4 * weights + memory - narrow)
