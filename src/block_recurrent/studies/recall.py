"""`brt recall`: train a system and a baseline of the same cost on planted names, and measure recall by distance."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from block_recurrent.config import ModelConfig
from block_recurrent.data import Corpus, load_tokenizer
from block_recurrent.data.corpus.prepare import PrepareSettings, prepare
from block_recurrent.errors import ConfigError
from block_recurrent.evaluate.scoring import score
from block_recurrent.evaluate.state_edits import StateEdit, clear_every
from block_recurrent.model.language_model import BlockRecurrentLM
from block_recurrent.presets import preset
from block_recurrent.run_config import DataConfig, RunConfig
from block_recurrent.studies.planted import MARK, AskedName, PlantedNames, distance_buckets
from block_recurrent.studies.recall_training import RecallProgress, RecallTraining, Schedule, mean_keep, train_recall
from block_recurrent.studies.run_folder import save_run

DATA = "data"
SPLIT = "test"


@dataclass(frozen=True)
class RecallSettings:
    """The whole study."""

    system: str = "rec-fixed-skip"
    against: str | None = "slide-plus"
    """A system to hold it against, taught exactly the same; None: none."""
    size: str = "micro"
    names: int = 16
    documents: int = 64
    """To measure on."""
    longest_asked: int = 2048
    """The longest distance that is measured."""
    training: RecallTraining = field(default_factory=RecallTraining)
    model: dict[str, Any] = field(default_factory=dict)
    """Further fields of the models' configurations."""

    def config_of(self, system: str) -> ModelConfig:
        return preset(system, self.size, MARK + 1, **{"dropout": 0.0, "attention_dropout": 0.0, **self.model})


@dataclass(frozen=True)
class PlantedCorpus:
    """Documents to be measured on, prepared as every other text, and where they ask."""

    corpus: Corpus
    asked: dict[str, list[AskedName]]
    """By the document's name."""


@dataclass(frozen=True)
class SystemRecall:
    """What one system recalls, in bits per asked name by distance."""

    system: str
    parameters: int
    steps: int
    seconds: float
    keep: float | None
    """Mean of the fixed gates after training."""
    schedule: Schedule
    normal: list[float]
    cleared: list[float] | None
    """With the recurrent state set back at every segment; None: the system has none."""


def make_documents(task: PlantedNames, folder: Path, documents: int, longest: int, seed: int = 1) -> PlantedCorpus:
    """Write and prepare documents that ask at several distances, together no longer than the longest distance.

    So they are no longer than those of the last stage of training. Each bucket of distances is asked in at least every
    n-th of them, for n buckets.
    """
    rng = np.random.default_rng([seed, 77])
    buckets = distance_buckets(task.window, longest)
    if documents < len(buckets):
        raise ConfigError(
            f"--documents is {documents}: it must be at least {len(buckets)}, one for each range of distances"
        )
    source = folder.with_name(f".{folder.name}-text")
    asked = {}
    try:
        (source / SPLIT).mkdir(parents=True)
        for number in range(documents):
            text, places = task.text(rng, _distances(rng, buckets, number % len(buckets), longest))
            name = f"{SPLIT}/planted-{number:03d}.txt"
            (source / name).write_text(text, encoding="ascii")
            asked[name] = places
        corpus = prepare(PrepareSettings((str(source),), threads=1, overwrite=True), load_tokenizer("bytes"), folder)
    finally:
        shutil.rmtree(source, ignore_errors=True)
    return PlantedCorpus(corpus, asked)


def _distances(rng: np.random.Generator, buckets: list[tuple[int, int]], first: int, longest: int) -> list[int]:
    """A distance of the bucket `first`, and of others as long as their sum is no more than `longest`; in any order."""
    chosen: list[int] = []
    for bucket in [first, *rng.permutation(len(buckets)).tolist()]:
        distance = int(rng.integers(buckets[bucket][0], buckets[bucket][1] + 1))
        if sum(chosen) + distance <= longest:
            chosen.append(distance)
    return [chosen[i] for i in rng.permutation(len(chosen))]


def measure(
    model: BlockRecurrentLM, planted: PlantedCorpus, buckets: list[tuple[int, int]], edit: StateEdit | None = None
) -> list[float]:
    """Mean bits of an asked name in each bucket of distances."""
    corpus = planted.corpus
    documents = corpus.documents(SPLIT)
    bits: list[NDArray[np.float64]] = [np.empty(document.tokens) for document in documents]
    for piece in score(model, [corpus.tokens(SPLIT, i) for i in range(len(documents))], lanes=32, edit=edit):
        bits[piece.document][piece.start : piece.start + len(piece.nats)] = piece.nats / math.log(2)
    found: list[list[float]] = [[] for _ in buckets]
    for document, losses in zip(documents, bits, strict=True):
        for token, distance in planted.asked[document.name]:
            for number, (low, high) in enumerate(buckets):
                if low <= distance <= high:
                    found[number].append(float(losses[token]))
    return [float(np.mean(values)) for values in found]


def recall_study(
    settings: RecallSettings, out: Path, tell: Callable[[str, RecallProgress], None] | None = None
) -> dict[str, Any]:
    """Train, measure, and write runs and documents under `out`. Returns all numbers."""
    systems = [settings.system] + ([settings.against] if settings.against else [])
    configs = {system: settings.config_of(system) for system in systems}
    window = configs[settings.system].window
    task = PlantedNames(window, settings.names)
    buckets = distance_buckets(window, settings.longest_asked)
    if not buckets:
        raise ConfigError(f"--distance is {settings.longest_asked}: it must be more than the window, {window}")
    out.mkdir(parents=True, exist_ok=True)
    planted = make_documents(task, out / DATA, settings.documents, settings.longest_asked)
    schedule: Schedule | None = None
    results = []
    for system in systems:
        began = time.perf_counter()
        heard = (lambda progress, system=system: tell(system, progress)) if tell else None
        model, taught = train_recall(configs[system], task, settings.training, schedule, heard)
        seconds = time.perf_counter() - began
        schedule = schedule or taught
        steps = taught[-1][0] + settings.training.settle - 1
        edit = clear_every(model, model.config.segment) if model.config.recurrent_layers else None
        results.append(
            SystemRecall(
                system, sum(p.numel() for p in model.parameters()), steps, seconds, mean_keep(model), taught,
                measure(model, planted, buckets), measure(model, planted, buckets, edit) if edit else None,
            )
        )  # fmt: skip
        run = RunConfig(system, settings.size, model.config, DataConfig(path=str(planted.corpus.folder)))
        save_run(out / system, run, model, load_tokenizer("bytes"), steps)
    return {
        "names": settings.names,
        "chance": task.chance,
        "window": window,
        "segment": configs[settings.system].segment,
        "reach": {system: config.num_layers * config.window for system, config in configs.items()},
        "distances": buckets,
        "documents": settings.documents,
        "asked": [
            sum(low <= a.distance <= high for places in planted.asked.values() for a in places) for low, high in buckets
        ],
        "training": asdict(settings.training),
        "systems": [asdict(result) for result in results],
    }
