"""Stages that grow as they are mastered, and training on planted names in them. What it is worth: docs/recall.md."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from block_recurrent.config import ModelConfig
from block_recurrent.data import Segment, SegmentStream
from block_recurrent.data.streams.segments import Cursor
from block_recurrent.run_config import DataConfig, EvalConfig, OptimizerConfig, RunConfig, ScheduleConfig, TrainConfig
from block_recurrent.studies.planted import Lesson, PlantedNames

Stages = list[tuple[int, int]]
"""(step, level from this step on, such as the longest documents), and at last (step, 0): the learning rate falls."""


@dataclass(frozen=True)
class RecallTraining:
    """How to train."""

    steps: int = 2000  # at most so many updates
    cooldown: int = 300  # of these the last ones, over which the learning rate falls to nothing
    tokens_per_step: int = 2048
    """Lanes are as many as give so many tokens: systems with other segments see as much text per update."""
    learning_rate: float = 3e-3
    gate_rate: float = 10.0
    """Times the learning rate, for the biases of gates: how long the state lasts is a matter of these few numbers."""
    noise_share: float = 0.1  # share of the noise that carries loss; all asked names do
    gap: float = 20.0  # tokens between questions, on average
    say_again: float = 0.05  # share of answers that are said, in half of the documents
    first: int = 0  # documents of the first stage are so long; 0: four windows, or one segment if that is longer
    longest: int = 2048  # documents of the last stage are so long
    mastered: float = 0.5  # bits of an asked name under which the documents become twice as long
    seed: int = 0

    def run_config(self, system: str, size: str, model: ModelConfig, data: str) -> RunConfig:
        """Of a run on these lessons; data: documents to measure on."""
        lanes = max(1, self.tokens_per_step // model.segment)
        return RunConfig(
            system,
            size,
            model,
            DataConfig(path=data),
            TrainConfig(self.steps, lanes, self.seed, clip=1.0, save_every=max(1, self.steps // 4), keep=1),
            OptimizerConfig("adamw", beta2=0.98, gate_rate=self.gate_rate),
            ScheduleConfig("wsd", self.learning_rate, 0.0, warmup=50, decay_steps=self.cooldown),
            EvalConfig(every=0),
        )


class Pace(Protocol):
    """What a curriculum wants to know of the training that it belongs to."""

    @property
    def steps(self) -> int: ...
    @property
    def cooldown(self) -> int: ...
    @property
    def mastered(self) -> float: ...


class Curriculum:
    """The next level as soon as the present one is mastered; or the stages of another run again."""

    def __init__(
        self,
        settings: Pace,
        levels: Sequence[int],
        stages: Stages | None = None,
        enough: int = 300,
        finished: float | None = None,
    ) -> None:
        """levels: ascending. finished: bits under which training may end; None: as for every other level."""
        self.settings, self.levels, self.enough = settings, list(levels), enough
        self.finished = settings.mastered if finished is None else finished
        self.stages: Stages = list(stages or [(1, self.levels[0])])
        self.recent: deque[float] = deque(maxlen=enough)
        """Bits of the last answers that the present stage is judged by."""

    @property
    def last_step(self) -> int | None:
        step, level = self.stages[-1]
        return None if level else step + self.settings.cooldown - 1

    def level_at(self, step: int) -> int:
        """The highest level of what begins at this step."""
        return max(level for start, level in self.stages if start <= step)

    def observe(self, step: int, bits: list[float]) -> None:
        """After an update. Answers are looked at until there are enough of them to tell."""
        level = self.stages[-1][1]
        if not level:
            return
        self.recent.extend(bits)
        is_last = level >= self.levels[-1]
        wanted = self.finished if is_last else self.settings.mastered
        if len(self.recent) == self.enough and np.mean(self.recent) < wanted:
            self.recent.clear()
            self.stages.append((step + 1, 0 if is_last else next(x for x in self.levels if x > level)))
        elif step == self.settings.steps - self.settings.cooldown:
            self.stages.append((step + 1, 0))


def doublings(first: int, last: int) -> list[int]:
    """From the first to the last, each twice the one before, or the last."""
    levels = [first]
    while levels[-1] < last:
        levels.append(min(2 * levels[-1], last))
    return levels


class PlantedStream(SegmentStream):
    """Lanes of training documents without end; whole segments, so that there is no padding."""

    observes = True

    def __init__(
        self,
        task: PlantedNames,
        config: RunConfig,
        settings: RecallTraining,
        stages: Stages | None = None,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        self.task, self.settings, self.segment = task, settings, config.model.segment
        first = max(self.segment, settings.first or 4 * task.window)
        self.curriculum = Curriculum(settings, doublings(first, settings.longest), stages)
        lanes = config.train.lanes
        self._mine = slice(rank * lanes // world, (rank + 1) * lanes // world)
        self._given, self._begun = 0, 0  # segments, and documents, so far
        self._lanes: list[list[int] | None] = [None] * lanes  # number, longest and position of the open documents
        self._lessons: dict[int, Lesson] = {}
        self._distance = np.zeros((lanes, self.segment), np.int64)

    @property
    def last_step(self) -> int | None:  # type: ignore[override]
        return self.curriculum.last_step

    @property
    def fingerprint(self) -> str:
        """All that decides which lessons come."""
        return f"planted names {json.dumps(asdict(self.task) | asdict(self.settings))}"

    def __next__(self) -> Segment:
        self._given += 1
        rows, starts = [], []
        for lane, place in enumerate(self._lanes):
            if place is None:
                self._begun += 1
                place = [self._begun, self.curriculum.level_at(self._given), 0]
            number, longest, begin = place
            if number not in self._lessons:
                self._lessons[number] = self._lesson(number, longest)
            lesson = self._lessons[number]
            end = begin + self.segment
            rows.append([column[begin:end] for column in lesson])
            starts.append(begin == 0)
            self._lanes[lane] = [number, longest, end] if end < len(lesson.tokens) else None
            if self._lanes[lane] is None:
                del self._lessons[number]
        tokens, targets, mask, self._distance = (np.array(column) for column in zip(*rows, strict=True))
        mine = self._mine
        return Segment(tokens[mine], targets[mine], mask[mine], np.array(starts)[mine])

    def _lesson(self, number: int, longest: int) -> Lesson:
        """A document by its number alone, so that a stream can be resumed inside of it."""
        settings, rng = self.settings, np.random.default_rng([self.settings.seed, number])
        # Lengths are spread evenly by their logarithm: short documents stay in the mix, and with them first mentions.
        segments = max(1, round(np.exp(rng.uniform(0, np.log(max(1, longest // self.segment))))))
        # In half of the documents no answer is said: what was said once must last.
        say_again = settings.say_again if rng.random() < 0.5 else 0.0
        return self.task.lesson(rng, segments * self.segment, settings.gap, say_again, settings.noise_share)

    def observe(self, step: int, nats: NDArray[np.float32]) -> dict[str, float]:
        longest = self.curriculum.level_at(step)
        far = self._distance > max(self.task.window, longest // 2)
        found = {"near_bits": (self._distance > 0) & ~far, "far_bits": far}
        bits = nats / math.log(2)
        self.curriculum.observe(step, bits[far].tolist())
        means = {name: float(bits[places].mean()) for name, places in found.items() if places.any()}
        return {"longest_document": longest, **means}

    def state_dict(self) -> Cursor:
        return {
            "given": self._given,
            "begun": self._begun,
            "lanes": self._lanes,
            "stages": self.curriculum.stages,
            "recent": list(self.curriculum.recent),
        }

    def load_state_dict(self, state: Cursor) -> None:
        self._given, self._begun, self._lanes = state["given"], state["begun"], list(state["lanes"])
        self._lessons.clear()
        self.curriculum.stages = [(step, longest) for step, longest in state["stages"]]
        self.curriculum.recent.clear()
        self.curriculum.recent.extend(state["recent"])
