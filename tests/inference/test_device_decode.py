"""Decoding and sampling on a device, run on a CPU: the same tokens and memories, and nothing waits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from block_recurrent import BlockRecurrentLM, Session, preset
from block_recurrent.data import load_tokenizer
from block_recurrent.inference.batch import read_together, write_together
from block_recurrent.inference.device_decode import DeviceDecoder, DeviceWriting
from block_recurrent.inference.engine import Engine
from block_recurrent.inference.sampling import Sampling
from block_recurrent.inference.session_state import SessionState
from block_recurrent.inference.snapshot import Snapshot
from block_recurrent.model.memory import DocumentMemory

from ..train.test_meta import Host

PROMPTS = ["Call me Ishmael. Some years ago", "", "The sea, the sea"]
FAMILIES = ["slide", "rec-fixed-skip", "rec-lstm-dual", "feedback-fixed-skip"]


def make_model(system: str) -> BlockRecurrentLM:
    torch.manual_seed(0)
    return BlockRecurrentLM(preset(system, "micro", vocab_size=257, window=8, segment=16)).eval()


@pytest.fixture
def on_device(monkeypatch):
    """Engines decode as on a GPU."""
    monkeypatch.setattr(DeviceDecoder, "fits", staticmethod(lambda snapshot: not snapshot.config.memory_layers))


def generated(model: BlockRecurrentLM, sampling: Sampling, dtype: torch.dtype = torch.float32):
    sessions = [Session(Engine(model, dtype=dtype), load_tokenizer("bytes"))]
    sessions += [sessions[0].fork() for _ in PROMPTS[1:]]
    read_together(sessions, PROMPTS)
    return write_together(sessions, 40, sampling, [5, 6, 7]), sessions


@pytest.mark.parametrize("system", FAMILIES)
@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.0, "repetition_penalty": 1.3},
        {"temperature": 0.8, "top_k": 60, "top_p": 0.9, "end_at_mark": False},
        {"min_p": 0.05, "repetition_penalty": 1.1},
    ],
)
def test_lanes_write_what_they_write_on_a_cpu(system, options, monkeypatch):
    """At different positions, through ends of blocks, and until marks: texts, probabilities and memories."""
    model, sampling = make_model(system), Sampling(**options)
    with torch.no_grad():
        model.final_norm.weight.mul_(3)  # a distribution in which options matter
        model.embedding.weight[256] = 1.02 * model.embedding.weight[97]  # and marks are likely
    expected, reference = generated(model, sampling)
    monkeypatch.setattr(DeviceDecoder, "fits", staticmethod(lambda snapshot: True))
    found, sessions = generated(model, sampling)
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours.tokens, ours.text, ours.ended) == (theirs.tokens, theirs.text, theirs.ended)
        assert ours.log_probs == pytest.approx(theirs.log_probs, abs=1e-4)
    for ours, theirs in zip(sessions, reference, strict=True):
        assert ours.state.recent == theirs.state.recent
        assert ours.memory.equals(theirs.memory, tolerance=1e-4)


def test_more_tokens_than_random_numbers_at_once(on_device, monkeypatch):
    model = make_model("rec-fixed-skip")
    session = Session(model, load_tokenizer("bytes"))
    tokens = [part.token for part in session.write_tokens(150, seed=3, end_at_mark=False)]
    monkeypatch.undo()
    other = Session(model, load_tokenizer("bytes"))
    assert tokens == [part.token for part in other.write_tokens(150, seed=3, end_at_mark=False)]
    assert session.memory.equals(other.memory, tolerance=1e-4)


def test_a_session_can_stop_and_fork_anywhere(on_device):
    session = Session(make_model("rec-lstm-dual"), load_tokenizer("bytes"))
    session.read(PROMPTS[0])
    writing = session.write_tokens(30, temperature=0, end_at_mark=False)
    for _ in range(9):
        next(writing)
    fork = session.fork()
    rest = [part.token for part in writing]
    assert [part.token for part in fork.write_tokens(21, temperature=0, end_at_mark=False)] == rest


def test_bfloat16_keeps_states_in_float32(on_device):
    model = make_model("rec-fixed-skip")
    written, sessions = generated(model, Sampling(temperature=0, end_at_mark=False), torch.bfloat16)
    assert all(len(one.tokens) == 40 for one in written)
    dtypes = {name.split(".")[-1]: x.dtype for name, x in sessions[0].memory.named_tensors().items()}
    assert dtypes == {"keys": torch.bfloat16, "values": torch.bfloat16, "state": torch.float32}


def writing_on(device: str, system: str, lanes: int = 2) -> DeviceWriting:
    model = make_model(system)
    snapshot = Snapshot(model.to(device), "float32")
    states = [SessionState(DocumentMemory.empty(model.config, 1, device), pending=256) for _ in range(lanes)]
    sampling = Sampling(temperature=0.9, top_k=5, top_p=0.9, min_p=0.01, repetition_penalty=1.2)
    decoder = DeviceDecoder(snapshot, torch.no_grad)
    return DeviceWriting(decoder, states, [replace(sampling, seed=lane) for lane in range(lanes)], 256)


@pytest.mark.parametrize("system", FAMILIES)
def test_nothing_waits_and_every_token_is_the_same_work(system):
    """On tensors without data, reading a number, `nonzero` and a branch on a tensor are errors."""
    writing, traces = writing_on("meta", system), []
    for work in (writing._token, writing._token, writing._block, writing._token):
        with torch.no_grad(), Host() as trace:
            work()
        traces.append(trace)
        assert trace.waits == []
    assert traces[0].kernels
    assert traces[0].kernels == traces[1].kernels == traces[3].kernels


def test_the_chosen_tokens_are_one_copy():
    writing = writing_on("meta", "rec-fixed-skip")
    with Host() as host:
        for _ in range(2 * writing.config.window):
            assert len(writing.step()) == 2
    assert host.waits == ["to the host"] * 2 * writing.config.window


@pytest.mark.parametrize("system", ["rec-lstm-dual", "feedback-fixed-skip"])
def test_dynamo_captures_a_token_and_a_block_as_one_graph(system):
    torch._dynamo.reset()
    writing, plain = writing_on("cpu", system), writing_on("cpu", system)
    counter = CompileCounter()
    token, block = (torch.compile(f, backend=counter, fullgraph=True) for f in (writing._token, writing._block))
    with torch.no_grad():
        for writer in (writing, plain):
            writer._draws.uniform_(generator=torch.Generator().manual_seed(1))
        for _ in range(5):
            assert torch.equal(token(), plain._token())
        block()
        plain._block()
        assert torch.equal(token(), plain._token())
    assert counter.frame_count == 2
