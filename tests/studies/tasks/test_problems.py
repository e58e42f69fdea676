"""Problems are what they say: a plain program that reads the tokens finds every answer."""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
import pytest

from block_recurrent.errors import ConfigError
from block_recurrent.studies.tasks.catalog import TASKS, spec_of
from block_recurrent.studies.tasks.copying import Copy, SelectiveCopying
from block_recurrent.studies.tasks.languages import LANGUAGES, Language
from block_recurrent.studies.tasks.pairs import MQAR, Names, Retrieval
from block_recurrent.studies.tasks.problem import Example, Problem, batch_of
from block_recurrent.studies.tasks.stream import TaskStream, TaskTraining


def solve_copy(problem: Copy, tokens: list[int], place: int) -> int:
    bar = tokens.index(problem.alphabet)
    sequence = tokens[:bar][::-1] if problem.backwards else tokens[:bar]
    return sequence[(place - problem.away - bar) % bar]


def solve_selective(problem: SelectiveCopying, tokens: list[int], place: int) -> int:
    return [token for token in tokens if token < problem.alphabet][place - problem.noise]


def solve_pairs(problem: Problem, tokens: list[int], place: int) -> int:
    """Whatever followed the name the first time."""
    return tokens[tokens.index(tokens[place]) + 1]


def solve_language(problem: Language, tokens: list[int], place: int) -> int:
    """By automaton, symbol by symbol."""
    symbols, string = LANGUAGES[problem.name][0], tokens[: place - problem.away]
    state, sign = 0, 5
    for number, token in enumerate(string):
        if problem.name == "parity":
            state ^= token
        elif problem.name == "even-pairs":
            state ^= int(number > 0 and token != string[number - 1])
        elif problem.name == "cycle-navigation":
            state = (state + {0: 0, 1: 1, 2: 4}[token]) % 5
        elif token >= 5:
            sign = token
        else:
            state = [state + token, state - token, state * token][sign - 5] % 5
    return symbols + state


CASES: list[tuple[Problem, Callable[..., int], int, int]] = [
    # problem, what solves it, level, answers
    (Copy(), solve_copy, 24, 48),
    (Copy(times=1, backwards=True), solve_copy, 24, 24),
    (Copy(times=1, backwards=True, away=6), solve_copy, 5, 5),
    (SelectiveCopying(), solve_selective, 8, 8),
    (SelectiveCopying(28, 4, 12), solve_selective, 4, 4),
    (Retrieval(), solve_pairs, 4, 1),
    (Retrieval(4, 4, away=3), solve_pairs, 4, 1),
    (MQAR(), solve_pairs, 16, 16),
    (MQAR(64, 4, away=32), solve_pairs, 4, 4),
    (Names(), solve_pairs, 32, 32),
    *((Language(name), solve_language, 21, 1) for name in LANGUAGES),
    (Language("modular-arithmetic", away=3), solve_language, 9, 1),
    *((Language(name, mixed=False), solve_language, 40, 1) for name in LANGUAGES),
]


@pytest.mark.parametrize(
    ("problem", "solve", "level", "answers"), CASES, ids=lambda x: getattr(x, "__name__", str(x)[:40])
)
def test_a_plain_program_solves_it(problem: Problem, solve: Callable[..., int], level: int, answers: int) -> None:
    rng = np.random.default_rng(0)
    seen = set()
    for _ in range(60):
        tokens, targets, mask = problem.example(rng, level)
        assert len(tokens) == len(targets) == len(mask) == problem.length(level)
        assert 0 <= tokens.min() <= max(tokens.max(), targets.max()) < problem.symbols
        assert mask.sum() == answers
        places = np.flatnonzero(mask).tolist()
        assert [solve(problem, tokens.tolist(), place) for place in places] == targets[mask].tolist()
        seen.update(targets[mask].tolist())
    assert 1 / problem.chance >= len(seen) > 0.6 * min(1 / problem.chance, 60), "answers are spread"


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("size", ["micro", "tiny"])
def test_examples_hang_on_the_seed_alone(name: str, size: str) -> None:
    spec = spec_of(name, size)
    level = spec.levels[0]

    def make(seed: int) -> Example:
        length = spec.problem.length(level) + 3
        return batch_of(spec.problem, np.random.default_rng(seed), level, 4, length, spec.problem.symbols)

    first, again, other = make(0), make(0), make(1)
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not np.array_equal(first.tokens, other.tokens)
    assert (first.tokens[:, -3:] == spec.problem.symbols).all(), "filled up with the document mark"
    assert not first.mask[:, -3:].any()


@pytest.mark.parametrize(
    ("name", "segments", "window"),
    [("copy-24", 9, 8), ("reverse-24", 6, 8), ("retrieval", 5, 2), ("copy-120", 9, 40), ("copy-240", 6, 120)],
)
def test_examples_are_as_long_as_published(name: str, segments: int, window: int) -> None:
    spec = spec_of(name, "tiny")
    assert (spec.problem.length(spec.levels[-1]), spec.window) == (segments * window, window)


def test_questions_of_mqar_come_sooner_rather_than_later() -> None:
    rng, problem = np.random.default_rng(0), MQAR()
    places = [np.flatnonzero(problem.example(rng, 8).mask) - 16 for _ in range(200)]
    assert np.median(places) < 0.35 * (problem.length(8) - 16)
    assert max(map(max, places)) > 0.8 * (problem.length(8) - 16)


def stream_of(pieces: int) -> TaskStream:
    training = TaskTraining(steps=400, cooldown=4, lanes=8, mastered=1.0, finished=1.0)
    return TaskStream(Copy(times=1), [2, 4], training, window=2, pieces=pieces)


@pytest.mark.parametrize("pieces", [1, 4])
def test_a_stream_is_resumed_anywhere(pieces: int) -> None:
    first, second = stream_of(pieces), stream_of(pieces)
    stopped = 80 * pieces - 1  # inside of an example, where these come in pieces
    for step in range(1, 200 * pieces):
        segment = next(first)
        assert segment.starts.all() == ((step - 1) % pieces == 0)
        if step > stopped:
            assert all(np.array_equal(a, b) for a, b in zip(segment[:4], next(second)[:4], strict=True))
            second.observe(step, np.full(segment.tokens.shape, 0.3, np.float32))
        first.observe(step, np.full(segment.tokens.shape, 0.3, np.float32))
        if step == stopped:
            second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert first.curriculum.stages[:2] == [(1, 2), (64, 4)], "1000 answers of 16 a batch"
    assert first.state_dict() == second.state_dict()
    last = first.curriculum.last_step
    assert last is not None
    assert first.last_step == last * pieces


def test_what_a_task_can_be_set_to() -> None:
    spec = spec_of("mqar", "tiny").changed({"vocabulary": 64, "steps": 7, "levels": [1, 2], "window": 4})
    assert (spec.problem.symbols, spec.training.steps, spec.levels, spec.window) == (64, 7, (1, 2), 4)
    for settings, message in (
        ({"vocabular": 64}, "did you mean 'vocabulary'"),
        ({"steps": "many"}, "must have the type of"),
    ):
        with pytest.raises(ConfigError, match=message):
            spec.changed(settings)
    with pytest.raises(ConfigError, match="did you mean 'parity'"):
        spec_of("paritty", "tiny")
