"""Planted documents: names where they should be, distances as they are said, and a curriculum that grows."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from block_recurrent import preset
from block_recurrent.checkpoint import load_run
from block_recurrent.errors import ConfigError
from block_recurrent.run_config import RunConfig
from block_recurrent.studies.curriculum import Curriculum, PlantedStream, RecallTraining, Stages, doublings
from block_recurrent.studies.planted import ASK, NAMES, PlantedNames, distance_buckets
from block_recurrent.studies.recall import SPLIT, TOKENIZER, make_documents, train_recall
from block_recurrent.train.loop import Trainer
from block_recurrent.train.report import read_metrics

TASK = PlantedNames(window=16)
MARK = TOKENIZER.eos_token_id


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
        (name,) = set(lesson.targets[lesson.mask].tolist())
        assert name in NAMES
        assert (lesson.tokens[lesson.mask] == ASK).all()
        said = np.flatnonzero(lesson.tokens == name)
        assert lesson.tokens[0] == MARK
        # Where no answer is kept back, the target is the next token.
        silent = lesson.mask & (np.append(lesson.tokens[1:], MARK) != name)
        follows = np.append(lesson.tokens[1:], MARK)
        assert (lesson.targets == follows)[~silent].all()
        assert len(said) == 1 if say_again == 0 else len(said) >= 1
        for place in np.flatnonzero(lesson.mask):
            before = said[said <= place]
            assert lesson.distance[place] == (place + 1 - before[-1] if len(before) else 0)


def run_config(settings: RecallTraining) -> RunConfig:
    model = preset("rec-fixed-skip", "micro", 257, dropout=0.0, attention_dropout=0.0)
    return settings.run_config("rec-fixed-skip", "micro", model, "")


def test_lanes_hand_on_whole_documents() -> None:
    settings = RecallTraining(tokens_per_step=256, first=256)
    stream = PlantedStream(TASK, run_config(settings), settings)
    started = np.zeros(4, int)
    for step in range(50):
        segment = next(stream)
        assert segment.tokens.shape == segment.targets.shape == (4, 64)
        assert (segment.tokens[:, 0] == MARK).tolist() == segment.starts.tolist(), "a mark begins each document"
        started = np.where(segment.starts, 1, started + 1)
        assert started.max() <= 4, "no document is longer than asked for"
        assert step or segment.starts.all()
        asked = segment.targets == np.isin(segment.targets, list(NAMES)) * segment.targets
        assert segment.mask[asked].all()
        assert 0 < segment.mask.mean() < 0.4, "some of the noise carries loss"


def test_a_stream_is_resumed_inside_of_documents() -> None:
    settings = RecallTraining(tokens_per_step=256, first=256)
    first, second = (PlantedStream(TASK, run_config(settings), settings) for _ in range(2))
    for step in range(1, 8):
        next(first)
        first.observe(step, np.full((4, 64), 0.1, np.float32))
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for _ in range(9):
        ours, theirs = next(first), next(second)
        assert all(np.array_equal(a, b) for a, b in zip(ours[:4], theirs[:4], strict=True))
    assert first.state_dict() == second.state_dict()


def test_buckets() -> None:
    assert distance_buckets(16, 100) == [(17, 32), (33, 64), (65, 100)]
    assert distance_buckets(16, 16) == []
    assert distance_buckets(16, 17) == [(17, 17)]


def test_stages_grow_when_mastered_and_end() -> None:
    curriculum = Curriculum(RecallTraining(cooldown=5), doublings(64, 256), enough=10)
    observed: list[tuple[int, float]] = [(9, 0.1), (20, 0.9), (20, 0.1), (10, 0.1), (10, 0.1), (10, 0.1)]
    seen = []
    for step, (names, bits) in enumerate(observed, start=1):
        curriculum.observe(step, [bits] * names)
        seen.append((curriculum.level_at(step + 1), curriculum.last_step))
    # Too few to tell; not good enough; mastered; mastered; the last stage; nothing more.
    assert seen == [(64, None), (64, None), (128, None), (256, None), (256, 10), (256, 10)]


def test_a_baseline_is_taught_the_same_lessons(tmp_path: Path) -> None:
    settings = RecallTraining(steps=12, cooldown=4, tokens_per_step=256)
    config = run_config(settings)
    assert train_recall(TASK, settings, config, tmp_path / "first", None) == [(1, 64), (9, 0)]
    stages: Stages = [(1, 64), (4, 128), (7, 0)]
    assert train_recall(TASK, settings, config, tmp_path / "again", stages) == stages
    lines = read_metrics(tmp_path / "again")
    assert [line["longest_document"] for line in lines] == [64] * 3 + [128] * 7, "and it ends after the cooldown"
    rates = [line["learning_rate"] for line in lines]
    assert rates[6:] == pytest.approx([rates[5] * 7 / 6 * (1 - n / 4) * (7 + n) / 7 for n in range(4)])


def test_a_study_is_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped and gone on with, bit for bit."""
    one_step = Trainer.one_step
    settings = RecallTraining(steps=12, cooldown=4, tokens_per_step=256)
    config = run_config(settings)
    train_recall(TASK, settings, config, tmp_path / "whole", None)
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "one_step", lambda self, *rest: one_step(self, *rest) or self.counters.step == 7)
        assert train_recall(TASK, settings, config, tmp_path / "parts", None) is None
    assert train_recall(TASK, settings, config, tmp_path / "parts", None) == [(1, 64), (9, 0)]
    ours, expected = (load_run(tmp_path / name).model.state_dict() for name in ("parts", "whole"))
    assert all(torch.equal(ours[name], x) for name, x in expected.items())


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
