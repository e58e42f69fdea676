"""`brt compare` and `brt inspect`: what they write, and what they refuse."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from block_recurrent import BlockRecurrentLM
from block_recurrent.cli.main import main
from block_recurrent.data import Corpus, load_tokenizer
from block_recurrent.run_config import RunConfig

from ..run_folders import save_run

TEXTS = {
    "one.txt": "Alice met Bob. " + "They talked of this and that. " * 12 + "Alice left.</script><b>&amp;",
    "two.txt": "Été: the summer of Zoë. " * 10,
}


@pytest.fixture
def corpus(make_corpus: Callable[..., Corpus]) -> Corpus:
    return make_corpus(TEXTS)


@pytest.fixture
def rec(make_run: Callable[..., Path], make_reader: Callable[..., BlockRecurrentLM]) -> Path:
    return make_run(make_reader(), "rec")


@pytest.fixture
def slide(make_run: Callable[..., Path], make_reader: Callable[..., BlockRecurrentLM]) -> Path:
    return make_run(make_reader("slide-plus", seed=1), "slide", "slide-plus")


def compare(corpus: Corpus, out: Path, *arguments: object) -> dict:
    flags = ["--data", str(corpus.folder), "--out", str(out), "--no-png"]
    assert main(["compare", *map(str, arguments), *flags]) == 0
    assert (out / "report.html").is_file()
    return json.loads((out / "report.json").read_text())


def test_two_runs(rec: Path, slide: Path, corpus: Corpus, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = compare(corpus, tmp_path / "report", rec, slide, "--top", 5)
    assert (report["a"]["label"], report["b"]["label"]) == ("rec-fixed-skip", "slide-plus")
    assert len(report["top_a"]) == len(report["top_b"]) == 5
    gains = [top["difference"] for top in report["top_a"]]
    assert gains == sorted(gains, reverse=True)
    for top in report["top_a"] + report["top_b"]:
        assert top["difference"] == pytest.approx(top["bits_b"] - top["bits_a"], abs=1e-5)
        text = TEXTS[top["document"].removeprefix("test/")].encode()
        assert top["before"].encode() in text
        assert top["where"] in ("window", "segment", "beyond", "never")
    tokens = sum(len(text.encode()) for text in TEXTS.values())
    assert report["a"]["tokens"] == report["b"]["tokens"] == tokens
    assert report["difference"]["bits_per_token"] == pytest.approx(
        report["b"]["bits_per_token"] - report["a"]["bits_per_token"]
    )
    assert report["a"]["config"]["model.num_layers"] == 3
    printed = capsys.readouterr().out
    assert "|" in printed
    assert printed.index("token, bits rec-fixed-skip, bits slide-plus") < printed.index("is better (")
    left = [report["headroom"][side]["bands"][-1]["bigram"] for side in "ab"]
    assert f"rec-fixed-skip {left[0]:.4f}, slide-plus {left[1]:.4f}" in printed
    scores = tmp_path / "scores.json"
    assert main(["eval", str(slide), "--data", str(corpus.folder), "--json", str(scores)]) == 0
    assert json.loads(scores.read_text())["bits_per_token"] == pytest.approx(report["b"]["bits_per_token"], abs=1e-5)


@pytest.mark.parametrize("flags", [["--clear-state"], ["--freeze-state"], ["--swap-state", "test/two.txt"]])
def test_experiments_on_the_state(rec: Path, corpus: Corpus, tmp_path: Path, flags: list[str]) -> None:
    report = compare(corpus, tmp_path / "report", rec, *flags, "--document", "test/one.txt", "--top", 1000)
    places = [top["index"] for top in report["top_a"] + report["top_b"]]
    assert min(places) >= 64, "the first segment is read as always"
    assert report["a"]["bits_per_token"] != report["b"]["bits_per_token"]
    assert [document["name"] for document in report["documents"]] == ["test/one.txt"]
    (memory,) = report["memory"]
    (layer,) = memory["layers"]
    assert sum(layer["read"]) == pytest.approx(1, abs=1e-3)
    assert [ablation["count"] for ablation in layer["ablation"]] == [1, 4, 16]


def test_swapping_leaves_out_the_document_itself(rec: Path, corpus: Corpus, tmp_path: Path) -> None:
    report = compare(corpus, tmp_path / "report", rec, "--swap-state", "test/two.txt", "--no-inspect")
    assert [document["name"] for document in report["documents"]] == ["test/one.txt"]
    assert report["memory"] == []


def test_the_page_is_self_contained(rec: Path, slide: Path, corpus: Corpus, tmp_path: Path) -> None:
    compare(corpus, tmp_path / "report", rec, slide)
    page = (tmp_path / "report" / "report.html").read_text()
    assert not re.search(r"""(src|href)\s*=\s*["'](?!data:)""", page), "nothing is fetched"
    assert "http://" not in page
    assert "https://" not in page
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    assert data
    assert json.loads(data[1])["top_a"], "a text with </script> in it does not end the data"


def test_pictures(rec: Path, corpus: Corpus, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "report"
    assert main(["compare", str(rec), "--clear-state", "--data", str(corpus.folder), "--out", str(out)]) == 0
    names = {path.name for path in out.glob("*.png")}
    assert {"cumulative.png", "by_distance.png", "spikes-001.png", "spikes-002.png", "memory-read-layer2.png"} <= names
    assert all((out / name).read_bytes().startswith(b"\x89PNG") for name in names)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "give a second run B"),
        (["--swap-state", "test/three.txt"], "no document 'test/three.txt'"),
        (
            ["--swap-state", "test/two.txt", "--document", "test/two.txt"],
            "must not be one of the documents being scored",
        ),
        (["--clear-state", "--top", "0"], "must be at least 1"),
        (["--clear-state", "--split", "train"], "split 'train' has no documents"),
    ],
)
def test_refusals(
    rec: Path, corpus: Corpus, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    arguments = ["compare", str(rec), *flags, "--data", str(corpus.folder), "--out", str(tmp_path / "out")]
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


def test_a_model_without_a_state_has_nothing_to_clear(
    slide: Path, corpus: Corpus, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["compare", str(slide), "--clear-state", "--data", str(corpus.folder), "--out", str(tmp_path / "out")]
    assert main(arguments) == 2
    assert "no recurrent state" in capsys.readouterr().err


def test_another_tokenizer_is_refused_with_the_reason(
    rec: Path,
    corpus: Corpus,
    tmp_path: Path,
    make_reader: Callable[..., BlockRecurrentLM],
    capsys: pytest.CaptureFixture[str],
) -> None:
    import sentencepiece

    (tmp_path / "text.txt").write_text("\n".join(TEXTS.values()) * 9, encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "text.txt"), model_prefix=str(tmp_path / "v"), vocab_size=45, minloglevel=2
    )
    tokenizer = load_tokenizer(tmp_path / "v.model")
    model = make_reader(vocab_size=tokenizer.vocab_size)
    save_run(tmp_path / "other", RunConfig("rec-fixed-skip", "micro", model.config), model, tokenizer, 1)
    arguments = ["compare", str(rec), str(tmp_path / "other"), "--data", str(corpus.folder), "--out", str(tmp_path)]
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert "different tokenizers (256 and 45 pieces)" in said
    assert "not the same pieces of text" in said
    assert main(["eval", str(tmp_path / "other"), "--data", str(corpus.folder)]) == 2
    assert "another tokenizer" in capsys.readouterr().err


def test_inspect(rec: Path, corpus: Corpus, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, numbers, page = tmp_path / "text.txt", tmp_path / "memory.json", tmp_path / "memory.html"
    text.write_text(TEXTS["one.txt"])
    assert main(["inspect", str(rec), str(text), "--json", str(numbers), "--out", str(page)]) == 0
    printed = capsys.readouterr().out
    for word in ("attention_gate keep", "most read vectors", "blocks that changed the state most", "ablated vectors"):
        assert word in printed
    (layer,) = json.loads(numbers.read_text())["layers"]
    assert list(layer["gates"]) == ["attention_gate_keep"]
    assert len(layer["change"]) == len(layer["state_norm"]) == (len(TEXTS["one.txt"]) + 1) // 16
    assert page.read_text().startswith("<!doctype html>")
    assert main(["inspect", str(rec), "test/two.txt", "--data", str(corpus.folder), "--tokens", "64"]) == 0
    assert "64 tokens in blocks of 16" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no-such-file.txt"], "No such file"),
        (["empty.txt"], "is empty"),
        (["text.txt", "--out", "memory.pdf"], "must end in .html"),
        (["text.txt", "--tokens", "0"], "must be at least 1"),
    ],
)
def test_inspect_refusals(
    rec: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "text.txt").write_text("text")
    assert main(["inspect", str(rec), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_eval_plots_several_runs_in_one(rec: Path, slide: Path, corpus: Corpus, tmp_path: Path) -> None:
    for name, start in (("curves.html", b"<!doctype html>"), ("curves.png", b"\x89PNG")):
        if name.endswith("png"):
            pytest.importorskip("matplotlib")
        out = tmp_path / name
        assert main(["eval", str(rec), str(slide), "--data", str(corpus.folder), "--plot", str(out)]) == 0
        assert out.read_bytes().startswith(start)
    page = (tmp_path / "curves.html").read_text()
    data = json.loads(re.search(r'id="data">(.*?)</script>', page, re.S)[1])  # type: ignore[index]
    assert [series["label"] for series in data["charts"][0]["series"]] == [str(rec), str(slide)]
    assert data["charts"][0]["counts"]["y"][0] == 2


@pytest.mark.filterwarnings("error")
def test_a_document_of_one_token(rec: Path, slide: Path, make_corpus: Callable[..., Corpus], tmp_path: Path) -> None:
    corpus = make_corpus({"x.txt": "x"}, name="tiny")
    for number, arguments in enumerate(([rec, slide], [rec, "--clear-state"], [rec, "--freeze-state"])):
        report = compare(corpus, tmp_path / f"report-{number}", *arguments)
        assert report["a"]["tokens"] == 1
        assert report["difference"]["interval_95"] is None
