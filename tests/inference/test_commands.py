"""brt read, write, score and memory: what users type, and what they get wrong."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from block_recurrent import Session
from block_recurrent.cli.main import main
from block_recurrent.data import Tokenizer, load_tokenizer
from block_recurrent.errors import FAILURE, USAGE
from block_recurrent.inference.interactive import Conversation
from block_recurrent.inference.sampling import Sampling

GREEDY = ["--temperature", "0", "--repetition-penalty", "8", "--go-on"]


@pytest.fixture
def run(make_reader: Callable, make_run: Callable) -> Path:
    return make_run(make_reader("rec-fixed-skip"))


@pytest.fixture
def book(tmp_path: Path, text: Callable) -> Path:
    (tmp_path / "book.txt").write_bytes(text(200).encode())
    return tmp_path / "book.txt"


def brt(*arguments: object) -> int:
    return main([str(argument) for argument in arguments])


def test_read_then_write_is_writing_after_reading(
    run: Path, book: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert brt("read", run, book, "--memory", tmp_path / "whole.memory") == 0
    assert f"read {book.stat().st_size:,} tokens" in capsys.readouterr().out
    raw = book.read_bytes()
    (tmp_path / "1.txt").write_bytes(raw[:100])
    (tmp_path / "2.txt").write_bytes(raw[100:])
    assert brt("read", run, tmp_path / "1.txt", "--memory", tmp_path / "part.memory") == 0
    part = ("--memory", tmp_path / "part.memory")
    assert brt("read", run, tmp_path / "2.txt", "--from", tmp_path / "part.memory", *part) == 0
    capsys.readouterr()
    texts = []
    for start in (
        ["--memory", tmp_path / "whole.memory"],
        ["--memory", tmp_path / "part.memory"],
        ["--prompt", book.read_bytes().decode()],
        ["--prompt-file", book],
    ):
        assert brt("write", run, *start, "--tokens", 30, *GREEDY) == 0
        texts.append(capsys.readouterr().out)
    assert len(set(texts)) == 1
    assert len(texts[0]) > 5


def test_writing_can_be_saved_and_gone_on_from(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert brt("write", run, "--prompt", "Hello", "--tokens", 30, *GREEDY) == 0
    whole = capsys.readouterr().out
    saved = tmp_path / "a.memory"
    assert brt("write", run, "--prompt", "Hello", "--tokens", 13, *GREEDY, "--save", saved) == 0
    first = capsys.readouterr().out
    assert brt("write", run, "--memory", saved, "--tokens", 17, *GREEDY) == 0
    assert first.removesuffix("\n") + capsys.readouterr().out == whole


def test_log_probs_and_score_agree(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "log.jsonl"
    assert brt("write", run, "--prompt", "Hello", "--tokens", 9, "--seed", 4, "--go-on", "--log-probs", log) == 0
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    assert len(rows) == 9
    assert capsys.readouterr().out == "".join(row["text"] for row in rows) + "\n"
    (tmp_path / "next.txt").write_text("and then the sea")
    (tmp_path / "prompt.txt").write_text("Hello")
    assert brt("read", run, tmp_path / "prompt.txt", "--memory", tmp_path / "a.memory") == 0
    capsys.readouterr()
    assert brt("score", run, "--memory", tmp_path / "a.memory", "--text", tmp_path / "next.txt", "--json") == 0
    scored = json.loads(capsys.readouterr().out)
    assert (scored["tokens"], scored["bytes"], scored["position"]) == (16, 16, 5)
    assert scored["bits_per_token"] == pytest.approx(scored["bits"] / 16)
    (tmp_path / "both.txt").write_text("Helloand then the sea")
    totals = []
    for name in ("both.txt", "prompt.txt"):
        assert brt("score", run, "--text", tmp_path / name, "--json") == 0
        totals.append(json.loads(capsys.readouterr().out)["bits"])
    assert totals[0] - totals[1] == pytest.approx(scored["bits"], rel=1e-4)
    assert brt("score", run, "--text", tmp_path / "next.txt") == 0
    assert "bits per token" in capsys.readouterr().out


def test_memory_info_and_diff(run: Path, book: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = tmp_path / "a.memory", tmp_path / "b.memory"
    (tmp_path / "more.txt").write_text("more")
    assert brt("read", run, book, "--memory", a) == 0
    assert brt("read", run, tmp_path / "more.txt", "--from", a, "--memory", b) == 0
    capsys.readouterr()
    assert brt("memory", "info", a, "--text", book, "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["is_memory_of_text"] is True
    assert facts["tokens"] == book.stat().st_size
    assert facts["file_bytes"] == a.stat().st_size
    assert brt("memory", "info", b, "--text", book) == FAILURE
    shown = capsys.readouterr()
    assert re.search("is memory of text +False", shown.out)
    assert f"{run}, step 7" in shown.out
    assert "is not the memory of" in shown.err
    assert brt("memory", "diff", a, b) == 0
    assert "state" in capsys.readouterr().out
    assert brt("memory", "diff", a, a, "--json") == 0
    same = json.loads(capsys.readouterr().out)
    assert same["same_text"] is True
    assert all(row["largest"] == 0 for row in same["layers"])


def test_int8_writes_and_keeps_its_memories_apart(
    run: Path, book: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert brt("read", run, book, "--memory", tmp_path / "a.memory", "--int8") == 0
    assert brt("write", run, "--memory", tmp_path / "a.memory", "--tokens", 5, "--int8") == 0
    capsys.readouterr()
    assert brt("write", run, "--memory", tmp_path / "a.memory", "--tokens", 5) == 2
    assert "step 7, int8' (weights" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("code", "arguments", "message"),
    [
        (USAGE, ["write", "RUN", "--prompt", ""], "the prompt is empty"),
        (USAGE, ["write", "RUN", "--tokens", "0"], "max_tokens is 0: it must be a whole number of at least 1"),
        (USAGE, ["write", "RUN", "--tokens", "-2"], "max_tokens is -2"),
        (USAGE, ["write", "RUN", "--temperature", "-1"], "temperature is -1.0: it must be a number of at least 0"),
        (USAGE, ["write", "RUN", "--top-p", "0"], "top_p is 0.0: it must be a number above 0 and up to 1"),
        (USAGE, ["write", "RUN", "--top-p", "1.5"], "top_p is 1.5"),
        (USAGE, ["write", "RUN", "--stop", ""], "stop is"),
        (USAGE, ["write", "RUN", "--beams", "3", "--top-k", "4"], "beam search does not sample"),
        (USAGE, ["write", "RUN", "--prompt", "a", "--prompt-file", "b"], "give one of them"),
        (USAGE, ["write", "RUN", "--prompt-file", "LATIN"], "is not UTF-8"),
        (USAGE, ["write", "RUN", "--prompt-file", "nothing.txt"], "can't be read"),
        (USAGE, ["write", "RUN", "--memory", "nothing.memory"], "memory file 'nothing.memory' does not exist"),
        (FAILURE, ["write", "RUN", "--memory", "CUT"], "damaged, truncated or another kind of file"),
        (USAGE, ["write", "RUN", "--memory", "OTHER"], "belongs to model"),
        (USAGE, ["write", "nowhere"], "'nowhere' is not a run"),
        (FAILURE, ["write", "RUN", "--save", "LATIN"], "is not a memory file: choose another name"),
        (USAGE, ["write", "RUN", "--device", "gpu"], "device"),
        (USAGE, ["read", "RUN", "EMPTY", "--memory", "NEW"], "is empty: there is nothing to read"),
        (USAGE, ["read", "RUN", "LATIN", "--memory", "NEW"], "is not UTF-8 (byte 0xE9"),
        (USAGE, ["read", "RUN", "nothing.txt", "--memory", "NEW"], "'nothing.txt' can't be read"),
        (FAILURE, ["read", "RUN", "LATIN", "--memory", "LATIN"], "is not a memory file"),
        (FAILURE, ["read", "RUN", "LATIN", "--memory", "nowhere/a.memory"], "there is no folder 'nowhere'"),
        (
            FAILURE,
            ["read", "RUN", __file__, "--memory", "NEW", "--from", "CUT"],
            "damaged, truncated or another kind of file",
        ),
        (USAGE, ["score", "RUN", "--text", "EMPTY"], "nothing to score"),
        (FAILURE, ["memory", "info", "LATIN"], "can't be read as a memory file"),
        (FAILURE, ["memory", "diff", "OTHER", "CUT"], "damaged, truncated or another kind of file"),
    ],
)
def test_mistakes_are_one_line_and_change_nothing(
    code: int,
    arguments: list[str],
    message: str,
    run: Path,
    make_reader: Callable,
    byte_tokenizer: Tokenizer,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    files = {"LATIN": tmp_path / "latin.txt", "EMPTY": tmp_path / "empty.txt", "CUT": tmp_path / "cut.memory"}
    files |= {"OTHER": tmp_path / "other.memory", "RUN": run, "NEW": tmp_path / "new.memory"}
    files["LATIN"].write_bytes(b"caf\xe9 " * 99)
    files["EMPTY"].write_bytes(b"")
    Session(make_reader(seed=9), byte_tokenizer).save(files["OTHER"])
    files["CUT"].write_bytes(files["OTHER"].read_bytes()[:-50])
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert brt(*(files.get(argument, argument) for argument in arguments)) == code
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_an_unknown_option_is_said(run: Path) -> None:
    with pytest.raises(SystemExit) as stop:
        brt("write", run, "--stop-at", "x")
    assert stop.value.code == 2


def test_a_closed_pipe_is_no_error(run: Path) -> None:
    command = f"{sys.executable} -m block_recurrent write {run} --tokens 400 --go-on | head -c 5"
    done = subprocess.run(command, shell=True, capture_output=True, timeout=120)
    assert b"Traceback" not in done.stderr
    assert done.stdout


@pytest.mark.parametrize("module", ["read", "write", "score", "memory", "export"])
def test_help_does_not_load_torch(module: str) -> None:
    code = (
        "import sys\nfrom block_recurrent.cli.main import main\n"
        f"try:\n    main(['{module}', '--help'])\nexcept SystemExit:\n    pass\n"
        "assert 'torch' not in sys.modules, 'torch'"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_interactive_on_the_command_line(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello\n/where\n/nonsense\n"))
    assert brt("write", run, "--interactive", "--tokens", 10, *GREEDY) == 0
    out = capsys.readouterr().out
    assert "15 tokens" in out
    assert "there is no command '/nonsense'" in out


def talk(session: Session, *lines: str) -> list[str]:
    out = io.StringIO()
    sampling = Sampling(temperature=0, repetition_penalty=8.0, end_at_mark=False)
    conversation = Conversation(session, 6, sampling, io.StringIO("".join(f"{line}\n" for line in lines)), out)
    assert conversation.run() == 0
    return out.getvalue().split("> ")[1:-1]


def test_a_conversation(make_reader: Callable, byte_tokenizer: Tokenizer, tmp_path: Path) -> None:
    session = Session(make_reader(), byte_tokenizer)
    saved = tmp_path / "a.memory"
    answers = talk(
        session,
        "Hello",
        f"/save {saved}",
        "and on",
        "/undo",
        "and on",
        "/fork",
        "another way",
        "/fork 1",
        "another way",
        f"/load {saved}",
        "and on",
        "/undo",
        "/undo",
        "/save",
        "/fork 7",
        "/load nothing.memory",
        "/where",
        "/help",
    )
    hello, _, on, undone, again, fork, other, back, same_way, loaded, again2, *rest = answers
    assert on == again == again2, "undoing and loading bring the same place back"
    assert other == same_way, "the branches stood at the same place"
    assert "11 tokens" in undone
    assert "branch 2 of 2, 23 tokens" in fork
    assert "branch 1 of 2, 23 tokens" in back
    assert "11 tokens" in loaded
    assert hello
    assert "needs the name of a file" in rest[2]
    assert "there is no branch '7': there are 1, 2" in rest[3]
    assert "memory file 'nothing.memory' does not exist" in rest[4]
    assert "branch 1 of 2" in rest[5]
    assert all(command in rest[6] for command in ("/save", "/load", "/fork", "/undo", "/where"))


def test_nothing_to_undo_is_said(make_reader: Callable, byte_tokenizer: Tokenizer) -> None:
    assert "nothing to undo" in talk(Session(make_reader(), byte_tokenizer), "/undo", "/where")[0]


def test_ctrl_c_stops_the_sentence_not_the_program(make_reader: Callable, byte_tokenizer: Tokenizer) -> None:
    class Interrupted(io.StringIO):
        shown = 0

        def write(self, text: str) -> int:
            if text not in ("> ", "\n") and "tokens" not in text:
                self.shown += 1
                if self.shown == 3:
                    raise KeyboardInterrupt
            return super().write(text)

    session, out = Session(make_reader(), byte_tokenizer), Interrupted()
    sampling = Sampling(temperature=0, repetition_penalty=8.0, end_at_mark=False)
    conversation = Conversation(session, 50, sampling, io.StringIO("Hello\n/where\n"), out)
    assert conversation.run() == 0
    assert 5 < session.position < 55, "what was written until then stays"
    assert f"{session.position} tokens" in out.getvalue()


def test_turns_of_a_conversation_do_not_share_random_numbers(make_reader: Callable) -> None:
    session, seeds = Session(make_reader("rec-fixed-skip"), load_tokenizer("bytes")), []
    write = session.write
    session.write = lambda count, sampling: seeds.append(sampling.seed) or write(count, sampling)  # type: ignore
    source = io.StringIO("one\ntwo\n/quit\n")
    Conversation(session, 3, Sampling(seed=5), source, io.StringIO()).run()
    assert len(seeds) == len(set(seeds)) == 2
