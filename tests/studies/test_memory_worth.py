"""What a memory is worth: the three ways of reading are what they say, and the words shown are those remembered."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from block_recurrent import BlockRecurrentLM, Engine, Session, preset
from block_recurrent.data import load_tokenizer
from block_recurrent.errors import DataError
from block_recurrent.evaluate.scoring import bits_of
from block_recurrent.studies.memory_worth import (
    CLEARED,
    MEMORY,
    NOTHING,
    Reading,
    read_document,
    remembered_words,
    session_at,
    three_ways,
)
from tests.made_text import make_text

TOKENIZER = load_tokenizer("bytes")
TEXT = make_text(random.Random(3))[:700]
TOKENS = TOKENIZER.encode(TEXT).astype(np.int64)


@pytest.fixture(scope="module")
def model() -> BlockRecurrentLM:
    torch.manual_seed(0)
    model = BlockRecurrentLM(preset("rec-fixed-skip", "micro", vocab_size=257)).eval()
    for p in model.parameters():  # a new model's state does little
        p.data += 0.1 * torch.randn_like(p)
    return model


@pytest.fixture(scope="module")
def reading(model: BlockRecurrentLM) -> Reading:
    return read_document(Engine(model), TOKENS)


def losses(model: BlockRecurrentLM, start: int, end: int, memory: object) -> np.ndarray:
    fed = np.concatenate([[256], TOKENS])[start:end]
    rows = (torch.from_numpy(fed)[None], torch.from_numpy(TOKENS[start:end])[None])
    with torch.no_grad():
        return model.loss(*rows, memory).per_token[0].numpy() / math.log(2)


def test_with_memory_is_the_scorers_own_number(model: BlockRecurrentLM, reading: Reading) -> None:
    assert reading.half == 700 // 2 // 64 * 64
    np.testing.assert_allclose(reading.bits, bits_of(model, [TOKENS])[0], atol=1e-5)
    assert {size for _, size in reading.sizes} == {reading.at_end.nbytes}, "the memory never grows"


def test_the_three_ways_are_what_they_say(model: BlockRecurrentLM, reading: Reading) -> None:
    ways = three_ways(Engine(model), reading)
    assert list(ways) == [MEMORY, CLEARED, NOTHING]
    assert {len(bits) for bits in ways.values()} == {700 - reading.half}
    half, memory = reading.half, reading.at_half
    window = losses(model, half, half + 16, None)  # a fresh memory, and the token before
    np.testing.assert_allclose(ways[NOTHING][:16], window, atol=1e-5)
    np.testing.assert_allclose(ways[NOTHING][32:48], losses(model, half + 32, half + 48, None), atol=1e-5)
    initial = model.layers[1].cell.initial_state.detach()[None]
    layers = [replace(x, state=initial) if x.state is not None else x for x in memory.layers]
    cleared = losses(model, half, half + 64, replace(memory, layers=tuple(layers)))
    np.testing.assert_allclose(ways[CLEARED][:64], cleared, atol=1e-5)
    assert not np.allclose(ways[MEMORY], ways[CLEARED])


def test_a_sliding_model_has_no_state_to_clear() -> None:
    engine = Engine(BlockRecurrentLM(preset("slide", "micro", vocab_size=257)))
    assert list(three_ways(engine, read_document(engine, TOKENS))) == [MEMORY, NOTHING]


def test_a_session_stands_where_the_reading_stood(model: BlockRecurrentLM, reading: Reading) -> None:
    engine = Engine(model)
    for place in (reading.half, 700):
        plain = Session(engine, TOKENIZER)
        plain.read(TEXT[:place])
        session = session_at(engine, TOKENIZER, reading, place, "x")
        assert session.position == plain.position == place
        assert session.loss_of("and so on") == pytest.approx(plain.loss_of("and so on"), abs=1e-3)
        assert session.state.text.hexdigest() == plain.state.text.update(plain.state.held).hexdigest()


def test_the_words_shown_are_those_the_memory_made_likely(reading: Reading) -> None:
    text = "Gandalf spoke. " + "x" * 120 + " Then Bilbo ran and Gandalf sat. " + "y" * 60
    tokens = TOKENIZER.encode(text).astype(np.int64)
    mine = replace(reading, tokens=tokens, half=64)
    flat = np.full(len(tokens) - 64, 3.0)
    place = text.rindex("Gandalf") - 64
    with_memory, without = flat.copy(), flat.copy()
    with_memory[place], without[place] = 0.5, 9.0
    without[text.index("Bilbo") - 64] = 20.0  # a word never said before is not remembered
    (word,) = remembered_words(mine, {MEMORY: with_memory, CLEARED: without, NOTHING: without}, TOKENIZER, window=16)
    assert (word.word, word.distance) == ("Gandalf", text.rindex("Gandalf"))
    assert word.chance == pytest.approx(2**-0.5)
    assert word.chance_cleared == pytest.approx(2**-9)
    assert "Gandalf spoke" in word.earlier


def test_a_text_must_have_two_halves(model: BlockRecurrentLM) -> None:
    with pytest.raises(DataError, match="it must have at least two segments, 128"):
        read_document(Engine(model), TOKENS[:100])
