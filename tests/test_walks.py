"""The walks of docs/architecture.md are those that calls take: every file that runs is listed, or named as left out."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch

from block_recurrent.cli.main import main
from block_recurrent.data import Corpus, LaneStream, load_tokenizer
from block_recurrent.data.corpus.prepare import PrepareSettings, prepare
from block_recurrent.inference.open_session import session_of_run
from block_recurrent.run_config import resolve
from block_recurrent.runtime import Runtime
from block_recurrent.train.loop import Trainer, train

PACKAGE = Path(__file__).parents[1] / "src" / "block_recurrent"
PAGE = Path(__file__).parents[1] / "docs" / "architecture.md"
NAME = re.compile(r"`([\w/]+(?:\.py)?)`")


def files_of(walk: str) -> set[str]:
    """The Python files of a walk."""
    paragraph = PAGE.read_text(encoding="utf-8").partition(f"**{walk}**")[2].partition("\n\n")[0]
    return {name for name in NAME.findall(paragraph) if name.endswith(".py")}


def left_out(name: str) -> bool:
    said = PAGE.read_text(encoding="utf-8").partition("Left out are")[2].partition("\n\n")[0]
    return any(name == other or name.startswith(f"{other}/") for other in NAME.findall(said))


@contextmanager
def traced() -> Iterator[set[str]]:
    """The files of the package whose functions are called in this context, in this thread."""
    seen: set[str] = set()
    here = str(PACKAGE.resolve())

    def note(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(here) and not code.co_name.startswith("<"):
            seen.add(Path(code.co_filename).relative_to(here).as_posix())

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield seen
    finally:
        sys.setprofile(before)


def check(walk: str, seen: set[str], rooms: tuple[str, ...], and_then: str = "") -> None:
    """Of the files in these rooms."""
    listed = files_of(walk)
    assert listed - seen == set(), "listed, but not called"
    known = listed | (files_of(and_then) if and_then else set())
    strange = {name for name in seen - known if name.startswith(rooms) and not left_out(name)}
    assert strange == set(), "called, but neither listed nor left out"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text, its prepared data, a run on it, and a memory."""
    folder, words = tmp_path_factory.mktemp("walks"), np.random.default_rng(0).choice(["the", "sea", "whale"], 400)
    (folder / "train").mkdir()
    (folder / "train" / "text.txt").write_text(" ".join(words))
    prepare(PrepareSettings((str(folder / "train"),), validation=0, test=0), load_tokenizer("bytes"), folder / "data")
    train(config_of(folder), folder / "run")
    text, memory = folder / "train" / "text.txt", folder / "text.memory"
    assert main(["read", str(folder / "run"), str(text), "--memory", str(memory)]) == 0
    return folder


def config_of(folder: Path) -> Any:
    values = {"steps": 2, "lanes": 2, "device": "cpu", "tensorboard": False}
    model = {"vocab_size": 257, "num_layers": 3}
    given = {"system": "rec-fixed-skip", "size": "micro", "data": {"path": str(folder / "data")}}
    return resolve({**given, "train": values, "model": model, "eval": {"every": 0}}, vocab_size=257)


def test_from_a_token_to_an_update(folder: Path) -> None:
    trainer = Trainer(config_of(folder).replace("data", prefetch=0), Runtime(torch.device("cpu"), torch.float32))
    reporter: Any = type("Silent", (), {"metrics": lambda self, record: None})()
    with trainer.stream:
        trainer.one_step(reporter, False)
        with traced() as seen:
            trainer.one_step(reporter, False)
    check("From a token to an update", seen - {"data/streams/prefetch.py"}, ("train", "model", "nn", "ops", "runtime"))


def test_from_a_document_to_a_step(folder: Path) -> None:
    settings = PrepareSettings((str(folder / "train"),), validation=0, test=0, threads=1)
    with traced() as seen:
        prepare(settings, load_tokenizer("bytes"), folder / "again")
        stream = LaneStream(Corpus(folder / "again"), "train", lanes=1, segment=16)
        next(stream)
        stream.close()
    other_kinds = {"data/sources/records.py"}
    check("From a document to a step", seen - other_kinds, ("data/corpus", "data/sources", "data/streams"))


def test_from_a_memory_to_text(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["write", str(folder / "run"), "--memory", str(folder / "text.memory"), "--tokens", "3"]
    main(words)  # so that everything is imported
    with traced() as seen:
        main(words)
    check("From a memory to text", seen, ("inference",), and_then="One generated token")


def test_one_generated_token(folder: Path) -> None:
    session, _ = session_of_run(str(folder / "run"), memory=folder / "text.memory", device="cpu")
    written = session.write_tokens(5)
    next(written)
    with traced() as seen:
        next(written)
    check("One generated token", seen - {"model/memory.py", "inference/snapshot.py"}, ("",))
