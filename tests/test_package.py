"""The wheel builds and works without the checkout."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from block_recurrent import __version__, models

ROOT = Path(__file__).parent.parent
HAS_COMPILER = platform.machine() == "x86_64" and all(map(shutil.which, ("bash", "cc")))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built with the packages that are installed already, from a copy: no network, nothing left in the checkout.

    The kernels are compiled without optimization, which takes most of a minute.
    """
    folder = tmp_path_factory.mktemp("wheel")
    source, compiler = folder / "source", folder / "cc"
    subprocess.run(["git", "-C", str(ROOT), "checkout-index", "-a", f"--prefix={source}/"], check=True)
    compiler.write_text('#!/bin/bash\nexec cc "${@/-O3/-O0}"\n')
    compiler.chmod(0o755)
    done = subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(source)],
        capture_output=True,
        text=True,
        env=os.environ | ({"CC": str(compiler)} if HAS_COMPILER else {}),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return next(folder.glob("*.whl"))


def test_the_version_is_the_same_everywhere() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert version == __version__
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## {version}\n" in (ROOT / "CHANGELOG.md").read_text()


def test_the_wheel_has_all_that_is_needed(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert "block_recurrent/py.typed" in names
    assert "block_recurrent/model/language_model.py" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not any(name.startswith("tests") for name in names)
    if HAS_COMPILER:
        kernels = {Path(name).name.split(".")[0] for name in names if name.endswith(".so")}
        assert kernels == {"_avx2", "_avx512"}
    for model in models.names():
        assert {f"block_recurrent/models/{model}/{part}" for part in ("model.safetensors", "card.json")} <= set(names)
    assert wheel.stat().st_size < 40_000_000


def test_the_wheel_works_without_the_checkout(wheel: Path, tmp_path: Path) -> None:
    code = (
        "import torch, block_recurrent as br; "
        "model = br.BlockRecurrentLM(br.preset('rec-fixed-skip', 'micro', vocab_size=20)); "
        "logits, memory = model(torch.zeros(1, 20, dtype=torch.int64)); "
        "print(br.__file__, tuple(logits.shape), memory.tokens_read.tolist())"
    )
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(wheel)!r}); {code}"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert str(wheel) in done.stdout
    assert "(1, 20, 20) [20]" in done.stdout
