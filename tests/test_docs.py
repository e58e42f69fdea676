"""The pages of docs/ stay true: their commands and examples are run, at sizes that take seconds."""

from __future__ import annotations

import random
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from block_recurrent import BlockRecurrentLM, models, preset
from block_recurrent.checkpoint import folders, state_file
from block_recurrent.cli.main import COMMANDS, main, parser_of
from block_recurrent.data.corpus import corpus
from block_recurrent.hub import manifest
from block_recurrent.inference.trail import places_of
from block_recurrent.model import memory_file
from block_recurrent.models import card
from block_recurrent.run_config import sections
from tests.made_text import make_text

DOCS = Path(__file__).parent.parent / "docs"
PAGES = sorted(page.name for page in DOCS.glob("*.md") if page.name != "serving.md")  # tests/serve runs that one
FROM_SCRATCH = ("data.md", "training.md")
TUTORIALS = [f"tutorials/{name}.md" for name in ("first-model", "your-books", "library")]  # tests/serve has the fourth
ELSEWHERE = ("hub.md", "writing.md", "recipes.md")  # tests/hub and tests/train run their examples
SERVED = ("serving.md", "tutorials/serve.md")  # tests/serve runs these
API = "reference/api.md"
NOT_RUN = {  # blocks of text with commands, and why
    "gpu.md": "needs a GPU",
    "hub.md": "install the package; one downloads a task",
    "index.md": "clones and installs",
    "serving.md": "installs, and starts the server that tests/serve starts itself",
    "tutorials/serve.md": "the same",
}
OF_OTHERS = {"--nnodes", "--nproc-per-node", "--rdzv-backend", "--rdzv-endpoint", "--rdzv-id"}
OF_OTHERS |= {"--include_path", "--no-deps", "--data-binary", "--only"}
"""Flags of torchrun, the harness, pip, curl and tests."""
SMALLER = [
    (r"--size \S+", "--size micro"),
    (r"--steps \d+", "--steps 2"),
    (r"--vocab-size \d+", "--vocab-size 600"),
    (r"--budget \d+ --seeds \d+", "--budget 0.001 --seeds 1"),
    (r"brt reproduce \S+", r"\g<0> --set train.lanes=2 --set train.save_every=10 --set eval.every=10"),
    (r"lanes([= ])\d+", r"lanes\g<1>2"),
    (r"brt bench steptime", "brt bench steptime --repeats 1"),
    (r"--nnodes .* --rdzv-id 1", ""),
    (r"--nproc-per-node \d+", "--standalone --nproc-per-node 2"),
    (r"build/pg19", "build/books"),
    (r"(brt train|block_recurrent train|highway.py train) (?!.*--steps)", r"\1 --steps 2 --lanes 2 "),
    (r"prepare (stdlib|installed|pypi:.*) --out", "prepare books/ --out"),  # slow, the network; tests/data has them
    (r"(brt tasks run (?!needle).*)", r"\1 --set task.steps=2 --set task.lanes=2 --set task.examples=2"),
    (r"brt recall", "brt recall --steps 3 --documents 4 --distance 64"),
]


def blocks(page: str, *kinds: str) -> list[str]:
    text = (DOCS / page).read_text(encoding="utf-8")
    return [block for kind, block in re.findall(r"```(\w+)\n(.*?)```", text, flags=re.DOTALL) if kind in kinds]


def commands(page: str) -> list[str]:
    lines = "".join(blocks(page, "sh", "console")).replace("\\\n", "").splitlines()
    return [line for line in lines if line]


def smaller(command: str) -> str:
    for pattern, replacement in SMALLER:
        command = re.sub(pattern, replacement, command)
    return command


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all that the pages speak of, as their readers would have it by then."""
    folder = tmp_path_factory.mktemp("docs")
    texts = random.Random(0)
    for split in ("train", "validation", "test"):
        (folder / "books" / split).mkdir(parents=True)
        for number in range(4):
            (folder / "books" / split / f"book-{number}.txt").write_text(make_text(texts))
    (folder / "books" / "train" / "ramona.txt").write_text(make_text(texts))
    for name in ("book", "chapter2", "next"):
        (folder / f"{name}.txt").write_text(make_text(texts))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        run("brt tokenizer train --vocab-size 600 --out vocabulary.model books/")
        for name, tokenizer in (("books", "bytes"), ("books-bytes", "bytes"), ("books-8k", "vocabulary.model")):
            run(f"brt data prepare books/ --out build/{name} --tokenizer {tokenizer}")
        trained = {"first": "", "rec": "", "slide": "", "bytes": "", "bpe8k": "-8k"}
        for name, data in trained.items():
            system = "slide-plus" if name == "slide" else "rec-fixed-skip"
            run(f"brt train --system {system} --size micro --steps 2 --data build/books{data} --out runs/{name}")
    return folder


def run(command: str) -> None:
    program, *words = shlex.split(command)
    if program == "brt":
        assert main(words) == 0, command
        return
    programs = {"python": [sys.executable], "torchrun": [sys.executable, "-m", "torch.distributed.run"]}
    done = subprocess.run([*programs[program], *words], capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"


@pytest.fixture(scope="module")
def room(folder: Path) -> Path:
    """The box of models that the pages speak of, with small ones in it."""
    (folder / "about.toml").write_text('summary = "a model for tests"')
    for name, trained in (("code", "first"), ("books", "bpe8k")):
        run(f"brt models pack {folder}/runs/{trained} --name {name} --out {folder}/box/{name}")
    return folder / "box"


def every_page() -> dict[str, str]:
    """The pages of docs/, by path."""
    return {path.relative_to(DOCS).as_posix(): path.read_text(encoding="utf-8") for path in DOCS.rglob("*.md")}


def test_every_block_is_run() -> None:
    """What can't be run here (it needs a network, a GPU or a server) is marked as text; nothing is indented instead."""
    for page, text in every_page().items():
        kinds = set(re.findall(r"^ *```(\w*)\n.*?^ *```$", text, flags=re.DOTALL | re.MULTILINE))
        assert kinds <= {"sh", "console", "python", "text"}, page
        assert kinds <= {"text"} or page in {*PAGES, *TUTORIALS, *SERVED, API}, page
        marked = "".join(re.findall(r"```text\n(.*?)```", text, flags=re.DOTALL))
        has_commands = re.search(r"^(brt|pip|python|torchrun|curl|make|git|import|from) ", marked, flags=re.MULTILINE)
        assert bool(has_commands) == (page in NOT_RUN), page
        assert not re.search(r"^    (brt|pip|python|curl|make) ", text, flags=re.MULTILINE), page


def test_every_command_and_flag_exists() -> None:
    """Also those in sentences, tables and blocks that are not run."""
    flags = {name: set(parser_of(name)._known(flags=True)) for name in COMMANDS}
    for page, text in every_page().items():
        for words in re.findall(r"(?:^|`)brt ((?:[^`\n]|\\\n)+)", text, flags=re.MULTILINE):
            name = words.split()[0]
            assert name in {*flags, "COMMAND"}, f"{page}: brt {words}"
            unknown = set(re.findall(r" (--[\w-]+)", words)) - flags.get(name, set())
            assert not unknown, f"{page}: brt {words}"
        mentioned = set(re.findall(r"(?<![\w-])--[a-z][\w-]+", text))
        assert mentioned <= set().union(OF_OTHERS, *flags.values()), page


def test_the_api_page_has_the_imports_of_its_names() -> None:
    """Each section imports what it describes; only types that are returned have no import."""
    for section in (DOCS / API).read_text(encoding="utf-8").split("\n## ")[1:]:
        known: dict[str, Any] = {}
        for example in re.findall(r"```python\n(.*?)```", section, flags=re.DOTALL):
            exec(example, known)
        described = {path.rpartition(".")[2] for path in re.findall(r"^::: (\S+)$", section, flags=re.MULTILINE)}
        assert described - {"Loss", "LoadedRun"} == known.keys() - {"__builtins__"}, section.splitlines()[0]


def test_the_file_formats_have_their_versions() -> None:
    page = (DOCS / "reference" / "files.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| .*?`block-recurrent[ -]([\w ]+)` \| (\d) \|", page, flags=re.MULTILINE)
    written = {"run configuration": str(sections.VERSION)}
    for module in (folders, state_file, corpus, manifest, memory_file, card):
        written[module.FORMAT.removeprefix("block-recurrent")[1:]] = str(module.VERSION)
    settings = re.findall(r"^\| (run configuration), .*?in its last line \| (\d) \|", page, flags=re.MULTILINE)
    assert dict(rows + settings) == written


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)])
def test_every_command_runs(page: str, folder: Path, room: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(models, "ROOM", room)
    if page == "extending.md":
        (folder / "highway.py").write_text(blocks(page, "python")[0])
    if page in FROM_SCRATCH:
        monkeypatch.chdir(make_elsewhere(folder, page))
    for earlier in Path().glob("*.memory"):  # of another page
        earlier.unlink()
    for command in commands(page):
        run(smaller(command))
    if page == "extending.md":
        assert "attention_gate/keep" in Path("runs/highway/metrics.jsonl").read_text()


def make_elsewhere(folder: Path, name: str) -> Path:
    """A folder beside, with the same books but nothing prepared."""
    other = folder / "elsewhere" / name
    other.mkdir(parents=True)
    for source in ("books", "vocabulary.model"):
        (other / source).symlink_to(folder / source)
    return other


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python") and page not in ELSEWHERE])
def test_every_example_runs(page: str, folder: Path, room: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(models, "ROOM", room)
    known: dict[str, Any] = {
        "__name__": "example",
        "model": BlockRecurrentLM(preset("rec-fixed-skip", "micro", vocab_size=257)),
        "tokens": torch.zeros(1, 40, dtype=torch.long),
        "memory": None,
        "starts": None,
    }
    for example in blocks(page, "python"):
        exec(compile(example, page, "exec"), known)
    logits, _ = known["model"](torch.zeros(1, 40, dtype=torch.long))  # the page's own model, where it makes one
    assert logits.isfinite().all()


def test_the_tutorials_run_in_order(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each continues from the one before, in a folder with nothing but books."""
    monkeypatch.chdir(make_elsewhere(folder, "tutorials"))
    Path("vocabulary.model").unlink()
    for page in TUTORIALS:
        parts = re.findall(r"```(sh|python)\n(.*?)```", (DOCS / page).read_text(encoding="utf-8"), flags=re.DOTALL)
        assert parts
        for kind, part in parts:
            if kind == "python":
                exec(compile(part, page, "exec"), {})
                continue
            for command in part.replace("\\\n", "").splitlines():
                run(smaller(command))
    assert places_of(Path("book-1.memory")), "the tutorial lists the checkpoints of a memory"
