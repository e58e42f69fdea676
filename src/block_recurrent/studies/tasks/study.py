"""A study of a task: plan, train with the training loop, measure. Stopped studies can be resumed."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from block_recurrent import runtime as rt
from block_recurrent.accounting import BYTES, cost_of
from block_recurrent.checkpoint import load_run
from block_recurrent.config import ModelConfig
from block_recurrent.io.door import Rule, is_count, is_counts, is_list_of, is_number, is_object, is_text
from block_recurrent.io.output import write_json
from block_recurrent.model.language_model import BlockRecurrentLM
from block_recurrent.presets import SYSTEMS, preset
from block_recurrent.run_config import (
    DataConfig,
    EvalConfig,
    OptimizerConfig,
    RunConfig,
    ScheduleConfig,
    TrainConfig,
)
from block_recurrent.runtime import Runtime
from block_recurrent.studies.curriculum import Stages, cooldown_of
from block_recurrent.studies.plan import planned_steps, read_result
from block_recurrent.studies.tasks.catalog import Point, TaskSpec
from block_recurrent.studies.tasks.problem import batch_of
from block_recurrent.studies.tasks.stream import Symbols, TaskStream, padded_length
from block_recurrent.train.loop import Task, Trainer, train
from block_recurrent.train.report import read_metrics

SCORES = "accuracy.json"
TIMED_STEPS = 3
LANES = 64  # of measuring


@dataclass(frozen=True)
class TaskStudy:
    """The options of a study."""

    spec: TaskSpec
    size: str
    systems: tuple[str, ...]  # the first sets the pace of the curriculum; the others get the same examples
    out: Path
    seeds: int = 1
    budget: float | None = None  # maximum minutes of training per run; None: the task's number of batches
    settings: dict[str, Any] = field(default_factory=dict)  # changed settings, for the plan
    model: dict[str, Any] = field(default_factory=dict)  # fields of all models' configurations

    def model_config(self, system: str, point: Point) -> ModelConfig:
        """Segments are whole examples, so that gradients reach back to their beginning; but not in Transformer-XL."""
        spec = self.spec
        window = {"window": spec.window} | dict(point.model) | self.model
        cuts_gradients = system.startswith("xl")
        longest = padded_length(spec.problem, spec.levels[-1], window["window"])
        values = {**spec.model, **window, "segment": window["window"] if cuts_gradients else longest}
        # A recurrent layer that the model has: the preset's may be beyond a smaller stack.
        layers = preset(system, self.size).num_layers if "num_layers" not in values else values["num_layers"]
        if SYSTEMS[system].extra_layers and "num_layers" in values:
            layers = values["num_layers"] = layers + 1
        if SYSTEMS[system].recurrent:
            values.setdefault("recurrent_layers", (min(layers, preset(system, self.size).recurrent_layers[0]),))
        if SYSTEMS[system].memorizing:
            values.setdefault("memory_layers", (max(1, round(3 * layers / 4)),))
        return preset(system, self.size, spec.problem.symbols + 1, **values)

    def run_config(self, system: str, point: Point, seed: int, steps: int) -> RunConfig:
        training, model = replace(self.spec.training, steps=steps, seed=seed), self.model_config(system, point)
        pieces, cooldown = _pieces(self.spec, model), cooldown_of(steps, training.cooldown)
        return RunConfig(
            system,
            self.size,
            model,
            DataConfig(),
            TrainConfig(
                steps * pieces, training.lanes, seed, clip=1.0, save_every=max(1, steps * pieces // 4), keep=1,
                log_every=100,
            ),
            OptimizerConfig("adamw", beta2=0.98, gate_rate=training.gate_rate),
            ScheduleConfig("wsd", training.learning_rate, 0.0, min(50, steps // 4) * pieces, cooldown * pieces),
            EvalConfig(every=0),
        )  # fmt: skip

    def stream(self, config: RunConfig, seed: int, steps: int, stages: Stages | None, runtime: Runtime) -> TaskStream:
        cooldown = cooldown_of(steps, self.spec.training.cooldown)
        training = replace(self.spec.training, steps=steps, cooldown=cooldown, seed=seed)
        pieces, part = _pieces(self.spec, config.model), (runtime.rank, runtime.world)
        spec = self.spec
        return TaskStream(spec.problem, list(spec.levels), training, config.model.window, pieces, stages, part)


def _pieces(spec: TaskSpec, model: ModelConfig) -> int:
    return padded_length(spec.problem, spec.levels[-1], model.window) // model.segment


def run_task(study: TaskStudy, tell: Callable[[str], None]) -> dict[str, Any] | None:
    """Train and measure the missing runs; returns all results, or None if it was stopped."""
    steps = _plan(study, tell)
    results: list[dict[str, Any]] = []
    for seed in range(study.seeds):
        stages: dict[str, Stages] = {}
        for system in study.systems:
            for number, point in enumerate(study.spec.points_of(system)):
                folder = study.out / "runs" / study.spec.name / _folder_name(system, point, seed)
                tell(f"{study.spec.name}: {system} {point.label}, seed {seed}".replace(" ,", ","))
                # The stages of the first system at the same point of the curve, or at its last point.
                pace = stages.get(str(number), stages.get("last"))
                found = _one_run(study, (system, point, seed, steps), folder, pace)
                if found is None:
                    return None
                if system == study.systems[0]:
                    stages[str(number)] = stages["last"] = [(int(a), int(b)) for a, b in found["stages"]]
                results.append(found)
    return {
        "task": study.spec.name,
        "what": study.spec.what,
        "size": study.size,
        "problem": {"kind": type(study.spec.problem).__name__, **vars(study.spec.problem)},
        "levels": study.spec.levels,
        "window": study.spec.window,
        "chance": study.spec.problem.chance,
        "axis": study.spec.axis,
        "steps at most": steps,
        "training": asdict(study.spec.training),
        "changed": study.settings,
        "runs": results,
        "published": [row._asdict() for row in study.spec.published],
    }


def _folder_name(system: str, point: Point, seed: int) -> str:
    return "-".join([system, *point.label.replace("=", "").split(), f"seed{seed}"])


def _plan(study: TaskStudy, tell: Callable[[str], None]) -> int:
    """Maximum number of batches per run; decided the first time and then kept."""

    def decide() -> tuple[int, float | None]:
        if study.budget is None:
            return study.spec.training.steps, None
        tell(f"{study.spec.name}: timing a step of {study.systems[0]}")
        seconds = _seconds_of_a_step(study)
        steps = max(10, round(study.budget * 60 / seconds))
        tell(f"{seconds:.2f} s per step: at most {steps} steps per run")
        return steps, seconds

    asked = {"size": study.size, "budget": study.budget, "settings": study.settings}
    return planned_steps(study.out / "runs" / study.spec.name, f"'{study.out}' has {study.spec.name}", asked, decide)


def _seconds_of_a_step(study: TaskStudy) -> float:
    """Step time of the first system at the last level; the median after a warm-up step."""
    system = study.systems[0]
    config = study.run_config(system, study.spec.points_of(system)[-1], 0, 1000)
    stages: Stages = [(1, study.spec.levels[-1])]
    with rt.start() as runtime:
        trainer = Trainer(config, runtime, lambda c, r: _task(study, c, 0, 1000, stages, r))
        times = []
        for step in range(1, TIMED_STEPS + 2):
            began = time.perf_counter()
            trainer.update(step, trainer.next_segments())
            times.append(time.perf_counter() - began)
    return statistics.median(times[1:]) * _pieces(study.spec, config.model)


def _task(study: TaskStudy, config: RunConfig, seed: int, steps: int, stages: Stages | None, runtime: Runtime) -> Task:
    stream = study.stream(config, seed, steps, stages, runtime)
    return Task(stream, Symbols(study.spec.problem.symbols), stream.fingerprint)


def _result_rules(spec: TaskSpec) -> dict[str, Rule]:
    """What the result of a run has, for the report and for the runs that follow it."""
    levels = [str(level) for level in spec.tests]
    counts = ("seed", "parameters without embeddings", "numbers in the state", "updates", "tokens")
    return {
        **dict.fromkeys(("system", "point"), is_text),
        **dict.fromkeys(counts, is_count),
        "minutes": is_number,
        "stages": is_list_of(lambda pair: is_counts(pair) and len(pair) == 2),
        "accuracy": is_object(dict.fromkeys(levels, is_number)),
    }


def _one_run(
    study: TaskStudy, which: tuple[str, Point, int, int], folder: Path, stages: Stages | None
) -> dict[str, Any] | None:
    """Train and measure, unless it has been done; None if it was stopped."""
    scores = folder / SCORES
    if scores.is_file():
        return read_result(scores, _result_rules(study.spec))
    system, point, seed, steps = which
    config = study.run_config(system, point, seed, steps)
    tasks: list[Task] = []

    def open_task(config: RunConfig, runtime: Runtime) -> Task:
        tasks.append(_task(study, config, seed, steps, stages, runtime))
        return tasks[0]

    if not train(config, folder, open_task=open_task):
        return None
    stream = tasks[0].stream
    assert isinstance(stream, TaskStream)
    model, lines, cost = load_run(folder).model, read_metrics(folder), cost_of(config.model)
    found = {
        "system": system,
        "point": point.label,
        "seed": seed,
        "parameters": cost.parameters,
        "parameters without embeddings": cost.non_embedding_parameters,
        "numbers in the state": cost.memory_bytes // BYTES,
        "FLOPs per token": cost.flops_per_token,
        "updates": lines[-1]["step"],
        "tokens": sum(line["tokens_read"] for line in lines),
        "minutes": round(sum(line["seconds"] for line in lines) / 60, 2),
        "stages": stream.curriculum.stages,
        "accuracy": {str(level): accuracy(model, study.spec, level) for level in study.spec.tests},
    }
    write_json(scores, found)
    return found


@torch.no_grad()
def accuracy(model: BlockRecurrentLM, spec: TaskSpec, level: int) -> float:
    """Share of answers that the model finds most likely, over examples that are not in training."""
    rng = np.random.default_rng([2**31, level])
    problem, right, asked = spec.problem.for_tests(), 0, 0
    for first in range(0, spec.examples, LANES):
        lanes = min(LANES, spec.examples - first)
        batch = batch_of(problem, rng, level, lanes, problem.length(level), problem.symbols)
        tokens, targets, mask = map(torch.from_numpy, batch)
        hidden, _ = model.hidden(tokens)
        # The document mark is not an answer.
        guesses = (hidden[mask] @ model.embedding.weight[:-1].T).argmax(-1)
        right, asked = right + int((guesses == targets[mask]).sum()), asked + int(mask.sum())
    return right / asked
