"""Sessions on one engine: many threads at once, and narrow weights on a model that has learned something."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from block_recurrent import BlockRecurrentLM, preset
from block_recurrent.data import Tokenizer
from block_recurrent.inference import Engine
from block_recurrent.inference.session import Session

THREADS, OPERATIONS = 8, 250


def operate(engine: Engine, tokenizer: Tokenizer, text: str, seed: int, folder: Path) -> list[Any]:
    """So many operations on a session and its forks, and what each of them gave."""
    rng, sessions, seen = random.Random(seed), [Session(engine, tokenizer)], []
    file = folder / f"{seed}.memory"
    sessions[0].save(file)
    for step in range(OPERATIONS):
        session = rng.choice(sessions)
        operation = rng.choices(["read", "write", "fork", "save", "load", "score"], [6, 8, 3, 1, 2, 4])[0]
        start = rng.randrange(len(text) - 50)
        piece = text[start : start + rng.choice([1, 3, 20])]
        if operation == "read":
            seen.append(session.read(piece))
        elif operation == "write":
            seen.append("".join(session.write(rng.choice([1, 3]), temperature=1.0, seed=step)))
        elif operation == "score":
            seen.append(session.loss_of(piece))
        elif operation == "save":
            session.save(file)
        else:
            other = session.fork() if operation == "fork" else Session.load(file, engine, tokenizer)
            sessions = [*sessions[-3:], other]
    return [*seen, *(session.memory for session in sessions)]


def test_threads_with_own_sessions_give_what_each_gives_alone(
    make_reader: Callable[..., Any], byte_tokenizer: Tokenizer, text: Callable[..., str], tmp_path: Path
) -> None:
    engine, words = Engine(make_reader()), text(300)
    results: list[list[Any]] = [[] for _ in range(THREADS)]

    def run(seed: int) -> None:
        results[seed] = operate(engine, byte_tokenizer, words, seed, tmp_path)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed, together in enumerate(results):
        alone = operate(engine, byte_tokenizer, words, seed, tmp_path)
        assert len(alone) == len(together) > OPERATIONS // 2
        for one, other in zip(alone, together, strict=True):
            assert one.equals(other) if hasattr(one, "equals") else one == other


@pytest.fixture(scope="module")
def trained() -> BlockRecurrentLM:
    """A model that has read the project's pages for some seconds."""
    pages = [np.frombuffer(path.read_bytes(), np.uint8) for path in sorted(Path("docs").glob("*.md"))]
    text = torch.from_numpy(np.concatenate(pages).astype(np.int64))
    torch.manual_seed(0)
    model = BlockRecurrentLM(preset("rec-fixed-skip", "micro", vocab_size=257))
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    lanes = text[: len(text) // 16 * 16].view(16, -1)
    memory, size = None, 64
    for step in range((lanes.shape[1] - 1) // size):
        piece = lanes[:, step * size : (step + 1) * size + 1]
        loss = model.loss(piece[:, :-1], piece[:, 1:], memory)
        memory = loss.memory.detach()
        optimizer.zero_grad()
        (loss.sum / loss.count).backward()
        optimizer.step()
    return model.eval()


def held_out() -> torch.Tensor:
    text = np.frombuffer(Path("README.md").read_bytes(), np.uint8)[:4096].astype(np.int64)
    return torch.from_numpy(text).view(16, -1)


@pytest.mark.parametrize("weights", ["bfloat16", "int8"])
def test_narrow_weights_of_a_trained_model_cost_less_than_a_hundredth_bit(
    weights: str, trained: BlockRecurrentLM
) -> None:
    """Of each token of a text that it has not read: by scoring, and by decoding, whose caches are narrow too."""
    text = held_out()
    exact = np.stack(Engine(trained).score(text[:, :-1], text[:, 1:]).nats) / np.log(2)
    assert exact.mean() < 5.5  # it has learned: 8 bits before
    engine = Engine(trained, weights)
    scored = np.stack(engine.score(text[:, :-1], text[:, 1:]).nats) / np.log(2)
    memory, decoded = None, []
    for i in range(text.shape[1] - 1):
        logits, memory = engine.decode(text[:, i], memory)
        decoded.append(-logits.log_softmax(-1).gather(1, text[:, i + 1, None])[:, 0])
    for found in (scored, torch.stack(decoded, 1).numpy() / np.log(2)):
        assert np.abs(found - exact).mean() > 0
        assert abs(found.mean() - exact.mean()) < 0.01
