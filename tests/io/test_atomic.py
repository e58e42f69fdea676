"""Files and folders appear whole or not at all, on the disk and not only in its cache."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from block_recurrent.io import atomic
from block_recurrent.io.atomic import atomic_file, atomic_folder, commit_folder, part_of, remove_folder, sweep


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths that were synced, in order."""
    paths: list[str] = []
    real = os.fsync

    def fsync(handle: int) -> None:
        paths.append(os.readlink(f"/proc/self/fd/{handle}"))
        real(handle)

    if not os.path.isdir("/proc/self/fd"):
        pytest.skip("needs /proc")
    monkeypatch.setattr(os, "fsync", fsync)
    return paths


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_and_its_folder_are_synced(tmp_path: Path, synced: list[str]) -> None:
    with atomic_file(tmp_path / "a") as part:
        part.write_text("new")
    assert (tmp_path / "a").read_text() == "new"
    assert synced == [str(part), str(tmp_path)]


def test_everything_in_a_folder_and_the_folder_around_it_are_synced(tmp_path: Path, synced: list[str]) -> None:
    with atomic_folder(tmp_path / "new" / "a") as part:
        (part / "sub").mkdir()
        (part / "sub" / "one").write_text("1")
        (part / "two").write_text("2")
    assert synced == [str(part / "sub" / "one"), str(part / "sub"), str(part / "two"), str(part), str(tmp_path / "new")]
    assert names(tmp_path / "new") == ["a"]


@pytest.mark.parametrize("write", [atomic_file, atomic_folder])
def test_a_failure_leaves_what_was_there(write: Callable[[Path], object], tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.mkdir() if write is atomic_folder else path.write_text("old")
    with pytest.raises(FileNotFoundError), write(path) as part:  # type: ignore[attr-defined]
        [(part / "new" if write is atomic_folder else part).write_text("half"), (tmp_path / "nowhere" / "x").touch()]
    assert names(tmp_path) == ["a"]
    assert os.listdir(path) == [] if write is atomic_folder else path.read_text() == "old"


def test_files_of_killed_processes_are_deleted_and_those_of_others_are_not(tmp_path: Path) -> None:
    stale, fresh, other = (tmp_path / name for name in (".a.123.part", ".a.124.part", ".b.125.part"))
    for path in (stale, fresh, other):
        path.touch()
    for path in (stale, other):
        os.utime(path, (0, 0))
    with atomic_file(tmp_path / "a") as part:
        part.touch()
    assert names(tmp_path) == [fresh.name, other.name, "a"]


def test_a_second_writer_of_a_folder_is_refused(tmp_path: Path) -> None:
    with atomic_folder(tmp_path / "a") as part:
        (part / "x").touch()
        with pytest.raises(BlockingIOError, match="another run is writing to"), atomic_folder(tmp_path / "a"):
            pass
    assert names(tmp_path / "a") == ["x"]


def test_a_folder_that_must_not_be_replaced(tmp_path: Path) -> None:
    def check(path: Path) -> None:
        if path.exists():
            raise ValueError("is there")

    with pytest.raises(ValueError, match="is there"), atomic_folder(tmp_path / "a", check):
        (tmp_path / "a").mkdir()  # by another program, while this one writes
    with pytest.raises(ValueError, match="is there"), atomic_folder(tmp_path / "a", check):
        pytest.fail("checked before the work begins")
    assert names(tmp_path) == ["a"]


@pytest.mark.parametrize("again", [atomic_folder, None])
def test_an_old_folder_that_was_moved_away_goes_back(again: Callable[[Path], object] | None, tmp_path: Path) -> None:
    (tmp_path / ".a.old").mkdir()
    (tmp_path / ".a.old" / "old").touch()
    (tmp_path / ".a.part").mkdir()
    (tmp_path / ".b.gone").mkdir()
    if again is None:
        sweep(tmp_path)
        assert names(tmp_path) == ["a"]
    else:
        with pytest.raises(RuntimeError), again(tmp_path / "a"):  # type: ignore[attr-defined]
            raise RuntimeError
    assert names(tmp_path / "a") == ["old"]


def test_the_two_steps_of_several_processes(tmp_path: Path) -> None:
    path = tmp_path / "a"
    for name in ("one", "two"):
        part_of(path).mkdir()
        (part_of(path) / name).touch()
        commit_folder(path)
        assert names(path) == [name]
    assert names(tmp_path) == ["a"]
    remove_folder(path)
    assert names(tmp_path) == []


def test_a_file_system_that_can_not_sync_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fsync(handle: int) -> None:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(os, "fsync", fsync)
    atomic.sync(tmp_path)
    (tmp_path / "a").touch()
    with pytest.raises(OSError, match="Invalid argument"):
        atomic.sync(tmp_path / "a")


def test_a_link_stays_a_link_and_a_pipe_is_refused(tmp_path):
    (tmp_path / "link").symlink_to("file")
    with atomic_file(tmp_path / "link") as aside:
        aside.write_text("new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_text() == "new"
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="not a regular file"), atomic_file(tmp_path / "pipe"):
        pytest.fail("it would replace the pipe")
