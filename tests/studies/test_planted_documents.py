"""Planted documents: names where they should be, distances as they are said, and a curriculum that grows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from block_recurrent import preset
from block_recurrent.errors import ConfigError
from block_recurrent.studies.planted import ASK, MARK, NAMES, LessonLanes, PlantedNames, distance_buckets
from block_recurrent.studies.recall import SPLIT, make_documents
from block_recurrent.studies.recall_training import RecallTraining, Stages, train_recall

TASK = PlantedNames(window=16)


def test_texts_ask_at_the_distances_asked_for() -> None:
    distances = [17, 400, 33]
    text, asked = TASK.text(np.random.default_rng(0), distances)
    names = [i for i, letter in enumerate(text) if letter.isupper()]
    assert len({text[i] for i in names}) == 1
    assert all(text[i - 1] == "?" and text[i + 1] == " " for i in names)
    assert np.diff(names).tolist() == distances
    assert asked == list(zip(names[1:], distances, strict=True))
    assert names[0] <= 16, "the name is given near the start"


def test_all_names_are_drawn_alike() -> None:
    rng = np.random.default_rng(0)
    drawn = [next(c for c in TASK.text(rng, [])[0] if c.isupper()) for _ in range(1600)]
    counts = [drawn.count(chr(name)) for name in NAMES[:16]]
    assert sum(counts) == 1600
    assert min(counts) > 60
    assert TASK.chance == 4.0


@pytest.mark.parametrize("say_again", [0.0, 0.3, 1.0])
def test_lessons(say_again: float) -> None:
    rng = np.random.default_rng(1)
    for _ in range(20):
        lesson = TASK.lesson(rng, 512, gap=20, say_again=say_again)
        (name,) = set(lesson.targets[lesson.asked].tolist())
        assert name in NAMES
        assert (lesson.tokens[lesson.asked] == ASK).all()
        said = np.flatnonzero(lesson.tokens == name)
        assert lesson.tokens[0] == MARK
        # Where no answer is kept back, the target is the next token.
        silent = lesson.asked & (np.append(lesson.tokens[1:], MARK) != name)
        follows = np.append(lesson.tokens[1:], MARK)
        assert (lesson.targets == follows)[~silent].all()
        assert len(said) == 1 if say_again == 0 else len(said) >= 1
        for place in np.flatnonzero(lesson.asked):
            before = said[said <= place]
            assert lesson.distance[place] == (place + 1 - before[-1] if len(before) else 0)


def test_lanes_hand_on_whole_documents() -> None:
    lanes = LessonLanes(TASK, lanes=4, segment=64, gap=20, say_again=0.05, seed=0)
    started = np.zeros(4, int)
    for step in range(50):
        lesson = lanes.step(longest=256)
        assert lesson.tokens.shape == lesson.targets.shape == (4, 64)
        assert (lesson.tokens[:, 0] == MARK).tolist() == lesson.starts.tolist(), "a mark begins each document"
        started = np.where(lesson.starts, 1, started + 1)
        assert started.max() <= 4, "no document is longer than asked for"
        assert step or lesson.starts.all()


def test_buckets() -> None:
    assert distance_buckets(16, 100) == [(17, 32), (33, 64), (65, 100)]
    assert distance_buckets(16, 16) == []
    assert distance_buckets(16, 17) == [(17, 17)]


def test_stages_grow_when_mastered_and_end() -> None:
    stages = Stages(64, 256, mastered=0.5, enough=10)
    assert not stages.observe(np.full(9, 0.1)), "too few to tell"
    assert not stages.observe(np.full(20, 0.9))
    assert stages.observe(np.full(20, 0.1))
    assert stages.longest == 128
    assert stages.observe(np.full(10, 0.1))
    assert (stages.longest, stages.finished) == (256, False)
    assert stages.observe(np.full(10, 0.1))
    assert (stages.longest, stages.finished) == (256, True)
    assert not stages.observe(np.full(10, 0.1))


def test_a_baseline_is_taught_the_same_lessons() -> None:
    settings = RecallTraining(steps=12, settle=4, tokens_per_step=256)
    told: list[tuple[int, int]] = []
    config = preset("rec-fixed-skip", "micro", 257, dropout=0.0, attention_dropout=0.0)
    model, course = train_recall(config, TASK, settings)
    assert not model.training
    assert course == [(1, 64), (9, 0)]
    schedule = [(1, 64), (4, 128), (9, 0)]
    again = train_recall(config, TASK, settings, schedule, lambda p: told.append((p.step, p.longest)))
    assert again[1] == schedule
    assert told == [(step, 64 if step < 4 else 128) for step in range(1, 13)]
    same, _ = train_recall(config, TASK, settings)
    assert all(torch.equal(x, y) for x, y in zip(model.parameters(), same.parameters(), strict=True)), "by the seed"


def test_documents_to_measure_on(tmp_path: Path) -> None:
    planted = make_documents(TASK, tmp_path / "data", documents=10, longest=300)
    assert len(planted.corpus.documents(SPLIT)) == 10
    buckets = distance_buckets(16, 300)
    counts = [0] * len(buckets)
    for name, asked in planted.asked.items():
        text = planted.corpus.text(name)
        assert len(text) <= 300 + 16 + 3
        for token, distance in asked:
            assert text[token] == text[token - distance]
            assert text[token].isupper()
            counts[[low <= distance <= high for low, high in buckets].index(True)] += 1
    assert min(counts) >= 2, "every bucket has its share"
    again = make_documents(TASK, tmp_path / "data", documents=10, longest=300)
    assert again.corpus.fingerprint == planted.corpus.fingerprint
    with pytest.raises(ConfigError, match="at least 5"):
        make_documents(TASK, tmp_path / "few", documents=4, longest=300)


@pytest.mark.parametrize("names", [1, 20])
def test_refusals(names: int) -> None:
    with pytest.raises(ConfigError, match="must be 2 to 19"):
        PlantedNames(16, names)
