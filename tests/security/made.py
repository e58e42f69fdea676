"""Small real files of every kind, and ways to damage and to forge them."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from block_recurrent.checkpoint import load_run, save_state
from block_recurrent.cli.main import main
from block_recurrent.io import door
from block_recurrent.model.memory_file import FORMAT, _hash

SETTINGS = (
    *("model.d_model=16", "model.mlp_dim=32", "model.head_dim=8", "model.num_heads=2", "model.num_layers=2"),
    *("train.lanes=2", "train.save_every=1", "eval.every=2", "eval.tokens=256", "schedule.warmup=2"),
)
_RECURRENT = ("model.recurrent_layers=[2]", "model.num_states=4")
SYSTEMS: dict[str, tuple[str, ...]] = {
    "slide": (),
    "rec-fixed-skip": _RECURRENT,
    "rec-lstm-dual": _RECURRENT,
    "feedback-fixed-skip": _RECURRENT,
    "memorizing": ("model.memory_layers=[2]", "model.memory_size=64", "model.memory_neighbors=4"),
}
RUN, SUBWORDS = "rec-fixed-skip", "subwords"
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


def make_run(folder: Path, system: str) -> None:
    """A run, and a memory file of it."""
    assert main(train_arguments(folder, system)) == 0
    (folder / "text.txt").write_text(TEXT * 3)
    memory = folder / f"{system}.memory"
    assert main(["read", str(folder / system), str(folder / "text.txt"), "--memory", str(memory)]) == 0


def make_subwords(folder: Path) -> None:
    """`folder/subwords`: a run of one checkpoint, with a vocabulary of its own; its data is in `folder/pieces`."""
    vocabulary, data, source = folder / "subwords.model", folder / "pieces", Path(__file__).parents[2] / "src"
    assert main(["tokenizer", "train", "--vocab-size", "512", "--out", str(vocabulary), str(source)]) == 0
    books = str(folder / "books")
    assert main(["data", "prepare", books, "--out", str(data), "--tokenizer", str(vocabulary)]) == 0
    arguments = [*train_arguments(folder, RUN), "--data", str(data), "--out", str(folder / SUBWORDS), "--keep", "1"]
    assert main([*arguments, "--set", "train.save_every=0", "--set", "eval.every=0"]) == 0


def make_export(folder: Path) -> None:
    """`folder/hf`: a run as transformers loads it."""
    assert main(["export", str(folder / RUN), str(folder / "hf")]) == 0


def make_model(folder: Path) -> None:
    """`folder/box`: a run packed as a model of the box is."""
    assert main(["models", "pack", str(folder / SUBWORDS), "--name", "box", "--out", str(folder / "box")]) == 0


def make_state(folder: Path) -> None:
    """`folder/tuned.state`: an initial state that was tuned for a run."""
    save_state(load_run(folder / RUN).model, folder / "tuned.state")


def make_all(folder: Path) -> None:
    """Files of every kind."""
    make_data(folder)
    for system in (RUN, "memorizing"):
        make_run(folder, system)
    make_subwords(folder)
    make_export(folder)
    make_model(folder)
    make_state(folder)


def forge_memory(path: Path, out: Path, change: Callable[[dict[str, Any], dict[str, torch.Tensor]], None]) -> Path:
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
        self.files = [p for p in found if p.stat().st_size and not {*p.relative_to(path).parts} & {*leave_out}]

    def one(self) -> tuple[Path, int, int]:
        """File, position and mask of the next one: half of them in files of up to 10 kB."""
        small = [p for p in self.files if p.stat().st_size <= 10_000]
        choice = small if small and self.random.random() < 0.5 else self.files
        file = self.random.choices(choice, [p.stat().st_size for p in choice])[0]
        return file, self.random.randrange(file.stat().st_size), self.random.randrange(1, 256)


def reseal(path: Path) -> None:
    """The manifest of a folder anew, with the hashes of its files, as somebody would who plants something."""
    manifest = json.loads((path / "manifest.json").read_text())
    manifest.pop("sha256")
    manifest["files"] = door.list_files(path)
    (path / "manifest.json").write_text(door.seal_json(json.dumps(manifest)))


def fresh_copy(path: Path, out: Path) -> Path:
    shutil.rmtree(out, ignore_errors=True)
    return Path(shutil.copytree(path, out))
