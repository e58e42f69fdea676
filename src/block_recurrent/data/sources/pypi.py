"""Wheels from the package index: `pypi:NAME==VERSION`, and pinned lists of them, such as `pypi:code-100`.

pip downloads only wheels, which run no code, without their dependencies; they are never installed.
Downloaded wheels are cached.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

from block_recurrent.data.sources.document import Found
from block_recurrent.data.sources.packages import normalized, wheel_documents
from block_recurrent.errors import DataError, OutputError, did_you_mean
from block_recurrent.io.atomic import atomic_file

LISTS = ("code-100",)
CACHE = "~/.cache/block-recurrent"
PIN = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)==([A-Za-z0-9][A-Za-z0-9.!+_-]*)")
NO_CONNECTION = re.compile(r"NewConnectionError|ConnectTimeout|ReadTimeout|ProxyError|SSLError|NameResolutionError")


class Pin(NamedTuple):
    """A wheel to fetch."""

    name: str
    version: str
    split: str | None = None  # None: chosen by a hash of its name
    sha256: str | None = None  # None: any


def pypi_documents(wanted: str) -> Iterator[Found]:
    """The documents of `NAME==VERSION`, or of all packages of a list."""
    return itertools.chain.from_iterable(map(_documents, _pins(wanted)))


def read_list(name: str) -> list[Pin]:
    """The packages of a bundled list."""
    packages = tomllib.loads((files(__package__) / f"{name}.toml").read_text(encoding="utf-8"))["packages"]
    return [
        Pin(*requirement.split("=="), **{key: entry[key] for key in ("split", "sha256")})
        for requirement, entry in packages.items()
    ]


def fetch_wheel(name: str, version: str) -> Path:
    """The wheel of a package, from the cache or by pip."""
    folder = Path(os.environ.get("BRT_CACHE") or CACHE).expanduser() / "wheels"
    for wheel in sorted(folder.glob("*.whl")):
        if [normalized(name), version] == [normalized(wheel.name.split("-")[0]), wheel.name.split("-")[1]]:
            return wheel
    with tempfile.TemporaryDirectory(prefix="brt-wheel-") as fetched:
        _download(f"{name}=={version}", fetched)
        (wheel,) = Path(fetched).glob("*.whl")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with atomic_file(folder / wheel.name) as part:
                shutil.copyfile(wheel, part)
        except OSError as error:
            raise OutputError(
                f"can't write to the cache '{folder}': {error.strerror or error}; set BRT_CACHE"
            ) from None
    return folder / wheel.name


def _pins(wanted: str) -> list[Pin]:
    if wanted in LISTS:
        return read_list(wanted)
    if not (pin := PIN.fullmatch(wanted)):
        hint = did_you_mean(wanted, LISTS)
        raise DataError(
            f"'pypi:{wanted}' is not a package with a version{hint}; give pypi:NAME==VERSION or pypi:{LISTS[0]}"
        )
    return [Pin(*pin.groups())]


def _documents(pin: Pin) -> Iterator[Found]:
    wheel = fetch_wheel(pin.name, pin.version)
    with wheel.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    if sha256 != (pin.sha256 or sha256):
        raise DataError(f"'{wheel}' is not the listed wheel: its SHA-256 differs; delete it, and run again")
    return wheel_documents(wheel, pin.split, sha256)


def _download(requirement: str, folder: str) -> None:
    options = [
        "--no-deps",
        "--only-binary=:all:",
        "--quiet",
        "--no-input",
        "--disable-pip-version-check",
        "--retries=2",
    ]
    pip = [sys.executable, "-m", "pip", "download", *options, "--dest", folder, requirement]
    result = subprocess.run(pip, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if result.returncode == 0:
        return
    lines = [line.removeprefix("ERROR: ") for line in result.stderr.splitlines() if line.strip()]
    if "No module named pip" in result.stderr:
        reason = "this Python has no pip: install it with 'python -m ensurepip'"
    elif NO_CONNECTION.search(result.stderr):
        reason = "the package index can't be reached; check the network"
    elif "No matching distribution" in result.stderr:
        reason = "no such wheel for this Python; check name and version"
    else:
        reason = lines[-1] if lines else f"pip exited with {result.returncode}"
    raise DataError(f"can't download '{requirement}': {reason}")
