"""lm-evaluation-harness, for real: its numbers are those of `brt eval`, and of the model itself."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model

from block_recurrent import Session
from block_recurrent.cli.main import main
from block_recurrent.data import Tokenizer, load_tokenizer
from block_recurrent.data.corpus.prepare import PrepareSettings, prepare
from block_recurrent.errors import DataError, InputError
from block_recurrent.hub.harness import BlockRecurrentHarness, evaluate

BOOKS = {
    "a.txt": "The sea {{was}} calm.\r\n  And the captain slept, naïve and {% old %}. " * 30,
    "b.txt": "x",
    "c.txt": "\n\nShort book: 日本 🐳\n",
}


@pytest.fixture
def books(tmp_path: Path) -> Path:
    folder = tmp_path / "books"
    (folder / "test").mkdir(parents=True)
    for name, text in BOOKS.items():
        (folder / "test" / name).write_bytes(text.encode())
    (folder / "test" / "latin.txt").write_bytes("Déjà vu: not UTF-8.\n".encode("latin1"))
    return folder


def requests_of(*arguments: tuple) -> list[Instance]:
    return [
        Instance(request_type="loglikelihood_rolling", doc={}, arguments=one, idx=index)
        for index, one in enumerate(arguments)
    ]


@pytest.mark.parametrize("system", ["rec-fixed-skip", "rec-lstm-dual", "memorizing", "feedback-lstm-single", "xl"])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_rolling_log_likelihood_carries_the_memory(
    system: str, batch_size: int, make_reader: Callable, byte_tokenizer: Tokenizer
) -> None:
    model = make_reader(system)
    lm = BlockRecurrentHarness(model=model, tokenizer=byte_tokenizer, batch_size=batch_size)
    found = lm.loglikelihood_rolling(requests_of(*((text,) for text in (*BOOKS.values(), ""))))
    for log_prob, text in zip(found, (*BOOKS.values(), ""), strict=True):
        tokens = byte_tokenizer.encode(text).tolist()
        expected = 0.0
        if tokens:
            inputs = torch.tensor([[byte_tokenizer.eos_token_id, *tokens[:-1]]])
            with torch.no_grad():
                expected = -model.loss(inputs, torch.tensor([tokens])).per_token.double().sum().item()
        assert log_prob == pytest.approx(expected, rel=1e-5, abs=1e-9)


@pytest.mark.parametrize("vocabulary", ["byte_tokenizer", "subwords"])
def test_their_number_is_that_of_brt_eval(
    vocabulary: str,
    make_reader: Callable,
    make_run: Callable,
    request: pytest.FixtureRequest,
    books: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(vocabulary)
    run = make_run(make_reader(vocab_size=tokenizer.vocab_size), tokenizer)
    prepare(PrepareSettings((str(books),)), tokenizer, tmp_path / "prepared")
    arguments = ["--data", str(tmp_path / "prepared"), "--split", "test", "--json", str(tmp_path / "scores.json")]
    assert main(["eval", str(run), *arguments]) == 0
    ours = json.loads((tmp_path / "scores.json").read_text())
    capsys.readouterr()
    assert main(["harness", str(run), "--books", str(books), "--batch-size", "2"]) == 0
    theirs = json.loads(capsys.readouterr().out)["books"]
    assert theirs["bits_per_byte,none"] == pytest.approx(ours["bits_per_byte"], rel=1e-5)
    # Of an untrained model it is a huge number; its logarithm is what can be compared.
    assert math.log2(theirs["word_perplexity,none"]) == pytest.approx(math.log2(ours["word_perplexity"]), rel=1e-5)
    assert theirs["sample_len"] == 4, "invalid bytes are replaced, by both"


def test_it_is_one_of_their_models(make_reader: Callable, make_run: Callable) -> None:
    assert get_model("block-recurrent") is BlockRecurrentHarness
    run = make_run(make_reader())
    lm = get_model("block-recurrent").create_from_arg_string(f"run={run}", {"batch_size": 4, "device": "cpu"})
    assert lm.batch_size == 4
    with pytest.raises(InputError, match="give run=FOLDER"):
        BlockRecurrentHarness()


def test_continuations_are_scored_after_their_context(make_reader: Callable, byte_tokenizer: Tokenizer) -> None:
    model = make_reader("rec-lstm-single")
    lm = BlockRecurrentHarness(model=model, tokenizer=byte_tokenizer)
    session = Session(model, byte_tokenizer)
    session.read("The captain")
    greedy = session.fork().write_all(1, temperature=0, end_at_mark=False)
    likely = bytes(greedy.tokens).decode("latin1")
    pairs = [("The captain", " slept"), ("", "alone"), ("The captain", likely)]
    (first, is_greedy), (alone, _), (_, best) = lm.loglikelihood(requests_of(*pairs), disable_tqdm=True)
    assert first == pytest.approx(-session.loss_of(" slept") * math.log(2), rel=1e-4)
    assert alone == pytest.approx(-Session(model, byte_tokenizer).loss_of("alone") * math.log(2), rel=1e-4)
    assert not is_greedy
    assert best or len(likely.encode()) > 1


def test_generation_stops_where_the_task_says(make_reader: Callable, byte_tokenizer: Tokenizer) -> None:
    model = make_reader()
    lm = BlockRecurrentHarness(model=model, tokenizer=byte_tokenizer)
    session = Session(model, byte_tokenizer)
    session.read("Hello")
    expected = session.write_all(8, temperature=0)
    greedy = {"until": [], "max_gen_toks": 8}
    sampled = {"until": ["e"], "max_gen_toks": 50, "do_sample": True, "temperature": 1.0}
    texts = lm.generate_until(requests_of(("Hello", greedy), ("Hello", sampled)))
    assert texts[0] == expected.text, "with U+FFFD where the bytes are no UTF-8"
    assert "e" not in texts[1]


def test_mistakes_are_said(make_reader: Callable, make_run: Callable, tmp_path: Path, capsys) -> None:  # type: ignore[no-untyped-def]
    run = make_run(make_reader())
    for arguments, why in (
        ([run], "nothing to do"),
        ([run, "--books", tmp_path / "none"], "does not exist"),
        ([run, "--books", tmp_path, "--limit", "0"], "must be at least 1"),
        ([tmp_path / "none", "--books", tmp_path], "is not a run"),
        ([run, "--tasks", "lambada_openia"], "did you mean 'lambada_openai'?"),
    ):
        assert main(["harness", *map(str, arguments)]) == 2
        error = capsys.readouterr().err
        assert why in error
        assert error.count("\n") == 1
    lm = BlockRecurrentHarness(str(run))
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="has no text to score"):
        evaluate(lm, tmp_path / "empty")
    with pytest.raises(DataError, match="does not exist"):
        evaluate(lm, tmp_path / "nowhere")
    assert load_tokenizer("bytes").eos_token_id == lm.eot_token_id
