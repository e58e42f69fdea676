"""One small folder of real files, made once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.security.made import fresh_copy, make_all


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    make_all(folder)
    return folder


@pytest.fixture
def files(made: Path, tmp_path: Path) -> Path:
    """A copy to damage: data, runs, memory files, an export and a text."""
    return fresh_copy(made, tmp_path / "files")
