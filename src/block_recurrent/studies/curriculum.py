"""A curriculum whose stages grow as they are mastered, and training on planted names with it (docs/recall.md)."""

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
"""(step, level from this step on, such as the longest documents); finally (step, 0): the start of the cooldown."""


@dataclass(frozen=True)
class RecallTraining:
    """Training options."""

    steps: int = 2000  # maximum number of updates
    cooldown: int = 300  # the last of these, over which the learning rate decays to zero
    tokens_per_step: int = 2048
    """Tokens per update, which set the number of lanes: systems with other segments see as much text."""
    learning_rate: float = 3e-3
    gate_rate: float = 10.0
    """Factor on the learning rate of gate biases, the few numbers that decide how long the state lasts."""
    noise_share: float = 0.1  # share of the noise that contributes to the loss; all queried names do
    gap: float = 20.0  # tokens between questions, on average
    say_again: float = 0.05  # share of answers that appear in the text, in half of the documents
    first: int = 0  # length of documents in the first stage; 0: four windows, or one segment if that is longer
    longest: int = 2048  # length of documents in the last stage
    mastered: float = 0.5  # bits per queried name below which the documents become twice as long
    seed: int = 0

    def run_config(self, system: str, size: str, model: ModelConfig, data: str) -> RunConfig:
        """The configuration of a run with this curriculum; data: documents to measure on."""
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
    """What a curriculum needs to know about the training."""

    @property
    def steps(self) -> int: ...
    @property
    def cooldown(self) -> int: ...
    @property
    def mastered(self) -> float: ...


class Curriculum:
    """Starts the next level as soon as the current one is mastered; or replays the stages of another run."""

    def __init__(
        self,
        settings: Pace,
        levels: Sequence[int],
        stages: Stages | None = None,
        enough: int = 300,
        finished: float | None = None,
    ) -> None:
        """levels: ascending. finished: bits below which training may end; None: as for every other level."""
        self.settings, self.levels, self.enough = settings, list(levels), enough
        self.finished = settings.mastered if finished is None else finished
        self.stages: Stages = list(stages or [(1, self.levels[0])])
        self.recent: deque[float] = deque(maxlen=enough)
        """Bits of the last answers, by which the current stage is judged."""

    @property
    def last_step(self) -> int | None:
        step, level = self.stages[-1]
        return None if level else step + self.settings.cooldown - 1

    def level_at(self, step: int) -> int:
        """The highest level of documents that begin at this step."""
        return max(level for start, level in self.stages if start <= step)

    def observe(self, step: int, bits: list[float]) -> None:
        """Called after an update. Collects answers until there are enough to judge."""
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

    def state_dict(self) -> Cursor:
        return {"stages": self.stages, "recent": list(self.recent)}

    def load_state_dict(self, state: Cursor) -> None:
        self.stages = [(step, level) for step, level in state["stages"]]
        self.recent.clear()
        self.recent.extend(state["recent"])


def cooldown_of(steps: int, most: int) -> int:
    """The last updates of a run, over which the learning rate decays: at most a third."""
    return min(most, max(1, steps // 3))


def doublings(first: int, last: int) -> list[int]:
    """From the first to the last, each at most twice the one before."""
    levels = [first]
    while levels[-1] < last:
        levels.append(min(2 * levels[-1], last))
    return levels


class PlantedStream(SegmentStream):
    """An endless stream of training documents, in whole segments, without padding."""

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
        """Everything that determines the documents."""
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
        """A document from its number, so that a stream can be resumed inside it."""
        settings, rng = self.settings, np.random.default_rng([self.settings.seed, number])
        # Lengths are log-uniform: short documents, and with them first mentions, stay in the mix.
        segments = max(1, round(np.exp(rng.uniform(0, np.log(max(1, longest // self.segment))))))
        # In half of the documents no answer appears: a single mention must be remembered.
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
        own = {"given": self._given, "begun": self._begun, "lanes": self._lanes}
        return own | self.curriculum.state_dict()

    def load_state_dict(self, state: Cursor) -> None:
        self._given, self._begun, self._lanes = state["given"], state["begun"], list(state["lanes"])
        self._lessons.clear()
        self.curriculum.load_state_dict(state)
