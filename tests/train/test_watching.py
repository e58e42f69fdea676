"""What a run tells: metrics, gates, states, and whether the state is of any use."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from block_recurrent import BlockRecurrentLM, preset
from block_recurrent.data import Corpus, LaneStream
from block_recurrent.model.memory import DocumentMemory
from block_recurrent.run_config import RunConfig
from block_recurrent.runtime import Runtime
from block_recurrent.train.gate_metrics import GateActivations, state_norms
from block_recurrent.train.loop import train
from block_recurrent.train.loss import SegmentsLoss
from block_recurrent.train.validation import Validator

from .conftest import read_metrics

CPU = Runtime(torch.device("cpu"), torch.float32)


def test_every_line_is_complete(make_config: Callable[..., RunConfig], tmp_path: Path) -> None:
    train(make_config("rec-lstm-dual", **{"model.recurrent_layers": [1, 3]}), tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [x["step"] for x in lines if x["split"] == "train"] == list(range(1, 13))
    assert [lines.index(x) for x in lines if x["split"] == "validation"] == [6, 13], "after the lines of steps 6 and 12"
    gates = {f"layer{n}/{g}/{k}" for n in (1, 3) for g in ("attention_gate", "mlp_gate") for k in ("forget", "input")}
    norms = {"layer1/state_norm", "layer3/state_norm"}
    usual = {"split", "step", "tokens", "bits_per_token", "tokens_seen", "learning_rate", "gradient_norm"}
    assert set(lines[0]) == usual | {"tokens_per_second", "data_wait"} | gates | norms
    assert all(0 < lines[0][key] < 1 for key in gates)
    assert lines[-2]["tokens_seen"] == sum(x["tokens"] for x in lines if x["split"] == "train")
    assert set(lines[-1]) == {"split", "step", "tokens", "bits_per_token", "state_gain"}
    log = (tmp_path / "log.txt").read_text()
    assert "step 10/12" in log
    assert "validation" in log


def test_the_document_mark_is_not_a_token(make_config: Callable[..., RunConfig], tmp_path: Path, corpus: Path) -> None:
    """`tokens` and `bits_per_token` leave the mark out; the training loss has it in."""
    config = make_config(**{"train.steps": 30, "train.lanes": 2, "schedule.learning_rate": 0.0, "eval.every": 0})
    train(config.replace("eval", tokens=0), tmp_path)
    opened = Corpus(corpus)
    with LaneStream(opened, "train", 2, config.model.segment, 0) as stream:
        steps = [next(stream) for _ in range(30)]
    counted = [int((s.mask & (s.targets != opened.eos_token_id)).sum()) for s in steps]
    assert [line["tokens"] for line in read_metrics(tmp_path, "train")] == counted
    assert sum(counted) < sum(int(s.mask.sum()) for s in steps)
    assert read_metrics(tmp_path, "validation")[-1]["tokens"] == sum(opened.lengths("validation"))


def test_validation_is_the_mean_over_whole_documents(make_config: Callable[..., RunConfig], corpus: Path) -> None:
    config = make_config(**{"eval.tokens": 0, "eval.lanes": 2})
    torch.manual_seed(1)
    module = SegmentsLoss(BlockRecurrentLM(config.model)).train()
    random_before = torch.get_rng_state()
    result = Validator(Corpus(corpus), config, CPU)(module)
    assert torch.equal(torch.get_rng_state(), random_before)
    assert module.training
    module.eval()
    nats, count, opened = 0.0, 0, Corpus(corpus)
    for index in range(len(opened.documents("validation"))):
        text = torch.tensor(opened.tokens("validation", index).astype("int64"))
        with torch.no_grad():
            logits, _ = module.model(torch.cat([torch.tensor([opened.eos_token_id]), text[:-1]])[None])
        nats += F.cross_entropy(logits[0], text, reduction="sum").item()
        count += len(text)
    assert result["tokens"] == count
    assert result["bits_per_token"] == pytest.approx(nats / count / math.log(2), rel=1e-5)


@pytest.mark.parametrize("system", ["rec-fixed-dual", "rec-lstm-single"])
def test_gates_are_measured(system: str) -> None:
    model = BlockRecurrentLM(preset(system, "micro", 50)).train()
    watch = GateActivations(model)
    memory = model.loss(*torch.randint(50, (2, 2, 64))).memory
    seen = {key: value.item() for key, value in watch.take().items()}
    update = model.layers[1].cell.update
    if system == "rec-fixed-dual":
        expected = {
            f"layer2/{name}/keep": getattr(update, name).bias.sigmoid().mean().item()
            for name in ("attention_gate", "mlp_gate")
        }
        assert seen == pytest.approx(expected)
    else:
        assert seen.keys() == {"layer2/mlp_gate/forget", "layer2/mlp_gate/input"}
        assert seen["layer2/mlp_gate/forget"] == pytest.approx(torch.tensor(1.0).sigmoid().item(), abs=0.05)
        assert seen["layer2/mlp_gate/input"] == pytest.approx(torch.tensor(-1.0).sigmoid().item(), abs=0.05)
        assert watch.take() == {}
    norm = memory.layers[1].state.norm(dim=-1).mean()
    assert state_norms([memory])["layer2/state_norm"].item() == pytest.approx(norm.item())


def _gain(config: RunConfig, corpus: Path, change: Callable[[BlockRecurrentLM], None]) -> float | None:
    torch.manual_seed(0)
    model = BlockRecurrentLM(config.model)
    with torch.no_grad():
        change(model)
    return Validator(Corpus(corpus), config, CPU)(SegmentsLoss(model)).get("state_gain")


def test_an_ignored_state_is_found(make_config: Callable[..., RunConfig], corpus: Path) -> None:
    config = make_config()
    half = config.model.num_heads * config.model.head_dim
    nothing = _gain(config, corpus, lambda model: None)
    assert nothing is not None
    assert abs(nothing) > 1e-3, "a new model does something with its state, good or bad"

    def ignore(model: BlockRecurrentLM) -> None:
        model.layers[1].project.weight[:, half:] = 0  # what comes from the state is thrown away

    def forget(model: BlockRecurrentLM) -> None:
        cell = model.layers[1].cell
        cell.update.attention_gate.bias.fill_(50.0)  # the state stays what it was at first

    assert _gain(config, corpus, ignore) == pytest.approx(0, abs=1e-6)
    assert _gain(config, corpus, forget) == pytest.approx(0, abs=1e-6)
    assert _gain(make_config("slide"), corpus, lambda model: None) is None


def test_the_window_cache_is_kept_when_the_state_is_forgotten(make_config: Callable[..., RunConfig]) -> None:
    """What `Validator` compares with: the state set back, everything else as it was."""
    from dataclasses import replace

    config = make_config()
    torch.manual_seed(0)
    model = BlockRecurrentLM(config.model).eval()
    with torch.no_grad():
        _, memory = model(torch.randint(256, (1, 64)))
        tokens = torch.randint(256, (1, 64))
        ours, _ = model(tokens, replace(memory, tokens_read=torch.zeros_like(memory.tokens_read)))
        layers = list(memory.layers)
        layers[1] = replace(layers[1], state=model.layers[1].cell.initial_state[None].clone())
        expected, _ = model(tokens, replace(memory, layers=tuple(layers)))
    torch.testing.assert_close(ours, expected)
    assert isinstance(memory, DocumentMemory)


def test_the_warning_is_given(
    make_config: Callable[..., RunConfig], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"schedule.warmup": 5, "eval.every": 4, "eval.state_warning": 100.0}
    train(make_config(**settings), tmp_path)
    said = capsys.readouterr().err
    assert "warning: step 8: the model makes no use of the recurrent state" in said
    assert "step 4: the recurrent state" not in said, "not before the end of the warm-up"
    assert "makes no use of the recurrent state" in (tmp_path / "log.txt").read_text()
