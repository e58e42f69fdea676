"""`brt train --compile`: trains, validates and resumes, with the numbers of a run that is not compiled."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters

from block_recurrent.ops import backend
from block_recurrent.run_config import RunConfig
from block_recurrent.runtime import Runtime
from block_recurrent.train.loop import Trainer, train

from .conftest import read_metrics


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


@pytest.mark.parametrize("system", ["slide-plus", "rec-fixed-skip", "rec-lstm-dual", "feedback-fixed-skip"])
def test_layers_compile_whole_and_once(
    make_config: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch, system: str
) -> None:
    """Five updates: a break in the graph is an error here, and after the first update nothing is compiled again."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager", fullgraph=True))
    torch._dynamo.reset()
    counters.clear()
    trainer = Trainer(make_config(system, **{"train.compile": True}), Runtime(torch.device("cpu"), torch.float32))
    graphs = []
    with trainer.stream, backend("reference"):  # the same operations on every machine
        for step in range(1, 6):
            trainer.update(step, trainer.next_segments())
            graphs.append(counters["stats"]["unique_graphs"])
    assert not counters["graph_break"]
    assert graphs[0] > 0
    assert graphs == graphs[:1] * 5
    torch._dynamo.reset()
