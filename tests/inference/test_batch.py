"""Batches and beams: each sequence gets what it would get alone; beam search is that of transformers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from block_recurrent import BlockRecurrentLM, Session
from block_recurrent.data import Tokenizer
from block_recurrent.errors import ConfigError, InputError
from block_recurrent.inference.batch import read_together, write_batch, write_together

PROMPTS = ["It was the best of times", "", "x", "Call me Ishmael. " * 7, "日本"]


@pytest.mark.parametrize("system", ["rec-fixed-skip", "rec-lstm-dual", "feedback-fixed-skip", "memorizing", "xl-2w"])
@pytest.mark.parametrize("options", [{"temperature": 0, "repetition_penalty": 8.0}, {"seed": 5, "top_p": 0.9}])
def test_a_batch_gives_each_what_it_gets_alone(
    system: str, options: dict, make_reader: Callable[..., BlockRecurrentLM], byte_tokenizer: Tokenizer
) -> None:
    model = make_reader(system)
    together = write_batch(model, byte_tokenizer, PROMPTS, 40, **options)
    for prompt, written in zip(PROMPTS, together, strict=True):
        alone = Session(model, byte_tokenizer)
        alone.read(prompt)
        expected = alone.write_all(40, **options)
        assert written.tokens == expected.tokens
        assert written.text == expected.text == "".join(_again(model, byte_tokenizer, prompt, options))
        assert written.log_probs == pytest.approx(expected.log_probs, abs=1e-4)


def _again(model: BlockRecurrentLM, tokenizer: Tokenizer, prompt: str, options: dict) -> list[str]:
    session = Session(model, tokenizer)
    session.read(prompt)
    return list(session.write(40, **options))


def test_sessions_go_on_from_a_batch(make_reader: Callable, byte_tokenizer: Tokenizer) -> None:
    """Also from different positions, and when some end earlier than others."""
    model = make_reader("rec-lstm-single")
    sessions = [Session(model, byte_tokenizer) for _ in PROMPTS]
    sessions[0].read("a longer beginning than the others have, " * 3)
    copies = [session.fork() for session in sessions]
    read_together(sessions, PROMPTS)
    options = {"temperature": 1.0, "stop": ("e", "\n", "A"), "end_at_mark": False}
    from block_recurrent.inference.sampling import Sampling

    written = write_together(sessions, 60, Sampling.of(**options), seeds=range(5))
    assert len({len(one.tokens) for one in written}) > 2, "they end at different times"
    for index, (copy, prompt) in enumerate(zip(copies, PROMPTS, strict=True)):
        copy.read(prompt)
        assert copy.write_all(60, seed=index, **options).tokens == written[index].tokens
        assert copy.memory.equals(sessions[index].memory, 1e-4)
        assert copy.state.pending == sessions[index].state.pending
        assert copy.state.text == sessions[index].state.text


def test_batches_that_make_no_sense_are_refused(make_reader: Callable, byte_tokenizer: Tokenizer) -> None:
    model = make_reader()
    with pytest.raises(InputError, match="no sessions"):
        write_batch(model, byte_tokenizer, [], 3)
    with pytest.raises(InputError, match="list of strings"):
        write_batch(model, byte_tokenizer, "one text", 3)
    with pytest.raises(ConfigError, match="2 seeds for 1 sessions"):
        write_batch(model, byte_tokenizer, ["a"], 3, seeds=[1, 2])
    with pytest.raises(ConfigError, match="max_tokens is 0"):
        write_batch(model, byte_tokenizer, ["a"], 0)
    session = Session(model, byte_tokenizer)
    with pytest.raises(InputError, match="occurs twice"):
        read_together([session, session], ["a", "b"])
    with pytest.raises(InputError, match="different models"):
        read_together([session, Session(make_reader(seed=1), byte_tokenizer)], ["a", "b"])


@pytest.mark.parametrize("beams", [2, 5])
@pytest.mark.parametrize(
    "options", [{}, {"length_penalty": 0.0}, {"length_penalty": 2.0, "repetition_penalty": 1.5}], ids=str
)
def test_beam_search_is_that_of_transformers(
    beams: int, options: dict, make_reader: Callable, byte_tokenizer: Tokenizer
) -> None:
    from block_recurrent.hub.configuration import BlockRecurrentConfig
    from block_recurrent.hub.modeling import BlockRecurrentForCausalLM

    model = make_reader("rec-fixed-skip", seed=3)
    # A likely mark, so that texts end at different lengths.
    model.embedding.weight.data[byte_tokenizer.eos_token_id] *= 1.4
    theirs = BlockRecurrentForCausalLM(BlockRecurrentConfig(**model.config.to_dict())).eval()
    theirs.model.load_state_dict(model.state_dict())
    for prompt in ("Once upon", "a", "the sea, the sea"):
        session = Session(model, byte_tokenizer)
        session.read(prompt)
        start = session.fork()
        ids = torch.tensor([[byte_tokenizer.eos_token_id, *byte_tokenizer.encode(prompt).tolist()]])
        found = theirs.generate(ids, num_beams=beams, do_sample=False, max_new_tokens=12, **options)
        expected = [token for token in found[0, ids.shape[1] :].tolist() if token != byte_tokenizer.eos_token_id]
        written = session.write_all(12, beams=beams, **options)
        assert list(written.tokens) == expected
        start.read(written.tokens)
        assert start.memory.equals(session.memory, 1e-4)
        assert start.state.pending == session.state.pending


def test_more_beams_find_likelier_texts(make_reader: Callable, byte_tokenizer: Tokenizer) -> None:
    session = Session(make_reader("rec-lstm-dual"), byte_tokenizer)
    session.read("In the beginning")
    wide = [session.fork().write_all(8, beams=n, length_penalty=0.0, end_at_mark=False) for n in (2, 16)]
    greedy = session.fork().write_all(8, temperature=0, end_at_mark=False)
    scores = [sum(one.log_probs) for one in (greedy, *wide)]
    assert scores[0] <= scores[1] + 1e-6
    assert scores[1] <= scores[2] + 1e-6
    assert "".join(session.write(8, beams=2, length_penalty=0.0, end_at_mark=False)) == wide[0].text


def test_beam_search_ends_at_stop_strings(make_reader: Callable, byte_tokenizer: Tokenizer) -> None:
    session = Session(make_reader(), byte_tokenizer)
    session.read("abc")
    free = session.fork().write_all(10, beams=3, repetition_penalty=8.0, end_at_mark=False)
    readable = [character for character in free.text if character != "\ufffd"]
    if not readable:
        pytest.skip("this model's best text has no whole character")
    stopped = session.write_all(10, beams=3, repetition_penalty=8.0, end_at_mark=False, stop=readable[-1])
    assert readable[-1] not in stopped.text
    with pytest.raises(InputError, match="can't yield single tokens"):
        session.write_tokens(5, beams=3)
