"""What must not go wrong when something goes wrong: numbers, disks, folders, configurations."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from block_recurrent.checkpoint import find_checkpoint, folders, list_checkpoints, load_run, read_weights
from block_recurrent.data import LaneStream, load_tokenizer
from block_recurrent.data.corpus.prepare import PrepareSettings, prepare
from block_recurrent.errors import CheckpointError, ConfigError, TrainingError
from block_recurrent.model.language_model import BlockRecurrentLM, Loss
from block_recurrent.run_config import RunConfig
from block_recurrent.train import state
from block_recurrent.train.loop import train

from .conftest import checkpoint_contents, read_metrics, write_documents

MakeConfig = Callable[..., RunConfig]


def names(run: Path) -> list[str]:
    return [path.name for path in list_checkpoints(run)]


def test_loss_that_is_not_finite(make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original, calls = BlockRecurrentLM.loss, iter(range(1, 100))

    def poisoned(self: BlockRecurrentLM, *args: Any, **kwargs: Any) -> Loss:
        loss = original(self, *args, **kwargs)
        if self.training and next(calls) == 6:
            loss.per_token[2, 3] = float("nan")
            return loss._replace(sum=loss.sum * float("nan"))
        return loss

    monkeypatch.setattr(BlockRecurrentLM, "loss", poisoned)
    with pytest.raises(TrainingError, match=r"step 6: the loss of lane 2 is nan"):
        train(make_config(**{"eval.every": 0}), tmp_path)
    assert names(tmp_path) == ["step-00000004"]
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2, 3, 4, 5]
    monkeypatch.undo()
    assert train(make_config(**{"eval.every": 0}), tmp_path) is True


def test_gradient_that_is_not_finite(make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original, calls = BlockRecurrentLM.loss, iter(range(1, 100))

    def poisoned(self: BlockRecurrentLM, *args: Any, **kwargs: Any) -> Loss:
        loss = original(self, *args, **kwargs)
        if self.training and next(calls) == 6:
            weight = self.layers[1].mlp.output.weight
            return loss._replace(sum=loss.sum + _Poison.apply(weight))
        return loss

    monkeypatch.setattr(BlockRecurrentLM, "loss", poisoned)
    with pytest.raises(TrainingError, match=r"step 6: the gradient of 'layers\.1\.mlp\.output\.weight' is not finite"):
        train(make_config(**{"eval.every": 0}), tmp_path)
    assert names(tmp_path) == ["step-00000004"]


class _Poison(torch.autograd.Function):
    """Zero, with an infinite gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.shape = x.shape
        return x.new_zeros(())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.new_full(ctx.shape, float("inf"))


def test_weights_that_are_not_finite_are_not_saved(make_config: MakeConfig, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with pytest.raises((TrainingError, CheckpointError), match=r"finite|is nan|is inf"):
        train(make_config(**{"schedule.kind": "constant", "schedule.learning_rate": 1e19, "schedule.warmup": 0}), run)
    assert all(_all_finite(path) for path in list_checkpoints(run))


def _all_finite(path: Path) -> bool:
    return all(bool(x.isfinite().all()) for x in read_weights(path).values())


@pytest.mark.parametrize("where", ["tensors", "memory", "manifest"])
def test_full_disk(make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    config, run = make_config(), tmp_path / "run"
    train(config, tmp_path / "whole")
    full = OSError(errno.ENOSPC, "No space left on device")

    def fails(original: Callable[..., Any]) -> Callable[..., Any]:
        def write(*args: Any, **kwargs: Any) -> Any:
            if (run / "checkpoints" / ".step-00000008.part").exists():
                raise full
            return original(*args, **kwargs)

        return write

    with monkeypatch.context() as patch:
        if where == "tensors":
            patch.setattr(state, "write_tensors", fails(state.write_tensors))
        elif where == "memory":
            patch.setattr("os.fsync", fails(os.fsync))
        else:
            patch.setattr(folders.door, "sha256_of", fails(folders.door.sha256_of))
        with pytest.raises(CheckpointError, match=r"step 8 can't be written.*No space left on device"):
            train(config, run)
    assert names(run) == ["step-00000004", "step-00000006"]
    assert not list((run / "checkpoints").glob(".*"))
    assert train(config, run) is True
    assert read_metrics(run) == read_metrics(tmp_path / "whole")
    assert checkpoint_contents(run, 12) == checkpoint_contents(tmp_path / "whole", 12)


def test_damaged_newest(make_config: MakeConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, run = make_config(), tmp_path / "run"
    train(config, tmp_path / "whole")
    train(config.replace("train", steps=8), run)
    weights = run / "checkpoints" / "step-00000008" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert load_run(run).checkpoint.step == 6
    assert "the hash of model.safetensors differs" in load_run(run).notes[0]
    assert train(config, run) is True
    said = capsys.readouterr().err
    assert "step-00000008' is damaged: the hash of model.safetensors differs" in said
    assert "resuming after step 6 of 12 steps" in said
    assert "renamed to 'unused-step-00000008'" in said
    assert [x for x in read_metrics(run) if x["split"] == "train"] == read_metrics(tmp_path / "whole", "train")


@pytest.mark.parametrize("damage", ["missing", "cut", "manifest"])
def test_all_damaged(make_config: MakeConfig, tmp_path: Path, damage: str) -> None:
    config = make_config(**{"train.steps": 3, "eval.every": 0})
    train(config, tmp_path)
    folder = tmp_path / "checkpoints" / "step-00000003"
    if damage == "missing":
        (folder / "optimizer.safetensors").unlink()
    elif damage == "cut":
        (folder / "state.json").write_bytes((folder / "state.json").read_bytes()[:-4])
    else:
        (folder / "manifest.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"no checkpoint of .* can be used: .*step-00000003' is damaged"):
        train(config.replace("train", steps=5), tmp_path)
    assert folder.is_dir()


HOLD = """
import sys, time
from pathlib import Path
from block_recurrent.train.run_folder import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_second_run_on_a_folder_is_refused(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config(**{"train.steps": 1, "eval.every": 0})
    with subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(TrainingError, match=rf"another process \({holder.pid}\) is training in"):
            train(config, tmp_path)
        holder.kill()
    assert train(config, tmp_path) is True, "a killed process does not leave the lock behind"


def test_differences_are_named(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config(**{"train.steps": 2})
    train(config, tmp_path)
    other = make_config(
        **{"train.steps": 4, "train.seed": 3, "model.dropout": 0.1, "train.save_every": 2, "eval.tokens": 64}
    )
    with pytest.raises(ConfigError, match=r"model\.dropout 0\.05 -> 0\.1; train\.seed 0 -> 3; choose") as error:
        train(other, tmp_path)
    assert "save_every" not in str(error.value)
    assert train(config.replace("train", steps=4, keep=1), tmp_path) is True
    assert names(tmp_path)[-1] == "step-00000004"


def test_other_data_is_refused(make_config: MakeConfig, tmp_path: Path) -> None:
    train(make_config(**{"train.steps": 2}), tmp_path / "run")
    write_documents(tmp_path / "text" / "train", 5, seed=9)
    prepare(PrepareSettings(sources=(str(tmp_path / "text"),)), load_tokenizer("bytes"), tmp_path / "data")
    with pytest.raises(ConfigError, match=r"data\.fingerprint"):
        train(make_config(**{"train.steps": 4, "data.path": str(tmp_path / "data")}), tmp_path / "run")


def test_ways_to_resume(make_config: MakeConfig, tmp_path: Path) -> None:
    config, run = make_config(), tmp_path / "run"
    with pytest.raises(CheckpointError, match="has no checkpoint to resume from, and --resume must"):
        train(config, run, resume="must")
    assert train(config, run, resume="never") is True
    with pytest.raises(TrainingError, match="has checkpoints up to step 12, and --resume never"):
        train(config, run, resume="never")
    with pytest.raises(ConfigError, match="--resume must be auto, never, must, or a checkpoint folder"):
        train(config, run, resume=str(tmp_path / "nowhere"))
    expected = read_metrics(run)
    assert train(config, run, resume=str(run / "checkpoints" / "step-00000008")) is True
    assert read_metrics(run) == expected
    assert (run / "checkpoints" / "unused-step-00000012").is_dir()
    assert train(config, run, resume="must") is True, "there is nothing more to do"
    assert read_metrics(run) == expected


def test_init_from_takes_weights_only(make_config: MakeConfig, tmp_path: Path) -> None:
    train(make_config(), tmp_path / "first")
    second = make_config(
        **{"train.init_from": str(tmp_path / "first"), "train.steps": 1, "schedule.learning_rate": 0.0}
    )
    train(second, tmp_path / "second")
    assert read_metrics(tmp_path / "second")[0]["step"] == 1
    first, same = (load_run(tmp_path / name).model.state_dict() for name in ("first", "second"))
    assert all(torch.equal(first[name], same[name]) for name in first)
    with pytest.raises(CheckpointError, match="does not match the model"):
        train(make_config(**{"train.init_from": str(tmp_path / "first"), "model.mlp_dim": 32}), tmp_path / "third")
    with pytest.raises(CheckpointError, match="it has no checkpoint"):
        train(make_config(**{"train.init_from": str(tmp_path / "nowhere")}), tmp_path / "fourth")


def test_keep_and_best(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config(**{"train.keep": 2, "train.save_every": 2, "eval.every": 4})
    train(config, tmp_path)
    bits = {x["step"]: x["bits_per_token"] for x in read_metrics(tmp_path, "validation")}
    assert list(bits) == [4, 8, 12]
    best = min(bits, key=bits.__getitem__)
    assert names(tmp_path) == sorted({"step-00000010", "step-00000012", f"step-{best:08d}"})
    found, _ = find_checkpoint(tmp_path, "best")
    assert found is not None
    assert (found.step, found.validation_bits) == (best, bits[best])
    assert load_run(tmp_path, "best").checkpoint.step == best


def test_best_survives_worse_ones(make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from block_recurrent.train.validation import Validator

    falling = iter([5.0, 4.0, 4.5, 4.6, 4.7, 4.8])
    monkeypatch.setattr(Validator, "__call__", lambda *_: {"bits_per_token": next(falling)})
    train(make_config(**{"train.keep": 1, "train.save_every": 0, "eval.every": 2}), tmp_path)
    assert names(tmp_path) == ["step-00000004", "step-00000012"]


def test_without_validation(make_config: MakeConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_documents(tmp_path / "text" / "train", 5, seed=3)
    prepare(PrepareSettings(sources=(str(tmp_path / "text"),)), load_tokenizer("bytes"), tmp_path / "data")
    assert train(make_config(**{"train.steps": 2, "data.path": str(tmp_path / "data")}), tmp_path / "run") is True
    assert "no validation split" in capsys.readouterr().err
    assert {line["split"] for line in read_metrics(tmp_path / "run")} == {"train"}
    with pytest.raises(CheckpointError, match="has a validation result"):
        load_run(tmp_path / "run", "best")


def test_metrics_are_cut_back(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config(**{"train.steps": 4, "eval.every": 0})
    train(config, tmp_path)
    expected = read_metrics(tmp_path)
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"split": "train", "step": 5}) + '\n{"split": "tr')
    train(config, tmp_path)
    assert read_metrics(tmp_path) == expected


def test_lanes_must_fit(make_config: MakeConfig, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"train\.lanes is 4: it must be a multiple of accumulate 3"):
        make_config(**{"train.accumulate": 3})
    run = tmp_path / "file"
    run.write_text("")
    with pytest.raises(TrainingError, match="can't be used as a run folder"):
        train(make_config(), run)


def test_the_stream_is_not_read_twice(make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The segments of a run that was stopped are those of one that was not: nothing replayed, nothing skipped."""
    seen: list[np.ndarray] = []
    original = LaneStream.__next__

    def remember(self: LaneStream) -> Any:
        step = original(self)
        if step.cursor["split"] == "train":
            seen.append(step.tokens)
        return step

    monkeypatch.setattr(LaneStream, "__next__", remember)
    config = make_config(**{"eval.every": 0, "train.bptt": 2})
    train(config, tmp_path / "whole")
    whole, seen[:] = list(seen), []
    train(config.replace("train", steps=5), tmp_path / "parts")
    train(config, tmp_path / "parts")
    assert len(seen) == len(whole) == 24
    assert all(np.array_equal(a, b) for a, b in zip(seen, whole, strict=True))


def test_a_run_is_enough_by_itself(make_config: MakeConfig, tmp_path: Path) -> None:
    train(make_config(**{"train.steps": 2}), tmp_path)
    loaded = load_run(tmp_path)
    assert not loaded.model.training
    assert loaded.tokenizer.vocab_size == loaded.model.config.vocab_size
    assert loaded.config.system == "rec-fixed-skip"
    assert load_run(tmp_path / "checkpoints" / "step-00000002").checkpoint == loaded.checkpoint
    with pytest.raises(CheckpointError, match=r"is not a run: it has no config\.toml"):
        load_run(tmp_path / "checkpoints")
    with pytest.raises(CheckpointError, match="is not a checkpoint: the folder does not exist"):
        load_run(tmp_path, tmp_path / "nowhere")


def test_module_of_a_run_is_the_plain_model(make_config: MakeConfig, tmp_path: Path) -> None:
    """Compiling or computing layers again changes no name of a weight."""
    plain, again = (
        make_config(**{"train.steps": 2}),
        make_config(**{"train.steps": 2, "train.checkpoint_activations": True}),
    )
    train(plain, tmp_path / "plain")
    train(again, tmp_path / "again")
    assert read_metrics(tmp_path / "plain") == read_metrics(tmp_path / "again"), "exact, with dropout on"
    assert isinstance(load_run(tmp_path / "again").model, nn.Module)
