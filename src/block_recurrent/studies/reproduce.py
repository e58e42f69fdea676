"""`brt reproduce`: tables of the paper at a small size, under equal conditions.

Every model of a table sees the same documents in the same order and the same number of tokens, with the same recipe.
The number follows from the budget and the step time of slide-plus on this machine; it is decided once and saved in
`plan.json`, so that a study can be stopped and resumed, or extended by further seeds.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from block_recurrent import runtime as rt
from block_recurrent.checkpoint import load_run
from block_recurrent.data import Corpus
from block_recurrent.errors import ConfigError
from block_recurrent.evaluate.evaluation import evaluate_split
from block_recurrent.io.door import Rule, is_counts, is_list_of, is_number, is_object
from block_recurrent.io.output import write_json
from block_recurrent.io.progress import shown_progress
from block_recurrent.presets import SIZES, SYSTEMS
from block_recurrent.run_config import RunConfig, merge, resolve
from block_recurrent.studies.paper_tables import Row, rows_of
from block_recurrent.studies.plan import planned_steps, read_result
from block_recurrent.train.loop import Trainer, train
from block_recurrent.train.report import read_metrics

REFERENCE = "slide-plus"
TIMED_STEPS = 3
RECIPE: dict[str, Any] = {"schedule": {"kind": "cosine"}, "eval": {"tokens": 65_536}}
"""The differences from the presets: a learning rate that decays within the budget."""
_is_curve = is_object({"positions": is_counts, "bits_per_token": is_list_of(is_number), "documents": is_counts})
_RESULT: dict[str, Rule] = {
    **dict.fromkeys(("bits_per_token", "bits_per_byte"), is_number),
    "seconds_of_a_step": lambda value: is_number(value) and value > 0,
    "word_perplexity": lambda value: value is None or (is_number(value) and value > 0),
    "state_gain": lambda value: value is None or is_number(value),
    "cumulative": lambda value: _is_curve(value) and len({*map(len, value.values())}) == 1,
}


@dataclass(frozen=True)
class Study:
    """The options of a study."""

    table: str
    size: str
    data: tuple[str, ...]
    out: Path
    budget: float  # minutes of training of slide-plus at this size
    seeds: tuple[int, ...]
    split: str = "test"
    settings: dict[str, Any] = field(default_factory=dict)  # sections of a configuration that override the recipe
    systems: tuple[str, ...] = ()  # only models of these systems; empty: all of the table

    def rows(self) -> list[Row]:
        rows = rows_of(self.table, self.size, [Corpus(folder).vocab_size for folder in self.data])
        of_table = list(dict.fromkeys(row.system for row in rows))
        if unknown := [name for name in self.systems if name not in of_table]:
            raise ConfigError(f"{self.table} has no models of system '{unknown[0]}', only of {', '.join(of_table)}")
        rows = [row for row in rows if not self.systems or row.system in self.systems]
        if self.table == "vocabularies" and len(rows) < 2:
            raise ConfigError(
                "--data has one folder: the vocabulary study compares several, prepared from the same source"
            )
        return rows

    def config(self, row: Row, seed: int, steps: int) -> RunConfig:
        """The configuration of one run: the same number of tokens per update for every system."""
        given: dict[str, Any] = {
            "system": row.system,
            "size": row.size,
            "model": row.model,
            "data": {"path": self.data[row.data]},
            "train": {"steps": steps, "seed": seed, "save_every": max(1, steps // 10), "keep": 1},
            "eval": {"every": max(1, steps // 10)},
        }
        given = merge(merge(given, RECIPE), self._settings_of(row.system))
        return resolve(given, Corpus(self.data[row.data]).vocab_size)

    def _settings_of(self, system: str) -> dict[str, Any]:
        """The settings for a system: a given window is the base window, of which a segment of `xl` has one or more."""
        windows, model = SYSTEMS[system].windows, self.settings.get("model", {})
        base = {"window": SIZES[self.size].W, "segment": SIZES[self.size].N} | model
        if not windows or not {"window", "segment"} & model.keys() or not isinstance(base["window"], int):
            return self.settings
        window = windows * base["window"]
        lanes = self.settings.get("train", {}).get("lanes", SIZES[self.size].lanes)
        lanes = lanes * base["segment"] // window  # the same number of tokens per update
        return merge(self.settings, {"model": {"window": window, "segment": window}, "train": {"lanes": lanes}})


def reproduce(study: Study, tell: Callable[[str], None]) -> dict[str, Any] | None:
    """Train and measure the missing runs; returns all results, or None if it was stopped."""
    rows = study.rows()
    steps = _plan(study, tell)
    results: list[dict[str, Any]] = []
    for seed in study.seeds:
        for row in rows:
            folder = study.out / "runs" / f"{row.label.replace(', ', '-').replace(' ', '-')}-seed{seed}"
            scores = folder / f"{study.split}.json"
            if not scores.is_file():
                tell(f"{row.label}, seed {seed}: run {len(results) + 1} of {len(rows) * len(study.seeds)}")
                if not train(study.config(row, seed, steps), folder):
                    return None
                _measure(folder, study.data[row.data], study.split, scores)
            results.append({"label": row.label, "seed": seed, "paper": row.paper, **read_result(scores, _RESULT)})
    return {"table": study.table, "size": study.size, "steps": steps, "runs": results}


def _plan(study: Study, tell: Callable[[str], None]) -> int:
    """Number of steps per run; decided the first time and then kept."""

    def decide() -> tuple[int, float]:
        tell(f"timing a step of {REFERENCE} at size {study.size}")
        seconds = _seconds_of_a_step(study)
        steps = max(10, round(study.budget * 60 / seconds))
        tell(f"{seconds:.2f} s per step: {steps} steps per run")
        return steps, round(seconds, 4)

    asked = {"table": study.table, "size": study.size, "budget": study.budget, "settings": study.settings}
    return planned_steps(study.out, f"'{study.out}' has a study", asked, decide)


def _seconds_of_a_step(study: Study) -> float:
    """Step time of the reference: forward, backward and update; the median after a warm-up step."""
    row = Row(REFERENCE, REFERENCE, study.size)
    with rt.start() as runtime:
        trainer = Trainer(study.config(row, 0, 1000), runtime)
        times = []
        with trainer.stream:
            for step in range(1, TIMED_STEPS + 2):
                began = time.perf_counter()
                trainer.update(step, trainer.next_segments())
                times.append(time.perf_counter() - began)
    return statistics.median(times[1:])


def _measure(run: Path, data: str, split: str, out: Path) -> None:
    """Score the whole split, and write the result."""
    corpus = Corpus(data)
    loaded = load_run(run)
    with shown_progress(f"scoring '{split}'") as progress:
        result = evaluate_split(loaded.model, corpus, split, progress=progress).to_dict()
    metrics = read_metrics(run)
    training = [line for line in metrics if line["split"] == "train"]
    gains = [line["state_gain"] for line in metrics if "state_gain" in line]
    numbers = {name: result[name] for name in ("bits_per_token", "bits_per_byte", "word_perplexity", "tokens", "words")}
    numbers |= {
        "scale_factor": result["tokens"] / result["words"] if result["words"] else None,
        "parameters": sum(p.numel() for p in loaded.model.parameters()),
        "vocabulary": corpus.vocab_size,
        "tokens_trained": training[-1]["tokens_seen"],
        "seconds_of_a_step": statistics.median(line["tokens"] / line["tokens_per_second"] for line in training),
        "state_gain": gains[-1] if gains else None,
        "documents": {d["name"]: d["bits_per_token"] for d in result["documents"]},
        "cumulative": result["cumulative"],
        "torch": torch.__version__,
    }
    write_json(out, numbers)


def summary(found: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """A table with one row per model: mean and deviation over seeds, and the paper's result."""
    head = ["model", "seeds", "bits per token", "deviation", "bits per byte", "word perplexity", "step time"]
    head += ["state gain", "paper"]
    by_label: dict[str, list[dict[str, Any]]] = {}
    for run in found["runs"]:
        by_label.setdefault(run["label"], []).append(run)
    reference = by_label.get(REFERENCE, next(iter(by_label.values())))
    step = _mean(reference, "seconds_of_a_step")
    rows = []
    for label, runs in by_label.items():
        deviation = f"{statistics.stdev(run['bits_per_token'] for run in runs):.4f}" if len(runs) > 1 else ""
        gains = [run["state_gain"] for run in runs]
        perplexities = [run["word_perplexity"] for run in runs]
        perplexity = (
            "" if None in perplexities else f"{math.exp(statistics.fmean(math.log(x) for x in perplexities)):.2f}"
        )
        rows.append(
            [
                *(label, str(len(runs)), f"{_mean(runs, 'bits_per_token'):.4f}", deviation),
                *(f"{_mean(runs, 'bits_per_byte'):.4f}", perplexity),
                f"{_mean(runs, 'seconds_of_a_step') / step:.3f}",
                "" if None in gains else f"{statistics.fmean(gains):.4f}",
                "" if runs[0]["paper"] is None else str(runs[0]["paper"]),
            ]
        )
    return head, rows


def _mean(runs: Sequence[dict[str, Any]], key: str) -> float:
    return statistics.fmean(run[key] for run in runs)
