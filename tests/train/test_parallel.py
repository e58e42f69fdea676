"""Two processes do what one does; what they save, one or two go on from."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from block_recurrent.checkpoint import export, load_run
from block_recurrent.run_config import RunConfig
from block_recurrent.train.loop import train

from .conftest import FAMILIES, checkpoint_contents, read_metrics

MANY_RUNS = Path(__file__).with_name("many_runs.py")
STEPS = 10
WAYS = ("ddp", "fsdp")


def torchrun(processes: int, jobs: list[dict[str, Any]], folder: Path) -> str:
    """Run jobs one after the other in a group of processes; returns what they said."""
    listed = folder / f"jobs-{processes}.json"
    listed.write_text(json.dumps(jobs))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    done = subprocess.run(
        [*launcher, str(MANY_RUNS), str(listed)],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stderr


def job(config: RunConfig, out: Path, **more: Any) -> dict[str, Any]:
    return {"config": config.to_dict(), "out": str(out), **more}


@pytest.fixture
def plain(make_config: Callable[..., RunConfig]) -> Callable[..., RunConfig]:
    """Configurations of 10 steps on 8 lanes, without dropout."""

    def make(system: str = "rec-fixed-skip", **settings: Any) -> RunConfig:
        fixed = {"model.dropout": 0.0, "model.attention_dropout": 0.0, "train.steps": STEPS, "train.lanes": 8}
        return make_config(system, **fixed | {"train.save_every": 5, "eval.every": 5} | settings)

    return make


def furthest_apart(a: Path, b: Path) -> float:
    ours, theirs = read_metrics(a), read_metrics(b)
    assert [(x["split"], x["step"], x["tokens"]) for x in ours] == [
        (x["split"], x["step"], x["tokens"]) for x in theirs
    ]
    return max(abs(x["bits_per_token"] - y["bits_per_token"]) for x, y in zip(ours, theirs, strict=True))


# Near-equal keys can swap places under rounding: the memorizing model retrieves all that it has.
ALL_OF_MEMORY = {"model.memory_size": 64, "model.memory_neighbors": 64}
CASES: list[tuple[str, dict[str, Any]]] = [
    *((system, ALL_OF_MEMORY if system == "memorizing" else {}) for system in FAMILIES),
    ("rec-lstm-single", {"train.bptt": 2, "train.accumulate": 2, "train.clip": 0.3, "train.steps": 6}),
    ("rec-fixed-dual", {"model.segment": 16, "train.accumulate": 2, "optimizer.name": "adamw", "train.steps": 6}),
    (
        "feedback-fixed-skip",
        {"train.checkpoint_activations": True, "model.d_model": 128, "model.mlp_dim": 130, "train.steps": 6},
    ),
]


def test_two_processes_are_one(plain: Callable[..., RunConfig], tmp_path: Path) -> None:
    """All families in one group; `train.lanes` is the total over processes."""
    jobs = []
    for number, (system, settings) in enumerate(CASES):
        train(plain(system, **settings), tmp_path / f"one-{number}")
        for parallel in WAYS:
            config = plain(system, **settings, **{"train.parallel": parallel})
            jobs.append(job(config, tmp_path / f"{parallel}-{number}"))
    torchrun(2, jobs, tmp_path)
    single = load_run(tmp_path / "one-0").model.state_dict()
    for parallel in WAYS:
        for number, case in enumerate(CASES):
            apart = furthest_apart(tmp_path / f"one-{number}", tmp_path / f"{parallel}-{number}")
            assert apart < 1e-4, (parallel, case)
        for name, x in load_run(tmp_path / f"{parallel}-0").model.state_dict().items():
            torch.testing.assert_close(x, single[name], rtol=1e-4, atol=1e-4)


def test_other_numbers_of_processes_go_on(
    plain: Callable[..., RunConfig], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Sharded checkpoints of two processes are gone on from by two and by one, and the other way round."""
    whole = plain("memorizing", **ALL_OF_MEMORY, **{"train.parallel": "fsdp"})
    half = whole.replace("train", steps=5)
    train(whole, tmp_path / "reference")
    train(half, tmp_path / "one-two")
    starts = [job(half, tmp_path / name) for name in ("two-two", "two-one")]
    torchrun(2, [*starts, job(whole, tmp_path / "two-two"), job(whole, tmp_path / "one-two")], tmp_path)
    capsys.readouterr()
    train(whole, tmp_path / "two-one")
    assert "lanes are redistributed to 1 processes" in capsys.readouterr().err
    sharded = tmp_path / "two-two" / "checkpoints" / "step-00000010"
    assert (sharded / "sharded").is_dir()
    assert not (sharded / "model.safetensors").exists()
    for name in ("two-two", "two-one", "one-two"):
        ours, expected = (read_metrics(tmp_path / x, "train") for x in (name, "reference"))
        assert [x["step"] for x in ours] == list(range(1, STEPS + 1))
        gaps = [abs(x["bits_per_token"] - y["bits_per_token"]) for x, y in zip(ours, expected, strict=True)]
        assert max(gaps) < 1e-4, name
    loaded = export(tmp_path / "two-two", tmp_path / "model.safetensors")
    from safetensors.torch import load_file

    exported = load_file(tmp_path / "model.safetensors")
    assert exported.keys() == loaded.model.state_dict().keys()
    assert all(torch.equal(exported[name], x) for name, x in loaded.model.state_dict().items())


def test_exact_resume_of_two(make_config: Callable[..., RunConfig], tmp_path: Path) -> None:
    """With dropout, stopped by a signal to one of the processes: bit for bit, on every process."""
    jobs = []
    for parallel in WAYS:
        config = make_config("rec-lstm-dual", **{"train.parallel": parallel, "eval.every": 0})
        whole, parts = tmp_path / parallel / "whole", tmp_path / parallel / "parts"
        jobs += [job(config, whole), job(config, parts, stop_at=6), job(config, parts)]
    said = torchrun(2, jobs, tmp_path)
    assert said.count("stopped after step 7") == len(WAYS)
    for parallel in WAYS:
        whole, parts = tmp_path / parallel / "whole", tmp_path / parallel / "parts"
        assert read_metrics(parts) == read_metrics(whole)
        ours, expected = (checkpoint_contents(run, 12) for run in (parts, whole))
        assert ours == expected
        assert len([name for name in ours if name.startswith("memory-")]) == 2


def test_errors_reach_every_process(make_config: Callable[..., RunConfig], tmp_path: Path) -> None:
    config = make_config(**{"train.steps": 2, "eval.every": 0})
    loud = make_config(
        **{"schedule.kind": "constant", "schedule.learning_rate": 1e19, "schedule.warmup": 0, "eval.every": 0}
    )
    jobs = [
        job(config, tmp_path / "run"),
        job(config.replace("train", seed=5), tmp_path / "run", error="train.seed 0 -> 5"),
        job(config.replace("train", lanes=3), tmp_path / "odd", error="it must be a multiple of processes"),
        job(loud, tmp_path / "loud", error="step 2: the loss of lane 0 (and of 3 more) is"),
        job(config.replace("train", steps=3), tmp_path / "run"),
    ]
    torchrun(2, jobs, tmp_path)
    assert math.isfinite(read_metrics(tmp_path / "run")[-1]["bits_per_token"])


def test_bfloat16_halves_the_traffic(plain: Callable[..., RunConfig], tmp_path: Path) -> None:
    """With the losses of one process that computes in bfloat16, but for the rounding of what is sent."""
    settings = {"train.steps": 4, "train.accumulate": 2, "eval.every": 0, "model.window": 16, "model.segment": 32}
    jobs = []
    for parallel in WAYS:
        for dtype in ("float32", "bfloat16"):
            config = plain(**settings, **{"train.parallel": parallel, "train.dtype": dtype})
            name = f"{parallel}-{dtype}"
            jobs.append(job(config, tmp_path / name, traffic=str(tmp_path / f"{name}.json")))
    again = plain(**settings, **{"train.parallel": "fsdp", "train.keep_gathered": False})
    jobs.append(job(again, tmp_path / "again", traffic=str(tmp_path / "again.json")))
    torchrun(2, jobs, tmp_path)
    train(plain(**settings, **{"train.dtype": "bfloat16"}), tmp_path / "one")
    sent = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*-*.json") if "jobs" not in path.name}

    assert sent["ddp-bfloat16"].keys() == {"allreduce bfloat16"}
    assert 2 * sum(sent["ddp-bfloat16"].values()) == sum(sent["ddp-float32"].values())

    # Layers are gathered in bfloat16; cells and embeddings as they are, and all sums are in float32.
    model = load_run(tmp_path / "fsdp-bfloat16").model
    layers = sum(p.numel() for name, p in model.layers.named_parameters() if ".cell." not in name)
    lower, full = sent["fsdp-bfloat16"], sent["fsdp-float32"]
    gathers = 4 + 1  # once for each update, and for the validation at the end
    assert lower["allgather_base bfloat16"] == pytest.approx(gathers * 2 * layers, rel=0.02)
    saved = full["allgather_base float32"] - lower["allgather_base float32"]
    assert saved == pytest.approx(gathers * 4 * layers, rel=0.02)
    assert lower["reduce_scatter_base float32"] == full["reduce_scatter_base float32"]

    # Gathered again for each of two groups of lanes, in each forward and backward pass: four times per update, not
    # once; and for every call of the validation.
    gathered_again = json.loads((tmp_path / "again.json").read_text())["allgather_base float32"]
    assert gathered_again - full["allgather_base float32"] > 3 * 4 * 4 * layers

    for parallel in WAYS:
        assert furthest_apart(tmp_path / "one", tmp_path / f"{parallel}-bfloat16") < 0.02, parallel
        assert furthest_apart(tmp_path / f"{parallel}-float32", tmp_path / f"{parallel}-bfloat16") < 0.05, parallel
