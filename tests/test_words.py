"""The prose: spelling, links, and phrases that readers stumbled on."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "results" / "README.md"])
KINDS = (".py", ".c", ".h", ".html", ".js", ".css", ".yaml", ".toml", ".ipynb")
FOLDERS = [p for folder in ("src", "scripts", "docs") for p in (ROOT / folder).rglob("*") if p.suffix in KINDS]
SOURCES = sorted([*FOLDERS, *(ROOT / name for name in ("Makefile", "mkdocs.yml", "pyproject.toml", "CITATION.cff"))])
SPELLED = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "results/README.md", "docs", "src", "scripts"]

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
    r"\bgoes on\b|\bto go on\b|\bgone on\b|\bgoing on with\b": "continues; resumes",
    r"\bgives? back\b|\bgives? (?:all|every) text back\b": "returns; restores",
    r"\b(?:of|for|after|in|every) so (?:many|much)\b": "a number of; N; this many",
    r"\b[Nn]obody\b(?![\"/])|\b[Ww]hoever\b|\banybody\b": "no one is meant: say what happens",
    r"\bone's own\b": "custom; your own",
    r"\b(?:is|are|was|were) asked for\b": "is requested; is expected",
    r"\bset(?:s|ting)? back to\b": "reset to",
    r"\bhas to say\b|\bsays so\b": "reports",
    r"\bwhat there is\b|\bthose there are\b": "the choices",
    r"which this server has not": "which is not supported",
    r"(?<!there )\bis no (?:file|name|run|memory|text|model|folder|package|regular|padding)\b": "is not a",
    r"whole or not(?: there)? at all": "atomically",
    r"\bdealt (?:anew|by|to)\b": "assigned; redistributed",
    r"\btaken away\b": "ablated; removed",
    r"\blast said\b|\bsaid (?:last|again)\b": "last seen; repeated",
    r"this program reads": "this version supports",
    r"\bmake room\b": "free some space",
    r"\bas it was before\b": "unchanged",
    r"\bin one go\b": "without interruption",
    r"what the run has": "notes of the run",
    r"a name of 'brt models'": "a model name (see 'brt models')",
    r"at a place of\b|\ba place of the\b": "a position; a checkpoint",
    r"\bmodels? (?:in|of) the box\b": "bundled model",
    r"\b[Aa]n outside line\b": "comparison with a public model",
    r"\bSPEC section": "the paper's section, or docs/model.md",
    r"\bfor want of\b": "not measured yet",
    r"\bnothing left to save\b|\bhad no teacher\b": "say what happens",
}


@pytest.fixture(scope="module")
def texts() -> dict[Path, str]:
    """All pages and sources, each as one line."""
    return {path: " ".join(path.read_text(encoding="utf-8").split()) for path in [*PAGES, *SOURCES]}


@pytest.mark.parametrize("phrase", PHRASES)
def test_a_phrase_is_gone(phrase: str, texts: dict[Path, str]) -> None:
    pattern = re.compile(phrase)
    for path, text in texts.items():
        found = pattern.search(text)
        where = text[max(0, found.start() - 40) : found.end() + 40] if found else ""
        assert not found, f"{path.relative_to(ROOT)}: '...{where}...': write '{PHRASES[phrase]}'"


def test_the_phrases_can_be_found() -> None:
    """The list would catch what it is for."""
    said = "from block to block, for ever; can't be gone on from; rec-fixed-skip micro starts of 200: Beside GPT-2"
    assert sum(bool(re.search(phrase, said)) for phrase in PHRASES) == 5


def test_spelling() -> None:
    """American throughout; `licence`, `cancelled` and `COLOURS` are names in code."""
    pytest.importorskip("codespell_lib", reason="needs codespell")
    words = ["--builtin", "clear,rare,en-GB_to_en-US", "--ignore-words-list", "licence,licences,cancelled,colours"]
    command = [sys.executable, "-m", "codespell_lib", "--skip", "*.ipynb", *words, *SPELLED]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def anchors(page: Path) -> set[str]:
    """Of the headings, as GitHub and mkdocs make them."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_an_empty_line_precedes_a_list(page: Path) -> None:
    """GitHub shows a list without it too; the site shows a paragraph with dashes."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for paragraph in re.split(r"\n\s*\n", text):
        lines = re.sub(r"^#.*\n", "", paragraph.strip() + "\n").splitlines()
        items = [bool(re.match(r"\s*([-*]|\d+\.) ", line)) for line in lines]
        assert not any(items) or items[0] or lines[0].startswith(("|", "  ")), f"{page.name}: {paragraph}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    generated = {ROOT / "docs" / "reference" / f"{name}.md" for name in ("cli", "settings")}
    for target, anchor in re.findall(r"\]\((?![a-z]+:)([^)#\s]*)#?([^)\s]*)\)", page.read_text(encoding="utf-8")):
        place = (page.parent / target).resolve() if target else page
        assert place.exists() or place in generated, f"{page.name}: {target}"
        if anchor and place.suffix == ".md" and place not in generated:
            assert anchor in anchors(place), f"{page.name}: {target}#{anchor}"
