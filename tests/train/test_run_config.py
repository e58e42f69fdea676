"""Configurations of runs: where values come from, what is refused, and what is saved."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from block_recurrent.cli.main import main
from block_recurrent.errors import ConfigError
from block_recurrent.run_config import (
    DataConfig,
    EvalConfig,
    OptimizerConfig,
    RunConfig,
    ScheduleConfig,
    TrainConfig,
    check_keys,
    differences,
    parse_settings,
    resolve,
)
from block_recurrent.runtime import start

from .conftest import read_metrics

BASE: dict[str, Any] = {"system": "rec-fixed-skip", "size": "40m"}


def test_the_paper_is_the_default() -> None:
    config = resolve(BASE, vocab_size=32_001)
    assert (config.train.steps, config.train.lanes, config.model.segment) == (500_000, 32, 4096)
    assert (config.schedule.kind, config.schedule.learning_rate, config.schedule.warmup) == ("inverse-sqrt", 1.0, 1000)
    assert (config.optimizer.name, config.optimizer.momentum) == ("adafactor", 0.9)
    assert resolve(BASE | {"system": "xl"}, 32_001).train.lanes == 256
    cosine = resolve(BASE | {"schedule": {"kind": "cosine"}}, 32_001).schedule
    assert (cosine.learning_rate, cosine.final_learning_rate, cosine.decay_steps) == (0.01, 0.001, 500_000)
    given = resolve(
        BASE | {"schedule": {"kind": "cosine", "learning_rate": 0.5}, "train": {"steps": 7}}, 32_001
    ).schedule
    assert (given.learning_rate, given.decay_steps) == (0.5, 7)


def test_saved_and_read_again() -> None:
    given = BASE | {"model": {"gate_bias": False, "recurrent_layers": [2, 3]}, "data": {"path": 'a "b"\\c é'}}
    config = resolve(given, 257)
    assert config.model.recurrent_layers == (2, 3)
    assert RunConfig.from_dict(tomllib.loads(config.to_toml())) == config
    assert differences(config, RunConfig.from_dict(tomllib.loads(config.to_toml()))) == []


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"trian": {}}, r"unknown section 'trian' \(did you mean 'train'\?\)"),
        ({"train": {"lans": 3}}, r"unknown key 'train\.lans' \(did you mean 'lanes'\?\)"),
        ({"model": {"windw": 3}}, r"unknown key 'model\.windw' \(did you mean 'window'\?\)"),
        ({"train": 3}, "'train' is 3: it must be a section"),
    ],
)
def test_unknown_names(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_keys(values)


@pytest.mark.parametrize(
    ("section", "values", "message"),
    [
        (TrainConfig, {"lanes": 2.5}, r"train\.lanes is 2\.5: it must be a whole number"),
        (TrainConfig, {"lanes": True}, r"train\.lanes is True: it must be a whole number"),
        (TrainConfig, {"lanes": 0}, r"train\.lanes is 0: it must be at least 1"),
        (TrainConfig, {"dtype": "float16"}, r"train\.dtype is 'float16': it must be one of auto, float32, bfloat16"),
        (TrainConfig, {"clip": float("nan")}, r"train\.clip is nan: it must be finite"),
        (OptimizerConfig, {"name": "adam"}, r"it must be one of adafactor, adamw, muon \(did you mean 'adamw'\?\)"),
        (OptimizerConfig, {"momentum": 1.0}, r"optimizer\.momentum is 1\.0: it must be at least 0 and less than 1"),
        (OptimizerConfig, {"weight_decay": 0.1}, r"Adafactor has no weight decay here"),
        (ScheduleConfig, {"kind": "cosine"}, r"schedule\.decay_steps is 0: it must be at least 1"),
        (ScheduleConfig, {"warmup": "long"}, r"schedule\.warmup is 'long': it must be a whole number"),
        (EvalConfig, {"every": -1}, r"eval\.every is -1: it must be at least 0"),
        (DataConfig, {"path": 3}, r"data\.path is 3: it must be a string"),
    ],
)
def test_rules(section: type, values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        section(**values)


def test_settings_of_the_command_line() -> None:
    assert parse_settings(["train.lanes=8"]) == {"train": {"lanes": 8}}
    assert parse_settings(["schedule.kind=cosine"]) == {"schedule": {"kind": "cosine"}}
    assert parse_settings(["model.recurrent_layers=[1, 2]"]) == {"model": {"recurrent_layers": [1, 2]}}
    assert parse_settings(["schedule.learning_rate=1e-3"]) == {"schedule": {"learning_rate": 1e-3}}
    assert parse_settings(["model.feedback=true"]) == {"model": {"feedback": True}}
    several = parse_settings(["train.lanes=8", "train.steps=5", "train.lanes=2"])
    assert several == {"train": {"lanes": 2, "steps": 5}}
    for bad in ("lanes=8", "train.lanes", "train.=8", ".lanes=8"):
        with pytest.raises(ConfigError, match=r"it must be section\.key=value"):
            parse_settings([bad])


def test_vocabulary_comes_from_the_data() -> None:
    with pytest.raises(ConfigError, match=r"model\.vocab_size is 5, but the data has 257 pieces"):
        resolve(BASE | {"model": {"vocab_size": 5}}, 257)


def test_more_steps_matter_only_to_schedules_that_end() -> None:
    longer = {"train": {"steps": 9}}
    assert differences(resolve(BASE, 257), resolve(BASE | longer, 257)) == []
    cosine = {"schedule": {"kind": "cosine"}}
    assert differences(resolve(BASE | cosine, 257), resolve(BASE | cosine | longer, 257)) == [
        "schedule.decay_steps 500000 -> 9"
    ]


def test_precedence(corpus: Path, tmp_path: Path) -> None:
    """Default < preset < file < flags, in the config.toml that is saved."""
    file = tmp_path / "my.toml"
    file.write_text('size = "micro"\n[train]\nsteps = 2\nlanes = 2\nseed = 5\n[model]\nmlp_dim = 32\n')
    out = tmp_path / "run"
    command = ["train", "--system", "rec-fixed-skip", "--data", str(corpus), "--out", str(out), "--config", str(file)]
    assert main([*command, "--lanes", "4", "--set", "train.clip=0.5", "--set", "eval.tokens=64"]) == 0
    saved = RunConfig.from_dict(tomllib.loads((out / "config.toml").read_text()))
    assert (saved.train.steps, saved.train.lanes, saved.train.seed, saved.train.clip) == (2, 4, 5, 0.5)
    assert (saved.model.mlp_dim, saved.model.d_model, saved.optimizer.beta2) == (32, 48, 0.95)
    assert len(read_metrics(out, "train")) == 2
    again = ["train", "--config", str(out / "config.toml"), "--out", str(tmp_path / "again")]
    assert main(again) == 0
    assert read_metrics(tmp_path / "again") == read_metrics(out)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--system is missing"),
        (["--system", "rec-fixd-skip", "--size", "micro"], "there is no system 'rec-fixd-skip' (did you mean"),
        (
            ["--system", "xl", "--size", "micro", "--set", "train.lames=1"],
            "unknown key 'train.lames' (did you mean 'lanes'?)",
        ),
        (["--system", "xl", "--size", "micro", "--set", "model.window=5"], "segment 16 is not a multiple of window 5"),
        (["--system", "xl", "--size", "micro", "--config", "nowhere.toml"], "'nowhere.toml' can't be read"),
        (["--system", "xl", "--size", "micro", "--device", "gpu"], "device is 'gpu'"),
        (["--system", "xl", "--size", "micro", "--steps", "0"], "train.steps is 0: it must be at least 1"),
    ],
)
def test_errors_are_one_line(
    arguments: list[str], message: str, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "--data", str(corpus), "--out", str(tmp_path / "run"), *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_missing_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--system", "xl", "--size", "micro", "--out", str(tmp_path)]) == 2
    assert "--data is missing" in capsys.readouterr().err
    assert main(["train", "--system", "xl", "--size", "micro", "--data", str(tmp_path), "--out", str(tmp_path)]) == 2
    assert "is not prepared data" in capsys.readouterr().err


def test_dry_run(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--system", "rec-lstm-dual", "--size", "micro", "--data", str(corpus), "--dry-run"]) == 0
    out = capsys.readouterr().out
    for part in ("[schedule]", "recurrent cell", "estimated memory", "activations", "one step:", "nothing was written"):
        assert part in out
    assert not list(tmp_path.iterdir())


def test_tiny_and_small_have_a_recipe_of_their_own_and_the_papers_sizes_the_papers() -> None:
    def made(size: str, **given: Any) -> RunConfig:
        return resolve({"system": "rec-fixed-skip", "size": size, **given}, vocab_size=257)

    tiny = made("tiny", train={"steps": 300})
    assert (tiny.optimizer.name, tiny.optimizer.embedding_rate, tiny.model.scale_init) == ("muon", 8.0, 10.0)
    assert (tiny.schedule.kind, tiny.schedule.warmup, tiny.schedule.decay_steps) == ("cosine", 30, 300)
    assert (tiny.model.copy_init, tiny.data.repeats, tiny.data.repeat_steps) == (True, 0.2, 150)
    assert made("tiny", data={"excerpt": 0}).data.repeats == 0, "repeats are planted into excerpts"
    assert made("tiny", system="slide-plus").data.repeats == 0, "without a memory they are out of reach"
    assert made("tiny", model={"segment": 960}).data.excerpt == 4800, "an excerpt has whole segments"
    assert made("tiny", schedule={"learning_rate": 0.001}).schedule.final_learning_rate == pytest.approx(0.0001)
    adafactor = made("small", optimizer={"name": "adafactor"})
    assert (adafactor.optimizer.embedding_rate, adafactor.schedule.learning_rate) == (1.0, 0.01)
    paper = made("160m")
    assert (paper.optimizer.name, paper.model.scale_init, paper.data.excerpt) == ("adafactor", 1.0, 0)
    assert (paper.model.copy_init, paper.data.repeats) == (False, 0.0)
    assert (paper.schedule.kind, paper.schedule.learning_rate, paper.model.dropout) == ("inverse-sqrt", 1.0, 0.05)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (TrainConfig(), ["deterministic", "fill False", "highest", "cpu:gloo,cuda:nccl"]),
        (TrainConfig(deterministic=False, tf32=True), ["high", "cpu:gloo,cuda:nccl"]),
    ],
    ids=["default", "tf32"],
)
def test_what_torch_is_told_on_a_gpu(config: TrainConfig, expected: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """By a process under torchrun: numbers of Python are exchanged between CPUs, without the GPU."""
    told: list[str] = []
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setattr(dist, "init_process_group", lambda backend, timeout: told.append(backend))
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    fill = "_set_deterministic_fill_uninitialized_memory"
    monkeypatch.setattr(torch._C, fill, lambda mode: told.append(f"fill {mode}"))
    for name in ("is_available", "is_bf16_supported"):
        monkeypatch.setattr(torch.cuda, name, lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch, "use_deterministic_algorithms", lambda *_, **__: told.append("deterministic"))
    monkeypatch.setattr(torch, "set_float32_matmul_precision", told.append)
    with start(*config.place) as runtime:
        assert (runtime.device.type, runtime.dtype) == ("cuda", torch.bfloat16)
    assert told == expected
