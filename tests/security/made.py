"""Small real files of every kind, and ways to damage and to forge them."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from block_recurrent.cli.main import main
from block_recurrent.model.memory_file import FORMAT, _hash

SETTINGS = (
    *("model.d_model=16", "model.mlp_dim=32", "model.head_dim=8", "model.num_heads=2", "model.num_layers=2"),
    *("train.lanes=2", "train.save_every=1", "eval.every=2", "eval.tokens=256", "schedule.warmup=2"),
)
SYSTEMS = {"rec-fixed-skip": ["model.recurrent_layers=[2]", "model.num_states=4"], "slide": [], "memorizing": []}
SYSTEMS["memorizing"] = ["model.memory_layers=[2]", "model.memory_size=64", "model.memory_neighbors=4"]
TEXT = "Anna met Boris by the sea. They walked until it was dark, and then they walked home.\n"


def make_data(folder: Path) -> Path:
    """Documents of bytes, prepared: `folder/data`."""
    books = folder / "books"
    for split, count in (("train", 4), ("validation", 2), ("test", 2)):
        (books / split).mkdir(parents=True)
        for number in range(count):
            (books / split / f"{number}.txt").write_text(TEXT * (4 + number))
    assert main(["data", "prepare", str(books), "--out", str(folder / "data")]) == 0
    return folder / "data"


def train_arguments(folder: Path, system: str, steps: int = 2) -> list[str]:
    """`brt train` for a run of two checkpoints in `folder/system`."""
    settings = [part for setting in (*SETTINGS, *SYSTEMS[system]) for part in ("--set", setting)]
    out = ["--data", str(folder / "data"), "--out", str(folder / system), "--steps", str(steps)]
    return ["train", "--system", system, "--size", "micro", *out, *settings]


def make_run(folder: Path, system: str) -> Path:
    assert main(train_arguments(folder, system)) == 0
    (folder / "text.txt").write_text(TEXT * 3)
    memory = folder / f"{system}.memory"
    assert main(["read", str(folder / system), str(folder / "text.txt"), "--memory", str(memory)]) == 0
    return folder / system


def forge(path: Path, out: Path, change: Callable[[dict[str, Any], dict[str, torch.Tensor]], None]) -> Path:
    """A memory file with something changed and a hash that fits."""
    with safe_open(path, framework="pt") as file:
        header = json.loads(file.metadata()[FORMAT])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    change(header, tensors)
    text = json.dumps(header)
    tensors = {name: x.contiguous() for name, x in tensors.items()}
    save_file(tensors, out, {FORMAT: text, "sha256": _hash(text, tensors)})
    return out


def flip(path: Path, position: int, mask: int) -> None:
    """Change bits of one byte in place."""
    with open(path, "r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ mask]))


class Flips:
    """Byte flips over all files of a folder (or one file), every byte as likely as another, small files more often."""

    def __init__(self, path: Path, seed: int, leave_out: tuple[str, ...] = ()) -> None:
        self.random = random.Random(seed)
        found = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
        self.files = [p for p in found if p.name not in leave_out and p.stat().st_size]

    def one(self) -> tuple[Path, int, int]:
        """File, position and mask of the next one: half of them in files of up to 10 kB."""
        small = [p for p in self.files if p.stat().st_size <= 10_000]
        choice = small if small and self.random.random() < 0.5 else self.files
        file = self.random.choices(choice, [p.stat().st_size for p in choice])[0]
        return file, self.random.randrange(file.stat().st_size), self.random.randrange(1, 256)


def fresh_copy(path: Path, out: Path) -> Path:
    shutil.rmtree(out, ignore_errors=True)
    return Path(shutil.copytree(path, out))


def tree_hash(path: Path) -> str:
    """Of all names and contents below a folder."""
    digest = hashlib.sha256()
    for file in sorted(p for p in path.rglob("*") if p.is_file()):
        digest.update(str(file.relative_to(path)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()
