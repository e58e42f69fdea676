"""`brt recall`: train a system and a baseline of the same cost on planted names, and measure recall by distance."""

from __future__ import annotations

import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from block_recurrent.checkpoint import load_run
from block_recurrent.config import ModelConfig
from block_recurrent.data import Corpus, load_tokenizer
from block_recurrent.data.corpus.prepare import PrepareSettings, prepare
from block_recurrent.errors import ConfigError
from block_recurrent.evaluate.scoring import bits_of
from block_recurrent.evaluate.state_edits import StateEdit, clear_every
from block_recurrent.model.language_model import BlockRecurrentLM
from block_recurrent.nn.gates import FixedGate
from block_recurrent.presets import preset
from block_recurrent.run_config import RunConfig
from block_recurrent.runtime import Runtime
from block_recurrent.studies.curriculum import PlantedStream, RecallTraining, Stages
from block_recurrent.studies.planted import AskedName, PlantedNames, distance_buckets
from block_recurrent.train.loop import Task, train
from block_recurrent.train.report import read_metrics

DATA = "data"
TOKENIZER = load_tokenizer("bytes")
SPLIT = "test"


@dataclass(frozen=True)
class RecallSettings:
    """The whole study."""

    system: str = "rec-fixed-skip"
    against: str | None = "slide-plus"  # a system to compare it with, trained on exactly the same; None: none
    size: str = "micro"
    names: int = 16
    documents: int = 64  # to measure on
    longest_asked: int = 2048  # maximum distance to measure
    training: RecallTraining = field(default_factory=RecallTraining)
    model: dict[str, Any] = field(default_factory=dict)  # further fields of the models' configurations

    def config_of(self, system: str) -> ModelConfig:
        return preset(
            system, self.size, TOKENIZER.vocab_size, **{"dropout": 0.0, "attention_dropout": 0.0, **self.model}
        )


@dataclass(frozen=True)
class PlantedCorpus:
    """Documents to measure on, prepared like any other text, and their queries."""

    corpus: Corpus
    asked: dict[str, list[AskedName]]  # by the document's name


@dataclass(frozen=True)
class SystemRecall:
    """The recall of one system, in bits per queried name by distance."""

    system: str
    parameters: int
    steps: int
    seconds: float
    keep: float | None  # mean of the fixed gates after training
    stages: Stages
    normal: list[float]
    cleared: list[float] | None  # with the recurrent state reset at every segment; None: the system has none


def make_documents(task: PlantedNames, folder: Path, documents: int, longest: int, seed: int = 1) -> PlantedCorpus:
    """Write and prepare documents with queries at several distances, together no longer than the longest distance.

    So they are no longer than those of the last stage of training. Each bucket of distances is in at least every
    n-th of them, for n buckets.
    """
    rng = np.random.default_rng([seed, 77])
    buckets = distance_buckets(task.window, longest)
    if documents < len(buckets):
        raise ConfigError(f"--documents is {documents}: it must be at least {len(buckets)}, one per range of distances")
    source = folder.with_name(f".{folder.name}-text")
    if folder.exists() and [Path(x).name for x in Corpus(folder).manifest["settings"]["sources"]] != [source.name]:
        raise ConfigError(f"'{folder}' contains other data: choose another --out")
    asked = {}
    try:
        shutil.rmtree(source, ignore_errors=True)  # of a killed process
        (source / SPLIT).mkdir(parents=True)
        for number in range(documents):
            text, places = task.text(rng, _distances(rng, buckets, number % len(buckets), longest))
            name = f"{SPLIT}/planted-{number:03d}.txt"
            (source / name).write_text(text, encoding="ascii")
            asked[name] = places
        corpus = prepare(PrepareSettings((str(source),), threads=1, overwrite=True), TOKENIZER, folder)
    finally:
        shutil.rmtree(source, ignore_errors=True)
    return PlantedCorpus(corpus, asked)


def _distances(rng: np.random.Generator, buckets: list[tuple[int, int]], first: int, longest: int) -> list[int]:
    """A distance of the bucket `first`, and of others while their sum is at most `longest`; in random order."""
    chosen: list[int] = []
    for bucket in [first, *rng.permutation(len(buckets)).tolist()]:
        distance = int(rng.integers(buckets[bucket][0], buckets[bucket][1] + 1))
        if sum(chosen) + distance <= longest:
            chosen.append(distance)
    return [chosen[i] for i in rng.permutation(len(chosen))]


def measure(
    model: BlockRecurrentLM, planted: PlantedCorpus, buckets: list[tuple[int, int]], edit: StateEdit | None = None
) -> list[float]:
    """Mean bits of a queried name in each bucket of distances."""
    corpus = planted.corpus
    documents = corpus.documents(SPLIT)
    bits = bits_of(model, [corpus.tokens(SPLIT, i) for i in range(len(documents))], lanes=32, edit=edit)
    found: list[list[float]] = [[] for _ in buckets]
    for document, losses in zip(documents, bits, strict=True):
        for token, distance in planted.asked[document.name]:
            for number, (low, high) in enumerate(buckets):
                if low <= distance <= high:
                    found[number].append(float(losses[token]))
    return [float(np.mean(values)) for values in found]


def train_recall(
    task: PlantedNames, settings: RecallTraining, config: RunConfig, run: Path, stages: Stages | None
) -> Stages | None:
    """Train, or resume training; returns the stages of the curriculum, or None if it was stopped.

    stages: those of another model, to train on exactly the same; None: by mastery.
    """
    streams: list[PlantedStream] = []

    def open_task(config: RunConfig, runtime: Runtime) -> Task:
        streams.append(PlantedStream(task, config, settings, stages, runtime.rank, runtime.world))
        return Task(streams[0], TOKENIZER, streams[0].fingerprint)

    return streams[0].curriculum.stages if train(config, run, open_task=open_task) else None


def measure_system(
    system: str, run: Path, stages: Stages, planted: PlantedCorpus, buckets: list[tuple[int, int]]
) -> SystemRecall:
    """The recall of a trained run."""
    model = load_run(run).model
    lines = read_metrics(run)
    edit = clear_every(model, model.config.segment) if model.config.recurrent_layers else None
    return SystemRecall(
        system,
        sum(p.numel() for p in model.parameters()),
        lines[-1]["step"],
        sum(line["tokens"] / line["tokens_per_second"] for line in lines),
        mean_keep(model),
        stages,
        measure(model, planted, buckets),
        measure(model, planted, buckets, edit) if edit else None,
    )


def mean_keep(model: BlockRecurrentLM) -> float | None:
    """The mean of all fixed gates: the share of the old state that a block keeps; None if there are none."""
    gates = [module.bias.sigmoid().mean().item() for module in model.modules() if isinstance(module, FixedGate)]
    return float(np.mean(gates)) if gates else None


def recall_study(settings: RecallSettings, out: Path) -> dict[str, Any] | None:
    """Train, measure, and write runs and documents under `out`. Returns all numbers; None: stopped."""
    systems = [settings.system] + ([settings.against] if settings.against else [])
    configs = {system: settings.config_of(system) for system in systems}
    window = configs[settings.system].window
    task = PlantedNames(window, settings.names)
    buckets = distance_buckets(window, settings.longest_asked)
    if not buckets:
        raise ConfigError(f"--distance is {settings.longest_asked}: it must be more than the window, {window}")
    out.mkdir(parents=True, exist_ok=True)
    planted = make_documents(task, out / DATA, settings.documents, settings.longest_asked)
    stages: Stages | None = None
    results = []
    for system in systems:
        config = settings.training.run_config(system, settings.size, configs[system], str(planted.corpus.folder))
        stages = train_recall(task, settings.training, config, out / system, stages)
        if stages is None:
            return None
        results.append(measure_system(system, out / system, stages, planted, buckets))
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
