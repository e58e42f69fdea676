"""`save_run`: what a program trained is a run like any other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from block_recurrent import BlockRecurrentLM, load_run, preset, save_run
from block_recurrent.cli.main import main
from block_recurrent.errors import CheckpointError, ConfigError


@pytest.fixture
def model() -> BlockRecurrentLM:
    return BlockRecurrentLM(preset("rec-fixed-skip", "micro", vocab_size=257)).eval()


def test_what_is_saved_is_loaded(model: BlockRecurrentLM, tmp_path: Path) -> None:
    checkpoint = save_run(model, "bytes", tmp_path / "run", step=20)
    loaded = load_run(tmp_path / "run")
    assert loaded.checkpoint.path == checkpoint
    assert loaded.checkpoint.step == 20
    assert loaded.config.model == model.config
    tokens = torch.arange(40)[None]
    assert torch.equal(loaded.model(tokens)[0], model(tokens)[0])


def test_commands_read_it(model: BlockRecurrentLM, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_run(model, "bytes", tmp_path / "run")
    assert main(["write", str(tmp_path / "run"), "--prompt", "Call me", "--tokens", "3", "--go-on"]) == 0
    assert capsys.readouterr().out


def test_a_run_is_replaced_only_when_told(model: BlockRecurrentLM, tmp_path: Path) -> None:
    save_run(model, "bytes", tmp_path / "run", step=7)
    with pytest.raises(CheckpointError, match=r"already contains a run: .* overwrite=True"):
        save_run(model, "bytes", tmp_path / "run", step=8)
    save_run(model, "bytes", tmp_path / "run", step=3, overwrite=True)
    assert load_run(tmp_path / "run").checkpoint.step == 3
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000003"]


def test_a_tokenizer_of_another_size_is_refused(tmp_path: Path) -> None:
    model = BlockRecurrentLM(preset("slide", "micro", vocab_size=30))
    with pytest.raises(ConfigError, match=r"vocab_size is 30, the tokenizer's is 257"):
        save_run(model, "bytes", tmp_path / "run")
    assert not (tmp_path / "run").exists()
