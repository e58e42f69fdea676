"""`brt train --compile`: trains, validates and resumes, with the numbers of a run that is not compiled."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters

from block_recurrent import BlockRecurrentLM
from block_recurrent.ops import backend, triton
from block_recurrent.presets import preset
from block_recurrent.run_config import RunConfig, TrainConfig
from block_recurrent.runtime import Runtime
from block_recurrent.train.loop import Trainer, train
from block_recurrent.train.parallel import prepare_layers

from .conftest import read_metrics

COMPILED = ("slide-plus", "rec-fixed-skip", "rec-lstm-dual", "feedback-fixed-skip")


@pytest.mark.slow
def test_a_compiled_run_is_the_plain_one(make_config: Callable[..., RunConfig], tmp_path: Path) -> None:
    """Slow: a C++ compiler works for a minute. Two layers: a plain one and a recurrent one."""
    settings = {"model.num_layers": 2, "model.dropout": 0.0, "model.attention_dropout": 0.0, "eval.every": 2}
    plain = make_config(**settings, **{"train.steps": 4, "train.save_every": 2})
    compiled = plain.replace("train", compile=True)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert train(compiled.replace("train", steps=2), tmp_path / "compiled") is True
        assert train(compiled, tmp_path / "compiled") is True
    assert not [w for w in said if "lru_cache" in str(w.message)]
    train(plain, tmp_path / "plain")
    ours, expected = (read_metrics(tmp_path / name) for name in ("compiled", "plain"))
    assert [(x["split"], x["step"]) for x in ours] == [(x["split"], x["step"]) for x in expected]
    assert [x["split"] for x in ours].count("validation") == 2
    bits = [x["bits_per_token"] for x in expected]
    assert [x["bits_per_token"] for x in ours] == pytest.approx(bits, abs=1e-4)


@pytest.fixture
def whole_graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`torch.compile` traces with Dynamo and compiles nothing; a break in the graph is an error."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager", fullgraph=True))
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("whole_graphs")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("system", COMPILED)
def test_layers_compile_whole_and_once(make_config: Callable[..., RunConfig], system: str, dtype: torch.dtype) -> None:
    """Five updates on a CPU: after the first, nothing is compiled again."""
    trainer = Trainer(make_config(system, **{"train.compile": True}), Runtime(torch.device("cpu"), dtype))
    graphs = []
    with trainer.stream, backend("reference"):  # the same operations on every machine
        for step in range(1, 6):
            trainer.update(step, trainer.next_segments())
            graphs.append(counters["stats"]["unique_graphs"])
    assert not counters["graph_break"]
    assert graphs[0] > 0
    assert graphs == graphs[:1] * 5


@pytest.mark.usefixtures("whole_graphs")
def test_a_first_call_without_a_memory_compiles_what_later_ones_run() -> None:
    """In bfloat16, the empty caches have the dtype of all others."""
    config = preset("slide", "micro", vocab_size=50)
    model, tokens = BlockRecurrentLM(config), torch.zeros(2, config.segment, dtype=torch.int64)
    prepare_layers(model, TrainConfig(compile=True))
    graphs, memory = [], None
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16), backend("reference"):
            memory = model.loss(tokens, tokens, memory).memory.detach()
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs == [1, 1, 1]


@pytest.mark.usefixtures("whole_graphs")
@pytest.mark.skipif(not triton.INSTALLED, reason="triton is not installed (Linux only)")
@pytest.mark.parametrize("system", COMPILED)
def test_layers_with_the_kernels_of_a_gpu_compile_whole_and_once(system: str) -> None:
    """The same for five steps on meta tensors, without the optimizer."""
    config = preset(system, "micro", vocab_size=50)
    with torch.device("meta"):
        model, tokens = BlockRecurrentLM(config), torch.zeros(2, config.segment, dtype=torch.int64)
    prepare_layers(model, TrainConfig(compile=True))
    graphs, memory = [], None
    for _ in range(5):
        loss = model.loss(tokens, tokens, memory)
        loss.sum.backward()
        memory = loss.memory.detach()
        graphs.append(counters["stats"]["unique_graphs"])
    assert not counters["graph_break"]
    assert graphs[0] > 0
    assert graphs == graphs[:1] * 5
