"""Threads: forks, saves to one path, and a model in training mode beside an engine."""

from __future__ import annotations

import copy
import io
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from block_recurrent import BlockRecurrentLM, DocumentMemory, Engine, Session
from block_recurrent.data import load_tokenizer
from block_recurrent.presets import preset

FAMILIES = ("slide", "rec-fixed-skip", "rec-lstm-dual", "feedback-fixed-skip", "memorizing")


def make_session(system: str) -> Session:
    torch.manual_seed(0)
    sizes = {"d_model": 16, "num_heads": 2, "head_dim": 8, "mlp_dim": 32, "window": 8, "segment": 16}
    config = preset(system, "micro", vocab_size=257).replace(**sizes, memory_size=32, memory_neighbors=4)
    session = Session(Engine(BlockRecurrentLM(config).eval()), load_tokenizer("bytes"))
    session.read("Anna met Boris by the sea, and they walked until it was dark.")
    return session


def operate(session: Session, seed: int) -> list[object]:
    """Some operations on a fork, and what they gave."""
    fork = session.fork()
    text = fork.write_all(6, seed=seed).text
    fork.read(f" {seed} and so on")
    return [text, fork.loss_of("the end"), fork.write_all(3, temperature=0).text, fork.position]


@pytest.mark.parametrize("system", FAMILIES)
def test_forks_in_threads_do_not_mix(system):
    session = make_session(system)
    alone = [operate(session, seed) for seed in range(6)]
    with ThreadPoolExecutor(6) as pool:
        for _ in range(4):
            together = list(pool.map(lambda seed: operate(session, seed), range(6)))
            for mine, expected in zip(together, alone, strict=True):
                assert mine[0] == expected[0]
                assert mine[1] == pytest.approx(expected[1], abs=1e-3)
                assert mine[2:] == expected[2:]


def test_threads_that_save_to_one_path(tmp_path):
    session = make_session("rec-fixed-skip")
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: session.save(tmp_path / "one.memory"), range(64)))
    assert Session.load(tmp_path / "one.memory", session.engine, session.tokenizer).position == session.position
    assert [path.name for path in tmp_path.iterdir()] == ["one.memory"]


def test_an_engine_has_no_dropout_whatever_the_model_does():
    config = preset("rec-fixed-skip", "micro", vocab_size=257).replace(dropout=0.5, attention_dropout=0.5)
    torch.manual_seed(0)
    model = BlockRecurrentLM(config).train()
    session = Session(Engine(model), load_tokenizer("bytes"))
    expected = session.loss_of("the same text")

    def flicker(_: int) -> float:
        model.train() if _ % 2 else model.eval()
        return session.fork().loss_of("the same text")

    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(flicker, range(20))) == {expected}


def test_weights_that_a_fused_optimizer_changed_are_taken_at_refresh():
    torch.manual_seed(0)
    model = BlockRecurrentLM(preset("rec-fixed-skip", "micro", vocab_size=257))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    engine = Engine(model)
    before, _ = engine.decode([65])
    tokens = torch.randint(257, (1, 64))
    model.loss(tokens, tokens).sum.backward()
    optimizer.step()
    assert torch.equal(engine.decode([65])[0], before), "an engine is a snapshot"
    engine.refresh()
    logits, _ = engine.decode([65])
    with torch.no_grad():
        expected = model.eval()(torch.tensor([[65]]))[0][:, -1]
    assert torch.allclose(logits, expected, atol=1e-4)
    assert not torch.allclose(logits, before, atol=0.1)


@pytest.mark.parametrize("system", FAMILIES)
def test_a_memory_can_be_pickled_copied_and_saved_by_torch(system):
    memory = make_session(system).memory
    stream = io.BytesIO()
    torch.save(memory, stream)
    stream.seek(0)
    for other in (pickle.loads(pickle.dumps(memory)), copy.deepcopy(memory), torch.load(stream, weights_only=False)):
        assert isinstance(other, DocumentMemory)
        assert other.equals(memory)
