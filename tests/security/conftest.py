"""One small folder of real files, made once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.security.made import fresh_copy, make_data, make_run


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    make_data(folder)
    for system in ("rec-fixed-skip", "memorizing"):
        make_run(folder, system)
    return folder


@pytest.fixture
def files(made: Path, tmp_path: Path) -> Path:
    """A copy to damage: data, runs, memory files and a text."""
    return fresh_copy(made, tmp_path / "files")
