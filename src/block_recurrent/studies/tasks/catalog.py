"""The tasks by name: their problems, training, variants of models, and published results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from block_recurrent.errors import ConfigError, did_you_mean
from block_recurrent.presets import SYSTEMS
from block_recurrent.studies.tasks.copying import Copy, SelectiveCopying
from block_recurrent.studies.tasks.languages import LANGUAGES, Language
from block_recurrent.studies.tasks.pairs import MQAR, Names, Retrieval
from block_recurrent.studies.tasks.problem import Problem
from block_recurrent.studies.tasks.published import LANGUAGES_AT_500, MQAR_BY_STATE, RMT, Published
from block_recurrent.studies.tasks.stream import TaskTraining

STARTS = {"dropout": 0.0, "attention_dropout": 0.0, "scale_init": 6.0, "gate_init": 0.9}
"""Sharp attention and long gates from the start: both can be learned, but slowly (docs/tasks.md)."""


@dataclass(frozen=True)
class Point:
    """A variant of a model: fields of its configuration that differ from the preset."""

    label: str = ""
    model: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TaskSpec:
    """One task at one size."""

    name: str
    what: str
    problem: Problem
    levels: tuple[int, ...]  # of the curriculum; the last is trained to the end
    tests: tuple[int, ...]  # levels that accuracy is measured at
    window: int
    axis: str = "length"  # what a level is
    training: TaskTraining = field(default_factory=TaskTraining)
    model: Mapping[str, Any] = field(default_factory=lambda: STARTS)
    points: Mapping[str, tuple[Point, ...]] = field(default_factory=dict)
    """By kind of system: recurrent, memorizing, sliding; or all."""
    by_state: bool = False  # the plot is over numbers in the state, not over levels
    published: tuple[Published, ...] = ()
    examples: int = 256  # measured at each level

    def points_of(self, system: str) -> tuple[Point, ...]:
        kind = SYSTEMS[system]
        name = "recurrent" if kind.recurrent else "memorizing" if kind.memorizing else "sliding"
        return self.points.get(name) or self.points.get("all") or (Point(),)

    def only(self, labels: Sequence[str]) -> TaskSpec:
        """A copy with these variants of models."""
        kept = {kind: tuple(point for point in points if point.label in labels) for kind, points in self.points.items()}
        known = list(dict.fromkeys(point.label for points in self.points.values() for point in points))
        for label in labels:
            if label not in known:
                said = f"variants: {', '.join(known)}" if known else "it has no variants"
                raise ConfigError(f"{self.name} has no variant '{label}'{did_you_mean(label, known)}; {said}")
        return replace(self, points=kept)

    def changed(self, settings: Mapping[str, Any]) -> TaskSpec:
        """A copy with some fields of the task, its problem or its training replaced."""
        spec = self
        for key, value in settings.items():
            owner = next((part for part in (spec.problem, spec.training, spec) if key in _settable(part)), None)
            if owner is None:
                known = [*_settable(spec.problem), *_settable(spec.training), *_settable(spec)]
                raise ConfigError(
                    f"{spec.name} has no setting 'task.{key}'{did_you_mean(key, known)}; settings: {', '.join(known)}"
                )
            value = tuple(value) if isinstance(value, list) else value
            if type(value) is not type(getattr(owner, key)):
                raise ConfigError(f"task.{key} is {value!r}: it must have the type of {getattr(owner, key)!r}")
            part: Any = replace(owner, **{key: value})  # type: ignore[type-var]
            if owner is not spec:
                part = replace(spec, **{"problem" if owner is spec.problem else "training": part})
            spec = part
        return spec


def _settable(part: Any) -> list[str]:
    kinds = (int, float, bool) if not isinstance(part, TaskSpec) else (int, tuple)
    names = [item.name for item in fields(part) if isinstance(getattr(part, item.name), kinds)]
    return [name for name in names if name not in ("published", "by_state", "name")]


def _copy(name: str, level: int, segments: int, window: int, backwards: bool = False) -> Callable[[], TaskSpec]:
    times = segments * window // level - 1
    said = f"{'reverse' if backwards else 'copy'} {level} symbols in {segments} segments of {window}"
    levels = tuple(x for x in (4, 8, 16, 24, 40, 60, 90, 120, 160, 200, 240, 300) if x < level)
    return lambda: TaskSpec(
        name,
        said,
        Copy(times=times, backwards=backwards),
        (*levels, level),
        tuple(sorted({level // 2, level})),
        window,
        published=RMT[name],
    )


def _retrieval() -> TaskSpec:
    said = "associative retrieval: the value of one of 4 names in 5 segments of 2"
    return TaskSpec("retrieval", said, Retrieval(), (1, 2, 4), (2, 4), 2, "pairs", published=RMT["retrieval"])


def _mqar() -> TaskSpec:
    states = tuple(Point(f"S={n}", {"num_states": n}) for n in (8, 16, 32, 64))
    windows = tuple(Point(f"W={n}", {"window": n, "segment": n}) for n in (8, 16, 32, 64))
    memories = tuple(Point(f"M={n}", {"memory_size": n, "memory_neighbors": min(n, 16)}) for n in (16, 32, 64, 128))
    return TaskSpec(
        "mqar",
        "multi-query associative recall: accuracy by the size of the state, including the window cache",
        MQAR(),
        (2, 4, 8, 16),
        (4, 8, 16),
        16,
        "pairs",
        model=STARTS | {"num_layers": 2},
        points={"recurrent": states, "sliding": windows, "memorizing": memories},
        by_state=True,
        published=MQAR_BY_STATE,
    )


def _language(name: str) -> Callable[[], TaskSpec]:
    chunks = tuple(Point(f"chunk {n}", {"window": n}) for n in (1, 2, 4, 8))
    return lambda: TaskSpec(
        name,
        f"regular language: {name.replace('-', ' ')}, trained to length 40, tested to 500",
        Language(name),
        (4, 8, 16, 40),
        (10, 20, 40, 60, 100, 200, 500),
        8,
        training=TaskTraining(mastered=0.2 if LANGUAGES[name][1] == 2 else 0.5, lanes=64),
        points={"all": chunks},
        published=LANGUAGES_AT_500,
    )


def _selective() -> TaskSpec:
    said = "selective copying: 16 symbols scattered in 256 tokens, repeated in order"
    return TaskSpec("selective-copying", said, SelectiveCopying(256), (1, 2, 4, 8, 16), (4, 8, 16), 16)


def _capacity() -> TaskSpec:
    # The largest model first: the curriculum follows it, and gives the others the same examples.
    grid = tuple(
        Point(f"S={states} D={width}", {"num_states": states, "d_model": width, "head_dim": width // 4})
        for width in (64, 32)
        for states in (32, 16, 8, 4)
    )
    return TaskSpec(
        "capacity",
        "recall by number of names: how many pairs a state of S vectors of width D holds",
        Names(64),
        (1, 2, 4, 8, 16, 32),
        (1, 2, 4, 8, 16, 32),
        16,
        "pairs",
        points={"recurrent": grid},
    )


TASKS: dict[str, Callable[[], TaskSpec]] = {
    "copy-24": _copy("copy-24", 24, 9, 8),
    "reverse-24": _copy("reverse-24", 24, 6, 8, backwards=True),
    "retrieval": _retrieval,
    "copy-120": _copy("copy-120", 120, 9, 40),
    "copy-240": _copy("copy-240", 240, 6, 120),
    "copy-360": _copy("copy-360", 360, 9, 120),
    "mqar": _mqar,
    **{name: _language(name) for name in LANGUAGES},
    "selective-copying": _selective,
    "capacity": _capacity,
}

# Size micro takes seconds: models of 2 layers, and short problems whose answers are beyond the reach of windows in
# all 3 layers of slide-plus, which costs as much; one point each.
_QUICK = TaskTraining(220, 20, learning_rate=5e-3, finished=0.15, enough=200)
_SMALL = STARTS | {"num_layers": 2, "num_states": 4}
_MICRO: dict[str, dict[str, Any]] = {
    "copy-24": {"problem": Copy(times=1), "levels": (4,), "tests": (4,), "window": 1},
    "reverse-24": {"problem": Copy(times=1, backwards=True, away=3), "levels": (3,), "tests": (3,), "window": 1},
    "retrieval": {"problem": Retrieval(4, 8, away=6), "levels": (1, 2), "tests": (2,), "window": 2},
    "mqar": {"problem": MQAR(16, 6, away=6), "levels": (1, 2), "tests": (2,), "window": 2},
    "parity": {"levels": (2, 4, 8), "tests": (8, 12)},
    "even-pairs": {"levels": (4, 8), "tests": (8, 12)},
    "cycle-navigation": {"levels": (2, 4, 6), "tests": (6,)},
    "modular-arithmetic": {"problem": Language("modular-arithmetic", away=3), "levels": (1, 3), "tests": (3,)},
    "selective-copying": {"problem": SelectiveCopying(12, 8, 6), "levels": (1, 2), "tests": (2,), "window": 2},
    "capacity": {"problem": Names(8, 8, 6), "levels": (1, 2), "tests": (1, 2), "window": 2},
}


def _micro(spec: TaskSpec) -> TaskSpec:
    changes = {"training": _QUICK, "model": _SMALL, "points": {}, **_MICRO.get(spec.name, {})}
    if spec.name in LANGUAGES:
        mastered = spec.training.mastered
        changes |= {"window": 1, "model": _SMALL | {"num_states": 2}, "training": replace(_QUICK, mastered=mastered)}
    return replace(spec, **changes)


def spec_of(name: str, size: str) -> TaskSpec:
    """A task at a size."""
    if name not in TASKS:
        raise ConfigError(f"there is no task '{name}'{did_you_mean(name, TASKS)}; see 'brt tasks list'")
    spec = TASKS[name]()
    return _micro(spec) if size == "micro" and name in _MICRO else spec
