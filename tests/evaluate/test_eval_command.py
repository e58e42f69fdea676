"""`brt eval`: what it prints and writes, and what it refuses."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from block_recurrent import BlockRecurrentLM
from block_recurrent.cli.main import main
from block_recurrent.data import Corpus

TEXTS = {"one.txt": "It was the best of times. " * 9, "two.txt": "It was the worst of times, été\n" * 3, "x.txt": "y"}


@pytest.fixture
def corpus(make_corpus: Callable[..., Corpus]) -> Corpus:
    return make_corpus(TEXTS)


@pytest.fixture
def run(make_run: Callable[..., Path], make_reader: Callable[..., BlockRecurrentLM]) -> Path:
    return make_run(make_reader())


def evaluate(run: Path, corpus: Corpus, tmp_path: Path, *flags: str) -> dict:
    out = tmp_path / "scores.json"
    assert main(["eval", str(run), "--data", str(corpus.folder), "--json", str(out), "--overwrite", *flags]) == 0
    return json.loads(out.read_text())


def test_numbers_and_definitions(run: Path, corpus: Corpus, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scores = evaluate(run, corpus, tmp_path)
    split = corpus.manifest["splits"]["test"]
    for count in ("tokens", "bytes", "words"):
        assert scores[count] == split[count] == sum(document[count] for document in scores["documents"])
    assert [document["name"] for document in scores["documents"]] == ["test/one.txt", "test/two.txt", "test/x.txt"]
    bits = sum(document["bits_per_token"] * document["tokens"] for document in scores["documents"])
    assert scores["bits_per_token"] == pytest.approx(bits / scores["tokens"])
    assert scores["word_perplexity"] == pytest.approx(2 ** (bits / scores["words"]))
    low, high = scores["intervals_95"]["bits_per_token"]
    assert low <= scores["bits_per_token"] <= high
    printed = capsys.readouterr().out
    for shown in ("sum of -log2 p(token) / tokens", "UTF-8 bytes", "2^(", "scale factor", "95% bootstrap", "two.txt"):
        assert shown in printed
    assert f"{scores['bits_per_token']:.4f}" in printed


@pytest.mark.parametrize("flags", [("--lanes", "1"), ("--chunk", "16"), ("--lanes", "2", "--chunk", "21")])
def test_lanes_and_chunks_change_no_score(run: Path, corpus: Corpus, tmp_path: Path, flags: tuple[str, ...]) -> None:
    one, other = evaluate(run, corpus, tmp_path), evaluate(run, corpus, tmp_path, *flags)
    for key in ("bits_per_token", "bits_per_byte"):
        assert one[key] == pytest.approx(other[key], abs=1e-5)
        for mine, theirs in zip(one["documents"], other["documents"], strict=True):
            assert mine[key] == pytest.approx(theirs[key], abs=1e-5)
    assert one["cumulative"]["bits_per_token"] == pytest.approx(other["cumulative"]["bits_per_token"], abs=1e-5)


def test_per_token_files_hold_every_token(run: Path, corpus: Corpus, tmp_path: Path) -> None:
    scores = evaluate(run, corpus, tmp_path, "--per-token", str(tmp_path / "losses.npz"))
    arrays = np.load(tmp_path / "losses.npz")
    assert arrays["names"].tolist() == ["test/one.txt", "test/two.txt", "test/x.txt"]
    assert len(arrays["bits"]) == len(arrays["tokens"]) == scores["tokens"]
    assert bytes(arrays["tokens"].astype(np.uint8)) == "".join(TEXTS.values()).encode()
    for number, document in enumerate(scores["documents"]):
        bits = arrays["bits"][arrays["offsets"][number] : arrays["offsets"][number + 1]]
        assert len(bits) == document["tokens"]
        assert bits.mean() == pytest.approx(document["bits_per_token"], rel=1e-5)
    evaluate(run, corpus, tmp_path, "--per-token", str(tmp_path / "losses.csv"))
    with open(tmp_path / "losses.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["bits"]) for row in rows] == pytest.approx(arrays["bits"].tolist(), abs=1e-5)
    assert rows[-1] | {"bits": ""} == {"document": "test/x.txt", "index": "0", "token": str(ord("y")), "bits": ""}
    assert sorted(p.name for p in tmp_path.iterdir() if p.name.startswith(".")) == [], "nothing is left behind"


def test_clearing_the_state(run: Path, corpus: Corpus, tmp_path: Path) -> None:
    normal, cleared = evaluate(run, corpus, tmp_path), evaluate(run, corpus, tmp_path, "--clear-every", "16")
    assert normal["clear_every"] is None
    assert cleared["clear_every"] == 16
    assert abs(normal["bits_per_token"] - cleared["bits_per_token"]) > 1e-5
    assert normal["documents"][2]["bits"] == pytest.approx(cleared["documents"][2]["bits"]), "it has one token"


def test_several_runs_make_a_table(
    run: Path,
    corpus: Corpus,
    tmp_path: Path,
    make_run: Callable[..., Path],
    make_reader: Callable[..., BlockRecurrentLM],
    capsys: pytest.CaptureFixture[str],
) -> None:
    other = make_run(make_reader("slide-plus", seed=1), "other", "slide-plus")
    out = tmp_path / "both.json"
    assert main(["eval", str(run), str(other), "--data", str(corpus.folder), "--json", str(out)]) == 0
    both = json.loads(out.read_text())
    assert [row["run"] for row in both["table"]] == [str(run), str(other)]
    assert {row["vocabulary_size"] for row in both["table"]} == {256}
    assert [r["bits_per_token"] for r in both["runs"]] == [row["bits_per_token"] for row in both["table"]]
    assert "word ppl" in capsys.readouterr().out.splitlines()[-3]


def test_a_document_of_its_own(run: Path, corpus: Corpus, tmp_path: Path) -> None:
    scores = evaluate(run, corpus, tmp_path, "--document", "test/two.txt")
    assert [document["name"] for document in scores["documents"]] == ["test/two.txt"]
    assert scores["intervals_95"]["bits_per_token"] is None


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--split", "validation"], "split 'validation' has no documents"),
        (["--split", "tset"], "did you mean 'test'"),
        (["--clear-every", "17"], "multiple of the model's window 16"),
        (["--per-token", "losses.parquet"], "must end in .npz"),
        (["--per-token", "no/such/folder/losses.csv"], "there is no folder"),
        (["--json", "no/such/folder/scores.json"], "there is no folder"),
        (["--document", "test/thre.txt"], "did you mean"),
        (["--lanes", "0"], "must be at least 1"),
        (["--words", "pg19"], "whole test split"),
    ],
)
def test_refusals_are_one_line(
    run: Path, corpus: Corpus, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    assert main(["eval", str(run), "--data", str(corpus.folder), *flags]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


def test_another_tokenizer_is_refused(
    make_run: Callable[..., Path],
    make_reader: Callable[..., BlockRecurrentLM],
    corpus: Corpus,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from block_recurrent.evaluate.evaluation import check_tokenizer

    check_tokenizer(corpus.tokenizer.sha256, corpus, "run")
    with pytest.raises(ValueError, match="another tokenizer"):
        check_tokenizer("0" * 64, corpus, "run")


def test_the_table_of_vocabularies(
    run: Path,
    corpus: Corpus,
    tmp_path: Path,
    make_corpus: Callable[..., Corpus],
    make_reader: Callable[..., BlockRecurrentLM],
) -> None:
    """The same documents in two vocabularies: other tokens, the same bytes and words, one row each."""
    import sentencepiece

    from block_recurrent.data import load_tokenizer
    from block_recurrent.run_config import RunConfig

    from ..run_folders import save_run

    (tmp_path / "text.txt").write_text("\n".join(TEXTS.values()) * 9, encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "text.txt"), model_prefix=str(tmp_path / "v"), vocab_size=31, minloglevel=2
    )
    pieces = make_corpus(TEXTS, name="pieces", tokenizer=str(tmp_path / "v.model"))
    tokenizer = load_tokenizer(tmp_path / "v.model")
    model = make_reader(vocab_size=tokenizer.vocab_size)
    save_run(tmp_path / "bpe", RunConfig("rec-fixed-skip", "micro", model.config), model, tokenizer, 1)
    out = tmp_path / "both.json"
    folders = [str(corpus.folder), str(pieces.folder)]
    assert main(["eval", str(run), str(tmp_path / "bpe"), "--data", *folders, "--json", str(out)]) == 0
    one, other = json.loads(out.read_text())["table"]
    assert (one["vocabulary_size"], other["vocabulary_size"]) == (256, tokenizer.size)
    assert one["tokens"] > other["tokens"] == sum(d.tokens for d in pieces.documents("test"))
    for row, folder in ((one, corpus), (other, pieces)):
        words = folder.manifest["splits"]["test"]["words"]
        assert row["tokens_per_word"] == pytest.approx(row["tokens"] / words)
        assert row["word_perplexity"] == pytest.approx(2 ** (row["bits_per_token"] * row["tokens"] / words))
