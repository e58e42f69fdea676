"""The prose: spelling, links, and phrases that readers stumbled on."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
SOURCES = sorted(p for p in (ROOT / "src").rglob("*") if p.suffix in (".py", ".html", ".js", ".css", ".yaml"))
SPELLED = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "docs", "src", "scripts"]

# What a reader should never see again, and what to write instead.
PHRASES = {
    r"\bfor ever\b": "carried from block to block; indefinitely",
    r"here and exact": "implemented and verified",
    r"goes on where it stopped": "rerun it to resume",
    r"write on from it": "generate from it",
    r"of one size, however much": "fixed size, regardless of length",
    r"if it only multiplied": "of peak GEMM throughput",
    r"\bBeside (?:the|block-recurrent|transformers|GPT)": "Compared with",
    r"what is made of it": "show hardware and the settings chosen",
    r"leave --\w+ away": "omit",
    r"can't be gone on from": "can't be resumed",
    r"Let it not know": "Teach it uncertainty",
    r"back so often": "reset the state every N tokens",
    r"\bnot at rest\b": "only defined at block boundaries",
    r"from their rooms": "lazily",
    r"written aside": "written to a temporary file, then renamed",
    r"is no folder to write into": "directory is not writable",
    r"starts of \d|\} starts\b": "starting: 200 steps",
    r"; left\.": "; abandoned",
    r"reading twice": "scoring both models",
}


@pytest.mark.parametrize("phrase", PHRASES)
def test_a_phrase_is_gone(phrase: str) -> None:
    pattern = re.compile(phrase)
    for path in [*PAGES, *SOURCES]:
        text = " ".join(path.read_text(encoding="utf-8").split())
        found = pattern.search(text)
        where = text[max(0, found.start() - 40) : found.end() + 40] if found else ""
        assert not found, f"{path.relative_to(ROOT)}: '...{where}...': write '{PHRASES[phrase]}'"


def test_the_phrases_can_be_found() -> None:
    """The list would catch what it is for."""
    said = "from block to block, for ever; can't be gone on from; rec-fixed-skip micro starts of 200: Beside GPT-2"
    assert sum(bool(re.search(phrase, said)) for phrase in PHRASES) == 4


def test_spelling() -> None:
    pytest.importorskip("codespell_lib", reason="needs codespell")
    done = subprocess.run(
        [sys.executable, "-m", "codespell_lib", "--skip", "*.ipynb", *SPELLED], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout


def anchors(page: Path) -> set[str]:
    """Of the headings, as GitHub and mkdocs make them."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    generated = {ROOT / "docs" / "reference" / "cli.md"}
    for target, anchor in re.findall(r"\]\((?![a-z]+:)([^)#\s]*)#?([^)\s]*)\)", page.read_text(encoding="utf-8")):
        place = (page.parent / target).resolve() if target else page
        assert place.exists() or place in generated, f"{page.name}: {target}"
        if anchor and place.suffix == ".md" and place not in generated:
            assert anchor in anchors(place), f"{page.name}: {target}#{anchor}"
