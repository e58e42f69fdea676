"""`brt data`, `brt tokenizer` and `brt bench` as users meet them: output, exit codes, one line for an error."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from block_recurrent.cli.main import main
from block_recurrent.errors import FAILURE, USAGE


@pytest.fixture
def source(tmp_path: Path) -> Path:
    for name, text in (("train/a.txt", "one two\r\n"), ("train/b.txt", "three"), ("test/c.txt", "four")):
        (tmp_path / "source" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "source" / name).write_bytes(text.encode())
    return tmp_path / "source"


def fails(arguments: Sequence[str], capsys: pytest.CaptureFixture[str], expected: int = USAGE) -> str:
    """The one line on stderr of a command that fails."""
    try:
        code = main(list(arguments))
    except SystemExit as stopped:
        code = int(stopped.code or 0)
    assert code == expected
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return error


def test_prepare_info_show_verify(source: Path, tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    (source / "train" / "empty.txt").touch()
    (source / "train" / "latin.txt").write_bytes(b"caf\xe9 caf\xe9s")
    (source / "train" / "nul.txt").write_bytes(b"a NUL \0 inside")
    out = str(tmp_path / "out")
    assert main(["data", "prepare", str(source), "--out", out]) == 0
    report = capsysbinary.readouterr().out.decode()
    assert "train/empty.txt: is empty" in report
    assert "train/latin.txt: 2 places" in report
    assert "train/nul.txt: 1" in report
    assert main(["data", "info", out, "--segment", "8", "--json"]) == 0
    info = json.loads(capsysbinary.readouterr().out)
    assert {key: info["splits"]["test"][key] for key in ("documents", "tokens", "words", "bytes")} == {
        "documents": 1,
        "tokens": 4,
        "words": 1,
        "bytes": 4,
    }
    assert main(["data", "info", out, "--segment", "8"]) == 0
    lines = capsysbinary.readouterr().out.decode().splitlines()
    assert lines[0].split()[:4] == ["documents", "tokens", "words", "bytes"]
    assert lines[0].endswith("padding at 8")
    assert [line.split()[0] for line in lines[1:4]] == ["train", "validation", "test"]
    assert main(["data", "show", out, "train/a.txt"]) == 0
    assert capsysbinary.readouterr().out == b"one two\r\n"
    assert main(["data", "verify", out]) == 0
    assert b"5 documents verified" in capsysbinary.readouterr().out


def test_losses_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    vocabulary = Path(__file__).resolve().parents[3] / "shared" / "data" / "vocabs" / "pg19train_bpe_1000.model"
    if not vocabulary.is_file():
        pytest.skip("the authors' vocabularies are not beside this repository")
    (tmp_path / "a.txt").write_text("one\ntwo\nthree 漢\n", encoding="utf-8")
    arguments = [
        "data",
        "prepare",
        str(tmp_path / "a.txt"),
        "--out",
        str(tmp_path / "out"),
        "--tokenizer",
        str(vocabulary),
    ]
    assert main(arguments) == 0
    report = capsys.readouterr().out
    assert "4 of 16 characters lost (25.00%), 1 unknown pieces" in report


def test_verify_fails_on_damage(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main(["data", "prepare", str(source), "--out", str(out)]) == 0
    capsys.readouterr()
    (out / "test.bin").write_bytes(b"f\0i\0v\0e\0")
    assert "does not match its manifest: test/c.txt: " in fails(["data", "verify", str(out)], capsys, FAILURE)


def test_tokenizer_train(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = Path(main.__code__.co_filename).parents[1]
    out = tmp_path / "new" / "own.model"
    assert (
        main(["tokenizer", "train", "--vocab-size", "600", "--out", str(out), str(code / "data"), str(code / "cli")])
        == 0
    )
    assert "600 pieces; vocabulary size with eos: 601" in capsys.readouterr().out
    arguments = ["data", "prepare", str(code / "data"), "--out", str(tmp_path / "out"), "--tokenizer", str(out)]
    assert main(arguments) == 0
    assert "lost" not in capsys.readouterr().out
    assert main(["data", "verify", str(tmp_path / "out")]) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["data"], "required: COMMAND"),
        (["data", "prepare"], "required: SOURCE, --out"),
        (["data", "prepare", "nowhere", "--out", "{out}"], "source 'nowhere' does not exist"),
        (
            ["data", "prepare", "{source}", "--out", "{out}", "--tokenizer", "no.model"],
            "tokenizer file 'no.model' does not exist",
        ),
        (["data", "prepare", "{source}", "--out", "{out}", "--unit", "line"], "invalid choice: 'line'"),
        (["data", "prepare", "{source}", "--out", "{out}", "--test", "2"], "the share --test must be 0 to 1"),
        (["data", "prepare", "{source}", "--out", "{source}/x"], "is inside the source"),
        (["data", "info", "{source}"], "is not prepared data"),
        (["data", "verify", "{out}"], "is not prepared data"),
        (["data", "show", "{out}", "x"], "is not prepared data"),
        (["tokenizer", "train", "{source}", "--out", "{out}", "--vocab-size", "100"], "--vocab-size must be 512 to"),
        (
            ["tokenizer", "train", "{source}", "--out", "{out}", "--vocab-size", "600", "--test", "2"],
            "the share --test must be 0 to 1",
        ),
        (["bench", "nothing"], "invalid choice: 'nothing'"),
    ],
)
def test_errors_are_one_line(
    arguments: list[str], message: str, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    filled = [argument.format(source=source, out=tmp_path / "out") for argument in arguments]
    assert message in fails(filled, capsys)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


@pytest.mark.parametrize(
    "arguments", [["data"], ["data", "prepare"], ["tokenizer", "train"], ["bench"], ["bench", "data"]]
)
def test_help_is_light_and_has_an_example(arguments: list[str]) -> None:
    heavy = ("torch", "sentencepiece", "pyarrow", "numpy", "datasets")
    script = f"""
import sys
from block_recurrent.cli.main import main
try:
    main({[*arguments, "--help"]!r})
finally:
    print([name for name in {heavy!r} if name in sys.modules], file=sys.stderr)
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stderr.strip() == "[]"
    assert "example: brt " in result.stdout


def test_bench_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "bench.json"
    assert main(["bench", "data", "--megabytes", "3", "--rounds", "1", "--json", str(path)]) == 0
    report = json.loads(path.read_text())
    assert {"rows", "machine", "versions", "command"} == set(report)
    assert [row["tokenizer"] for row in report["rows"]] == ["bytes", "sentencepiece"]
    for row in report["rows"]:
        rounding = 0.01 + 0.005 / row["bare_mb_s"] + 0.005 / row["prepare_mb_s"]  # speeds have two decimals
        assert row["ratio"] == pytest.approx(row["bare_mb_s"] / row["prepare_mb_s"], rel=rounding)
    assert "best of the rounds" in capsys.readouterr().out
