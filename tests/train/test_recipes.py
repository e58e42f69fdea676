"""The loops of docs/recipes.md train as `brt train` does."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from block_recurrent import load_run
from block_recurrent.data import Corpus
from block_recurrent.train.loop import train
from block_recurrent.train.report import read_metrics

PAGE = (Path(__file__).parents[2] / "docs" / "recipes.md").read_text(encoding="utf-8")
SHARED, ACCELERATE, SAVE, TRAINER, LIGHTNING = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)


@pytest.fixture
def known(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The names of the shared part, in a folder with `build/books`."""
    monkeypatch.chdir(tmp_path)
    Path("build").mkdir()
    Path("build/books").symlink_to(corpus)
    known: dict[str, Any] = {}
    exec(SHARED, known)
    return known


@pytest.fixture
def losses(known: dict[str, Any]) -> list[float]:
    """Bits per token of each step of `brt train`."""
    config = known["config"].replace("data", path="build/books").replace("train", device="cpu", save_every=0)
    train(config.replace("eval", every=0, tokens=64), Path("runs/own"))
    return [line["bits_per_token"] for line in read_metrics(Path("runs/own")) if line["split"] == "train"]


def bits_of(per_token: list[torch.Tensor], corpus: Corpus, known: dict[str, Any]) -> list[float]:
    """Bits per token as `brt train` counts them: without the document mark."""
    config = known["config"]
    bits = []
    with known["LaneStream"](corpus, "train", config.train.lanes, config.model.segment, config.train.seed) as stream:
        for nats in per_token:
            segment = next(stream)
            text = torch.from_numpy(segment.mask & (segment.targets != corpus.eos_token_id))
            bits.append((nats[text].double().mean() / torch.tensor(2.0).log()).item())
    return bits


def test_accelerate(known: dict[str, Any], losses: list[float]) -> None:
    pytest.importorskip("accelerate", reason="needs accelerate")
    exec(ACCELERATE, known)
    assert len(losses) == 20
    assert bits_of(known["losses"], known["corpus"], known) == pytest.approx(losses, abs=1e-5)
    exec(SAVE, known)
    saved, own = load_run("runs/accelerate").model, load_run("runs/own").model
    tokens = torch.arange(100)[None]
    torch.testing.assert_close(saved(tokens)[0], own(tokens)[0], atol=1e-4, rtol=1e-4)


def test_trainer(known: dict[str, Any], losses: list[float]) -> None:
    pytest.importorskip("accelerate", reason="the Trainer needs accelerate")
    exec(TRAINER, known)
    assert bits_of(known["trainer"].trainer_losses, known["corpus"], known) == pytest.approx(losses, abs=1e-5)


def lightning_in_short() -> ModuleType:
    """What the recipe uses of lightning: the module's hooks, in the order of Lightning's automatic optimization."""

    class LightningModule(torch.nn.Module):
        training_step: Callable
        configure_optimizers: Callable

        def log(self, name: str, value: torch.Tensor, batch_size: int) -> None:
            assert value.isfinite()

    class Trainer:
        def __init__(self, max_steps: int, **settings: object) -> None:
            self.max_steps = max_steps

        def fit(self, module: LightningModule, batches: Iterable) -> None:
            made = module.configure_optimizers()
            optimizer, schedule = made["optimizer"], made["lr_scheduler"]["scheduler"]
            assert made["lr_scheduler"]["interval"] == "step"
            for index, batch in zip(range(self.max_steps), batches, strict=False):

                def closure(batch: object = batch, index: int = index) -> torch.Tensor:
                    loss = module.training_step(batch, index)
                    optimizer.zero_grad()
                    loss.backward()
                    return loss

                optimizer.step(closure)
                schedule.step()

    lightning = ModuleType("lightning")
    lightning.__dict__.update(LightningModule=LightningModule, Trainer=Trainer)
    return lightning


def test_lightning(known: dict[str, Any], losses: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """With lightning itself where it is installed."""
    pytest.importorskip("transformers", reason="the dataset is in the recipe for its Trainer")
    try:
        import lightning  # noqa: F401
    except ImportError:
        monkeypatch.setitem(sys.modules, "lightning", lightning_in_short())
    exec(TRAINER.partition("\n\n\ndef collate")[0], known)
    exec(LIGHTNING, known)
    found = known["lightning_module"].losses
    assert len(found) == len(losses) == 20
    assert bits_of(found, known["corpus"], known) == pytest.approx(losses, abs=1e-5)
