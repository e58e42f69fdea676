"""`Engine` returns the same logits as the model for every system and any sequence of calls."""

from __future__ import annotations

import copy
import pickle
import re
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from block_recurrent import BlockRecurrentLM, preset
from block_recurrent.errors import BlockRecurrentError, ConfigError, InputError, MemoryMismatchError
from block_recurrent.inference import Engine
from block_recurrent.inference import engine as engine_module
from block_recurrent.inference.snapshot import WEIGHTS
from block_recurrent.model.memory import DocumentMemory
from block_recurrent.ops import cpp
from block_recurrent.presets import SYSTEMS

VOCAB = 23
ODD = {"d_model": 43, "head_dim": 13, "mlp_dim": 61, "num_states": 11, "window": 9, "segment": 18}
"""Sizes that fill no vector."""
TOLERANCE = {"float32": 1e-4, "bfloat16": 4e-3, "int8": 4e-3}
"""Caches have 16 bits where weights are narrow."""
Tokens = Callable[..., Tensor]


def make(system: str, **fields: object) -> BlockRecurrentLM:
    """A float32 model at size micro with dropout, left in training mode: an engine must not care."""
    # All of the memory is retrieved, so that nothing hangs on which of two near keys is nearer.
    config = preset(system, "micro", vocab_size=VOCAB, memory_neighbors=64).replace(**fields)
    torch.manual_seed(0)
    model = BlockRecurrentLM(config)
    for name, parameter in model.named_parameters():  # away from the ones and zeros of a new model
        parameter.data += 0.1 * torch.randn_like(parameter)
        if name.endswith("scale"):
            parameter.data[0] *= -1
    return model


def expected(model: BlockRecurrentLM, *args: object, **kwargs: object) -> tuple[Tensor, DocumentMemory]:
    with torch.no_grad():
        return copy.deepcopy(model).eval()(*args, **kwargs)


@pytest.mark.parametrize("system", SYSTEMS)
def test_any_mix_of_calls_equals_the_model(system: str, tokens: Tokens) -> None:
    model = make(system)
    engine, text = Engine(model), tokens(3, 71)
    wanted, wanted_memory = expected(model, text)
    got = torch.empty(3, 71, VOCAB)
    got[:, 0], memory = engine.decode(text[:, 0])
    got[:, 4], memory = engine.prefill(text[:, 1:5], memory)
    for i in range(5, 24):
        got[:, i], memory = engine.decode(text[:, i].tolist(), memory)
    got[:, 49], memory = engine.prefill(list(text[:, 24:50]), memory)
    for i in range(50, 71):
        got[:, i], memory = engine.decode(text[:, i], memory)
    seen = [0, 4, *range(5, 24), 49, *range(50, 71)]
    torch.testing.assert_close(got[:, seen], wanted[:, seen], atol=1e-4, rtol=1e-4)
    assert wanted_memory.difference(memory) < 1e-4
    assert not got.is_inference()
    assert model.training


@pytest.mark.parametrize("lanes", [3, 16])
def test_lanes_stand_anywhere(system: str, lanes: int, build: str, tokens: Tokens) -> None:
    """By several calls of every kind, in one memory and in many, with every build of the kernels."""
    model = make(system)
    engine, text = Engine(model), tokens(lanes, 70)
    lengths = [30, 1, 17, 16, 33, 2, 48, 31, 15, 9, 50, 28, 3, 47, 11, 20][:lanes]
    wanted, _ = expected(model, text)
    logits, memory = engine.prefill([text[i, :n] for i, n in enumerate(lengths)])
    tensors, other = engine.prefill(text[:, : max(lengths)], lengths=torch.tensor(lengths))
    torch.testing.assert_close(logits, torch.stack([wanted[i, n - 1] for i, n in enumerate(lengths)]))
    torch.testing.assert_close(tensors, logits)
    assert memory.equals(other)
    many = [memory.select([lane]) for lane in range(lanes)]
    for step in range(20):
        positions = [n + step for n in lengths]
        row = [int(text[i, n]) for i, n in enumerate(positions)]
        logits, memory = engine.decode(row, memory)
        apart, many = engine.decode_many(row, many)
        right = torch.stack([wanted[i, n] for i, n in enumerate(positions)])
        torch.testing.assert_close(logits, right, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(apart, right, atol=1e-4, rtol=1e-4)
    assert DocumentMemory.cat(many).difference(memory) < 1e-4


@pytest.mark.parametrize("system", ["rec-fixed-skip", "feedback-lstm-single", "memorizing"])
def test_forks_see_nothing_of_each_other(system: str, tokens: Tokens) -> None:
    engine, text = Engine(make(system)), tokens(2, 50)
    _, start = engine.prefill(text[:, :13])
    kept = copy.deepcopy(start)
    memories, results = [start, start, start], []
    for step in range(13, 50):  # the first two say the same, the third something else
        rows = [text[:, step], text[:, step], (text[:, step] + 1) % VOCAB]
        decoded = [engine.decode(row, memory) for row, memory in zip(rows, memories, strict=True)]
        results, memories = [logits for logits, _ in decoded], [memory for _, memory in decoded]
        assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])
    assert memories[0].equals(memories[1])
    assert kept.equals(start)
    again = engine.decode(text[:, 13], kept)[0]
    torch.testing.assert_close(again, engine.decode(text[:, 13], start)[0])


def test_a_memory_can_be_kept_in_any_way(tokens: Tokens, tmp_path: Path) -> None:
    model = make("rec-lstm-single")
    engine, text = Engine(model), tokens(2, 40)
    _, memory = engine.prefill(text[:, :15])
    for i in range(15, 20):
        _, memory = engine.decode(text[:, i], memory)
    memory.save(tmp_path / "memory")
    wanted, after = engine.decode(text[:, 20], memory)
    copies = {
        "pickled": pickle.loads(pickle.dumps(memory)),
        "deep copy": copy.deepcopy(memory),
        "loaded": DocumentMemory.load(tmp_path / "memory"),
        "selected": memory.select([0, 1]),
    }
    for name, other in copies.items():
        logits, own = engine.decode(text[:, 20], other)
        assert torch.equal(logits, wanted), name
        assert own.equals(after), name
    # The model takes an engine's memory, and the engine the model's.
    logits, own = expected(model, text[:, 20:21], memory)
    torch.testing.assert_close(logits[:, 0], wanted, atol=1e-4, rtol=1e-4)
    model.eval()
    with torch.no_grad():
        own = model(text[:, :20])[1]
    torch.testing.assert_close(engine.decode(text[:, 20], own)[0], wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("system", ["rec-fixed-dual", "feedback-fixed-skip", "memorizing"])
def test_scores_are_the_models(system: str, tokens: Tokens) -> None:
    model = make(system)
    engine, text = Engine(model), tokens(2, 90)
    _, memory = engine.prefill(text[:, :7])
    rows, targets = [text[0, 7:89], text[1, 7:30]], [text[0, 8:], text[1, 8:31]]
    scored = engine.score(rows, targets, memory)
    wanted = expected(model, text[:, :-1])[0].log_softmax(-1).gather(2, text[:, 1:, None])[..., 0].neg().numpy()
    np.testing.assert_allclose(scored.nats[0], wanted[0, 7:], atol=1e-4)
    np.testing.assert_allclose(scored.nats[1], wanted[1, 7:30], atol=1e-4)
    assert scored.memory.tokens_read.tolist() == [89, 30]
    assert engine.score([[]], [[]]).nats[0].shape == (0,)


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("lanes", [1, 2, 3, 7, 16])
def test_torch_does_the_same_where_there_is_no_kernel(
    weights: str, lanes: int, build: str, tokens: Tokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes that fill no vector, and several recurrent layers of which the others read the highest."""
    model = make("feedback-lstm-single", recurrent_layers=(1, 2), **ODD)
    native, text = Engine(model, weights), tokens(lanes, 30)
    monkeypatch.setattr(cpp, "LIBRARY", None)
    plain = Engine(model, weights)
    assert native._now[1] is not None
    assert plain._now[1] is None
    memories: list[DocumentMemory | None] = [None, None]
    for i in range(30):
        logits, memories[0] = native.decode(text[:, i], memories[0])
        wanted, memories[1] = plain.decode(text[:, i], memories[1])
        torch.testing.assert_close(logits, wanted, atol=TOLERANCE[weights], rtol=TOLERANCE[weights])
    assert memories[0] is not None
    assert memories[1] is not None
    assert memories[0].difference(memories[1]) < TOLERANCE[weights]


@pytest.mark.parametrize("weights", WEIGHTS)
def test_a_decoded_memory_is_a_value_like_others(weights: str, tokens: Tokens) -> None:
    """Its layers are read out of the decoder's buffer when they are asked for, in float32 whatever the weights."""
    engine, text = Engine(make("rec-fixed-skip"), weights), tokens(2, 60)
    _, memory = engine.prefill(text[:, :20])
    for i in range(20, 50):
        _, memory = engine.decode(text[:, i], memory)
    assert memory.dtype == torch.float32
    assert len(memory.layers) == engine.config.num_layers
    assert [layer.state is None for layer in memory.layers[:2]] == [True, False]
    assert memory.layers[-1].keys.shape == (2, 4, engine.config.window, 12)
    assert memory.layers[1].keys.shape[2] == 2 * engine.config.window
    kept = copy.deepcopy(memory)
    assert kept.layers[0].keys.untyped_storage().nbytes() == kept.layers[0].keys.nbytes  # nothing around it
    wanted, after = engine.decode(text[:, 50], memory)
    engine.decode(text[:, 51], memory)
    assert kept.equals(memory)
    logits, again = engine.decode(text[:, 50], kept)
    assert torch.equal(logits, wanted)
    assert again.equals(after)


@pytest.mark.skipif(cpp.LIBRARY is None, reason="the kernels are not built for this machine")
@pytest.mark.parametrize("size", [0, 1e-20, 1e-3, 1e6])
@pytest.mark.parametrize("weights", ["float32", "bfloat16"])
def test_caches_hold_values_of_any_size(size: float, weights: str, build: str, tokens: Tokens) -> None:
    """In as many bits as promised, of an entry's largest number; and what was rounded once is not rounded again."""
    model = make("slide")
    model.layers[0].to_values.weight.data *= size
    engine, text = Engine(model, weights), tokens(2, 40)
    _, before = engine.prefill(text[:, :20])
    _, memory = engine.decode(text[:, 20], before)
    exact, held = before.layers[0].values[:, :, 1:], memory.layers[0].values[:, :, :-1]
    bits = 23 if weights == "float32" else 15
    assert ((held - exact).abs() <= exact.abs().amax(-1, keepdim=True) * 2.0**-bits).all()
    # By way of numbers in float32, as a memory file has them.
    loaded = DocumentMemory(tuple(memory.layers), memory.tokens_read, memory.config, fingerprint=memory.fingerprint)
    for i in range(21, 40):
        wanted, memory = engine.decode(text[:, i], memory)
        logits, loaded = engine.decode(text[:, i], loaded)
        assert torch.equal(logits, wanted)
    assert memory.equals(loaded)


@pytest.mark.skipif(cpp.LIBRARY is None, reason="the kernels are not built for this machine")
@pytest.mark.parametrize("read", [0, 3, 12])
def test_entries_before_the_beginning_count_if_they_are_not_zero(read: int, tokens: Tokens) -> None:
    """Zeros there are not read, but a memory that was made by hand may have others."""
    model = make("rec-fixed-skip", **ODD)
    engine, text = Engine(model), tokens(2, read + 3)
    memory = engine.prefill(text[:, :read])[1] if read else engine.empty(2)
    for layer in memory.layers:
        layer.keys[1, 0, 1] = layer.values[1, 1, 2] = 1
    after = memory
    for index in range(read, read + 3):
        wanted, _ = expected(model, text[:, read : index + 1], memory)
        got, after = engine.decode(text[:, index], after)
        assert torch.allclose(got, wanted[:, -1], atol=TOLERANCE["float32"])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_numbers_that_are_none_are_not_hidden(bad: float, tokens: Tokens) -> None:
    engine, text = Engine(make("slide")), tokens(1, 20)
    _, memory = engine.prefill(text)
    memory.layers[0].values[0, 0, -1, 3] = bad
    assert not engine.decode([1], memory)[0].isfinite().all()


@pytest.mark.parametrize("system", ["slide", "rec-lstm-dual", "feedback-fixed-skip", "memorizing"])
def test_products_in_bfloat16_and_states_in_float32(system: str, tokens: Tokens, tmp_path: Path) -> None:
    model, text = make(system), tokens(2, 60)
    plain, engine = Engine(model), Engine(model, dtype=torch.bfloat16)
    wanted, _ = plain.prefill(text[:, :50])
    logits, memory = engine.prefill(text[:, :50])
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, wanted, atol=0.1, rtol=0.1)
    for i in range(50, 60):
        logits, memory = engine.decode(text[:, i], memory)
    for layer in memory.layers:
        assert layer.keys.dtype == layer.values.dtype == torch.bfloat16
        assert layer.state is None or layer.state.dtype == torch.float32
    memory.save(tmp_path / "m")
    loaded = DocumentMemory.load(tmp_path / "m")
    assert loaded.difference(memory) == 0
    assert torch.equal(engine.decode([1, 2], loaded)[0], engine.decode([1, 2], memory)[0])
    assert plain.decode([1, 2], loaded.to(dtype=torch.float32))[0].isfinite().all()


def test_the_engine_has_weights_of_its_own(tokens: Tokens) -> None:
    model, text = make("rec-fixed-skip"), tokens(1, 20)
    engine = Engine(model)
    before, memory = engine.prefill(text)
    assert engine.fingerprint() == model.fingerprint()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    assert torch.equal(engine.prefill(text)[0], before)
    assert engine.fingerprint() != model.fingerprint()
    engine.refresh()
    assert engine.fingerprint() == model.fingerprint()
    torch.testing.assert_close(engine.prefill(text)[0], expected(model, text)[0][:, -1])
    with pytest.raises(MemoryMismatchError, match="belongs to another model"):
        engine.decode([1], memory)


def test_what_an_engine_can_not_be_made_of(tokens: Tokens) -> None:
    model: Any = make("slide")
    for given, options, said in (
        ("runs/first", {}, "the model is a str: it must be a BlockRecurrentLM"),
        (model, {"dtype": "bfloat16"}, "dtype is 'bfloat16': it must be one of torch.float32"),
        (model, {"weights": "int4"}, r"weights is 'int4': .* \(did you mean 'int8'\?\)"),
    ):
        with pytest.raises(BlockRecurrentError, match=said):
            Engine(given, **options)
    with pytest.raises(InputError, match="memories of one lane each"):
        Engine(model).decode_many([1], [None])  # type: ignore[list-item]


def test_weights_are_hashed_once(tokens: Tokens, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in every call that is given a memory: hashing 160M weights takes longer than most calls."""
    engine, text = Engine(make("rec-fixed-skip"), dtype=torch.bfloat16), tokens(1, 20)
    engine.fingerprint()
    monkeypatch.setattr(BlockRecurrentLM, "fingerprint", lambda model: pytest.fail("the weights are hashed again"))
    _, memory = engine.prefill(text)
    _, memory = engine.prefill(text, memory)
    _, memory = engine.decode([1], memory)
    assert engine.score(text, text, memory).memory.fingerprint == engine.fingerprint()


@pytest.mark.parametrize("weights", ["bfloat16", "int8"])
@pytest.mark.parametrize("system", ["rec-lstm-dual", "feedback-fixed-skip", "memorizing"])
def test_packed_weights_change_the_loss_little(system: str, weights: str, tokens: Tokens) -> None:
    model, text = make(system), tokens(2, 400)
    rows, targets = text[:, :-1], text[:, 1:]
    exact, engine = Engine(model).score(rows, targets).nats, Engine(model, weights=weights)
    scored = engine.score(rows, targets)
    assert np.mean(np.abs(np.concatenate(scored.nats) - np.concatenate(exact))) > 0
    assert abs(np.concatenate(scored.nats).mean() - np.concatenate(exact).mean()) < 0.01 * np.log(2)
    # One function in prefill and in decoding.
    memory, losses = None, []
    for i in range(40):
        logits, memory = engine.decode(text[:, i], memory)
        losses.append(-logits.log_softmax(-1).gather(1, text[:, i + 1, None])[:, 0].numpy())
    np.testing.assert_allclose(np.stack(losses, 1), np.stack(scored.nats)[:, :40], atol=TOLERANCE[weights])
    assert engine.fingerprint() not in (model.fingerprint(), Engine(model).fingerprint())


def test_threads_do_not_disturb_each_other(tokens: Tokens) -> None:
    engine = Engine(make("rec-fixed-skip"))
    text = tokens(8, 60)
    _, start = engine.prefill(text[:1, :10])

    def work(lane: int) -> tuple[Tensor, DocumentMemory]:
        memory, row = start, text[lane]
        for i in range(10, 40):
            logits, memory = engine.decode(row[i : i + 1], memory)
        _, memory = engine.prefill(row[None, 40:50], memory)
        engine.score(row[None, 50:59], row[None, 51:60], memory)
        logits, many = engine.decode_many([int(row[50])] * 2, [memory, memory])
        return logits, many[1]

    alone = [work(lane) for lane in range(8)]
    together: list[tuple[Tensor, DocumentMemory] | None] = [None] * 8

    def run(lane: int) -> None:
        together[lane] = work(lane)

    threads = [threading.Thread(target=run, args=(lane,)) for lane in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for first, second in zip(alone, together, strict=True):
        assert second is not None
        assert torch.equal(first[0], second[0])
        assert first[1].equals(second[1])


@pytest.mark.parametrize("call", ["decode", "decode_many"])
def test_a_refresh_meanwhile_refuses_no_memory(call: str, tokens: Tokens, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call computes with the weights that the engine had when it began, even if another thread changes them."""
    engine, column = Engine(make("rec-fixed-skip")), engine_module._column
    _, memory = engine.prefill(tokens(1, 20))
    before = engine.fingerprint()

    def refresh_and_go_on(*given: Any) -> Tensor:
        engine.model.embedding.weight.data *= 1.1
        engine.refresh()
        return column(*given)

    monkeypatch.setattr(engine_module, "_column", refresh_and_go_on)
    _, after = engine.decode([1], memory) if call == "decode" else engine.decode_many([1], [memory])
    assert (after[0] if isinstance(after, list) else after).fingerprint == before
    assert engine.fingerprint() != before


def test_weights_of_several_types_are_refused() -> None:
    model = make("slide")
    model.layers[0].double()
    with pytest.raises(ConfigError, match=r"weights are float32 on cpu, float64 on cpu: .*model\.to"):
        Engine(model)


def test_a_memory_of_wrong_shapes_is_refused(tokens: Tokens) -> None:
    engine = Engine(make("rec-fixed-skip"))
    _, memory = engine.prefill(tokens(1, 20))
    for name, field in {"a cache": "values", "a state": "state"}.items():
        layer = memory.layers[1]
        bad = replace(layer, **{field: getattr(layer, field)[..., 1:, :]})
        layers = (memory.layers[0], bad, *memory.layers[2:])
        with pytest.raises(InputError, match=f"{name} of the memory has shape"):
            engine.decode([1], replace(memory, layers=layers))


def test_bad_input_is_refused_as_the_model_does(tokens: Tokens) -> None:
    model = make("rec-fixed-skip")
    engine = Engine(model)
    _, memory = engine.decode([1, 2])
    for bad, message in {VOCAB: "tokens must be from 0", -1: "tokens must be from 0"}.items():
        for give in (memory, None):
            with pytest.raises(InputError, match=message):
                engine.decode([0, bad], give)
        with pytest.raises(InputError, match=message):
            engine.prefill([[0, bad]])
    with pytest.raises(MemoryMismatchError, match="has 2 lanes, tokens has 3"):
        engine.decode([1, 2, 3], memory)
    with pytest.raises(InputError, match="one token per lane"):
        engine.decode(tokens(2, 2), memory)
    with pytest.raises(InputError, match="integer type"):
        engine.decode(torch.zeros(2), memory)
    with pytest.raises(InputError, match="a lane has no tokens"):
        engine.prefill([[1], []])
    with pytest.raises(InputError, match="2 tokens for 1 memories"):
        engine.decode_many([1, 2], [memory])
    with pytest.raises(InputError, match="one lane"):
        engine.decode_many([1], [memory])
    with pytest.raises(MemoryMismatchError, match="another shape"):
        Engine(make("slide")).decode([1, 2], memory)
    other = make("rec-fixed-skip")
    other.embedding.weight.data += 1
    with pytest.raises(MemoryMismatchError, match="belongs to another model"):
        Engine(other).decode([1, 2], memory)
    with pytest.raises(MemoryMismatchError, match="must be a DocumentMemory"):
        engine.decode([1], "memory")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="did you mean 'bfloat16'"):
        Engine(model, weights="bfloat")
    assert issubclass(InputError, BlockRecurrentError)


@pytest.mark.parametrize("fields", [{}, ODD], ids=["even", "odd"])
@pytest.mark.parametrize("weights", WEIGHTS)
def test_a_lane_has_the_same_bits_in_any_crowd(
    make_reader: Callable[..., BlockRecurrentLM], weights: str, fields: dict[str, int], build: str
) -> None:
    """What `brt serve` promises: the same text, alone or with others, at any position, across block ends."""
    engine = Engine(make_reader(**fields), weights)
    if engine._now[1] is None:
        pytest.skip("the decode kernel is missing")
    lanes = 9
    start = [engine.prefill([list(range(1, 4 + 5 * lane))])[1] for lane in range(lanes)]
    alone, crowd = list(start), list(start)
    for step in range(2 * engine.config.window + 1):
        count = 1 + step * 4 % lanes
        tokens = [(7 * step + lane) % 256 for lane in range(count)]
        logits, crowd[:count] = engine.decode_many(tokens, crowd[:count])
        for lane in range(count):
            one, (alone[lane],) = engine.decode_many(tokens[lane : lane + 1], alone[lane : lane + 1])
            assert torch.equal(one[0], logits[lane]), f"{count} lanes, step {step}"
    assert all(a.equals(b) for a, b in zip(alone, crowd, strict=True))


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="a system without huge pages")
@pytest.mark.parametrize("weights", WEIGHTS)
def test_weights_are_side_by_side_in_huge_pages(weights: str) -> None:
    snapshot = Engine(make("rec-fixed-skip"), weights).snapshot
    matrices = [packed.weight for layer in snapshot.layers for packed in layer] + [snapshot.table.weight]
    starts = [x.data_ptr() for x in matrices]
    for x, start, following in zip(matrices, starts, starts[1:], strict=False):
        assert start % 64 == 0
        assert 0 <= following - (start + x.nbytes) < 64
    if weights == "float32":
        assert snapshot.model.embedding.weight.data_ptr() == starts[-1], "not twice in memory"
    mappings = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.M)
    for mapping in mappings[1:]:
        begin, end = (int(x, 16) for x in mapping.split()[0].split("-"))
        if begin <= starts[0] < end:
            assert "hg" in mapping[mapping.index("VmFlags:") :].split()
            return
    pytest.fail("the weights are in no mapping")
