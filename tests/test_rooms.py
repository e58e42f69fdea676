"""The house has floors: a room imports itself and lower floors only. And what should be light stays light."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "src" / "block_recurrent"

# The ground floor (0) is one room of several files.
FLOORS = {
    "errors": 0,
    "allocator": 0,
    "io": 0,
    "config": 0,
    "presets": 0,
    "run_config": 0,
    "models": 0,
    "accounting": 0,
    "ops": 1,
    "runtime": 2,
    "nn": 2,
    "data": 2,
    "model": 3,
    "checkpoint": 4,
    "inference": 5,
    "evaluate": 6,
    "hub": 6,
    "train": 7,
    "analysis": 7,
    "studies": 8,
    "serve": 8,
    "bench": 9,
    "cli": 10,
}
FRONT_DOOR = {PACKAGE / "__init__.py", PACKAGE / "__main__.py"}
FILES = sorted(set(PACKAGE.rglob("*.py")) - FRONT_DOOR)


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def rooms_imported(path: Path) -> set[str]:
    """The rooms that a file imports anywhere, also inside functions."""
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        rooms |= {name.split(".")[1] for name in names if name.startswith("block_recurrent.") and name.count(".")}
    return rooms - {"__version__"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_room_imports_itself_and_lower_floors(path: Path) -> None:
    room = room_of(path)
    assert room in FLOORS, f"room '{room}' has no floor yet: give it one in FLOORS"
    for other in rooms_imported(path):
        allowed = other == room or FLOORS[other] < FLOORS[room] or FLOORS[other] == 0
        assert allowed, f"{room} (floor {FLOORS[room]}) imports {other} (floor {FLOORS[other]})"


def test_every_room_is_reached() -> None:
    assert {"model", "nn", "cli", "data"} <= {room_of(path) for path in FILES}


PAGE = Path(__file__).parent.parent / "docs" / "architecture.md"
WALKS = {"From a token to an update": 20, "From a document to a step": 10, "From a memory to text": 10}
WALKS |= {"One generated token": 8}


@pytest.mark.parametrize(("walk", "most"), WALKS.items())
def test_a_walk_is_short_and_its_files_exist(walk: str, most: int) -> None:
    text = PAGE.read_text(encoding="utf-8").partition(f"**{walk}**")[2].partition("\n\n")[0]
    files = re.findall(r"`([\w/]+\.(?:py|c))`", text)
    assert [name for name in files if not (PACKAGE / name).is_file()] == []
    assert most >= len(files) == len(set(files)) > 4, "no place is visited twice"


def test_the_page_has_the_floors() -> None:
    rows = re.findall(r"^\| (\d+) \| ([^|]*) \|", PAGE.read_text(encoding="utf-8"), re.M)
    assert {room: int(floor) for floor, rooms in rows for room in re.findall(r"`(\w+)`", rooms)} == FLOORS


def modules_after(code: str) -> set[str]:
    printed = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys; print(*sys.modules)"], capture_output=True, text=True, check=True
    )
    return set(printed.stdout.split("\n")[-2].split())


@pytest.mark.parametrize(
    "code",
    [
        "import block_recurrent",
        "from block_recurrent import preset; preset('slide', 'micro')",
        "from block_recurrent.cli.main import main; main(['--help'])",
        "from block_recurrent.cli.main import main; main(['presets', '--json'])",
        "from block_recurrent.cli.main import main; main(['no-such-command'])",
    ],
)
def test_help_and_configurations_do_not_load_torch(code: str) -> None:
    """Loading torch takes more than a second; help and config errors come at once."""
    assert not {"torch", "numpy", "sentencepiece", "transformers", "fastapi"} & modules_after(code)


def test_every_public_name_can_be_imported() -> None:
    import block_recurrent

    for name in block_recurrent.__all__:
        assert getattr(block_recurrent, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'BlockRecurentLM'"):
        _ = block_recurrent.BlockRecurentLM
