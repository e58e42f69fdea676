"""Files of every kind with something changed at random and hashes that fit, as somebody would make them on purpose."""

from __future__ import annotations

import contextlib
import io
import json
import random
import shutil
import tomllib
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tomli_w
from safetensors.torch import load_file, save_file
from torch import Tensor

from block_recurrent.checkpoint import list_checkpoints
from block_recurrent.cli.main import main
from block_recurrent.io import door
from block_recurrent.io.tensors import read_tensors
from block_recurrent.model.memory_file import hash_tensors
from tests.security.made import RUN, SUBWORDS, forge_memory, fresh_copy, reseal, train_arguments

ODD = (0, 1, -1, 7, 2**31, 2**40, 2**63, 2**70, 1.5, True, None, "", "x", [], [0], [[1]], {}, {"1": [3]}, float("nan"))


class Forgery(NamedTuple):
    """make(folder, rng) writes to `folder/forged`; use(folder) returns whether it was taken, and raises what it is not
    prepared for."""

    make: Callable[[Path, random.Random], object]
    use: Callable[[Path], bool]


def _commands(*commands: list[str]) -> bool:
    """Whether commands succeed; an exception that leaves one, or a message of two lines, is an AssertionError."""
    for command in commands:
        said = io.StringIO()
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(said):
            code = main(command)
        errors = [line for line in said.getvalue().splitlines() if not line.startswith("brt: note: ")]
        assert code in (0, 1, 2), said.getvalue()
        assert "Traceback" not in said.getvalue(), said.getvalue()
        if code:
            assert errors[-1].startswith("brt: error: "), said.getvalue()
            return False
    return True


def _memory(folder: Path, rng: random.Random) -> None:
    system = rng.choice([RUN, "memorizing"])
    for name in ("forged", "forged.memory"):
        _remove(folder / name)
    (folder / "forged").symlink_to(folder / system)
    forge_memory(folder / f"{system}.memory", folder / "forged.memory", lambda h, t: change_memory(h, t, rng))


def _use_memory(folder: Path) -> bool:
    memory = ["--memory", str(folder / "forged.memory")]
    score = ["score", str(folder / "forged"), str(folder / "text.txt"), *memory]
    return _commands(score, ["write", str(folder / "forged"), "--tokens", "4", "--go-on", *memory])


def change_memory(header: dict[str, Any], tensors: dict[str, Tensor], rng: random.Random) -> None:
    """One change of a header's value, of a setting, or of a tensor's shape or type."""
    where = rng.choice([*(name for name in ("config", "extra") if header[name]), "header", *["tensor"] * 3])
    if where == "tensor":
        change_tensor(tensors, rng)
        return
    values = header if where == "header" else header[where]
    values[rng.choice([key for key in values if key != "version"])] = rng.choice(ODD)


def change_tensor(tensors: dict[str, Tensor], rng: random.Random) -> None:
    """Another shape, another type, other numbers, or no tensor at all."""
    name = rng.choice(list(tensors))
    x = tensors[name]
    dim = rng.randrange(x.dim())
    changes: list[Callable[[], Tensor]] = [
        lambda: x.narrow(dim, 0, max(1, x.shape[dim] - rng.randrange(1, 4))),
        lambda: x.repeat_interleave(2, dim),
        lambda: x.transpose(0, dim),
        lambda: x.flatten(),
        lambda: x.double(),
        lambda: x.half(),
        lambda: x.int(),
        lambda: x * float("inf"),
        lambda: x * 1e30,
        lambda: x[..., :0],
    ]
    choice = rng.randrange(len(changes) + 1)
    if choice == len(changes):
        del tensors[name]
    else:
        tensors[name] = changes[choice]().clone().contiguous()


def change_value(values: Any, rng: random.Random) -> None:
    """One value of JSON or TOML, however deep: another one, or none."""
    places: list[tuple[Any, Any]] = []

    def collect(value: Any) -> None:
        for key in value if isinstance(value, dict) else range(len(value)):
            places.append((value, key))
            if isinstance(value[key], (dict, list)):
                collect(value[key])

    collect(values)
    owner, key = rng.choice(places)
    if rng.random() < 0.2:
        del owner[key]
    else:
        owner[key] = rng.choice(ODD)


def _checkpoint(folder: Path, rng: random.Random) -> None:
    _remove(folder / "forged")
    run = fresh_copy(folder / rng.choice([RUN, "memorizing"]), folder / "forged")
    *older, newest = list_checkpoints(run)
    for path in older:
        shutil.rmtree(path)
    file = rng.choice(sorted(newest.iterdir()))
    if file.name.startswith("memory-"):
        forge_memory(file, file, lambda header, tensors: change_memory(header, tensors, rng))
    elif file.suffix == ".safetensors":
        tensors = load_file(file)
        change_tensor(tensors, rng)
        save_file(tensors, file)
    else:
        values = json.loads(file.read_text())
        is_manifest = values.pop("sha256", None) is not None
        change_value(values, rng)
        text = json.dumps(values)
        file.write_text(door.seal_json(text) if is_manifest else text)
        if is_manifest:
            return
    reseal(newest)


def _resume(folder: Path) -> bool:
    system = tomllib.loads((folder / "forged" / "config.toml").read_text())["system"]
    resume = [*train_arguments(folder, system, 3), "--out", str(folder / "forged")]
    scored = _commands(["score", str(folder / "forged"), str(folder / "text.txt")])
    return _commands(resume) and scored


def _data(folder: Path, rng: random.Random) -> None:
    _remove(folder / "forged")
    data = fresh_copy(folder / "pieces", folder / "forged")
    path = data / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["sha256"]
    if rng.random() < 0.5:
        change_value(manifest, rng)
    else:  # tokens that the vocabulary does not have, with a hash that fits
        document = rng.choice(manifest["documents"])
        tokens = np.fromfile(data / f"{document['split']}.bin", "<u2")
        mine = tokens[document["offset"] : document["offset"] + document["tokens"]]
        mine[rng.randrange(len(mine))] = rng.choice([512, 513, 514, 1000, 40_000, 65_535])
        document["tokens_sha256"] = sha256(mine.tobytes()).hexdigest()
        tokens.tofile(data / f"{document['split']}.bin")
    path.write_text(door.seal_json(json.dumps(manifest)))


def _use_data(folder: Path) -> bool:
    data = ["--data", str(folder / "forged")]
    _remove(folder / "new")
    looked = [_commands(["data", name, str(folder / "forged")]) for name in ("info", "verify")]
    ran = _commands([*train_arguments(folder, RUN, 2), *data, "--out", str(folder / "new")])
    scored = [_commands(["eval", str(folder / SUBWORDS), *data, "--split", split]) for split in ("train", "test")]
    return ran and all(scored) and all(looked)


def _configuration(folder: Path, rng: random.Random) -> None:
    _remove(folder / "forged")
    run = fresh_copy(folder / rng.choice([RUN, "memorizing"]), folder / "forged")
    values = tomllib.loads((run / "config.toml").read_text())
    change_value(values, rng)
    with contextlib.suppress(TypeError):  # TOML has no null: as it was
        (run / "config.toml").write_text(door.seal_toml(tomli_w.dumps(values)))


def _use_configuration(folder: Path) -> bool:
    return _commands(["score", str(folder / "forged"), str(folder / "text.txt")])


def _tokenizer(folder: Path, rng: random.Random) -> None:
    _remove(folder / "forged")
    run = fresh_copy(folder / SUBWORDS, folder / "forged")
    path = run / "tokenizer.model"
    model = bytearray(path.read_bytes())
    for _ in range(rng.choice([1, 1, 1, 5, 100])):
        model[rng.randrange(len(model))] = rng.randrange(256)
    model = model[: rng.choice([len(model), len(model), rng.randrange(len(model))])]
    path.write_bytes(model)
    values = tomllib.loads((run / "config.toml").read_text())
    values["data"]["tokenizer"] = sha256(model).hexdigest()
    (run / "config.toml").write_text(door.seal_toml(tomli_w.dumps(values)))


def _use_tokenizer(folder: Path) -> bool:
    write = ["write", str(folder / "forged"), "--tokens", "4", "--go-on"]
    return _commands(["score", str(folder / "forged"), str(folder / "text.txt")], write)


def _export(folder: Path, rng: random.Random) -> None:
    from block_recurrent.hub.manifest import NAME, write_export_manifest

    _remove(folder / "forged")
    out = fresh_copy(folder / "hf", folder / "forged")
    (out / NAME).unlink()
    file = rng.choice([path for path in sorted(out.iterdir()) if path.suffix in (".json", ".safetensors")])
    if file.suffix == ".json":
        values = json.loads(file.read_text())
        change_value(values, rng)
        file.write_text(json.dumps(values))
    else:
        tensors = load_file(file)
        change_tensor(tensors, rng)
        save_file(tensors, file, {"format": "pt"})
    write_export_manifest(out)


def _packed(folder: Path, rng: random.Random) -> None:
    _remove(folder / "forged")
    out = fresh_copy(folder / "box", folder / "forged")
    if rng.random() < 0.7:
        card = json.loads((out / "card.json").read_text())
        del card["sha256"]
        change_value(card, rng)
        (out / "card.json").write_text(door.seal_json(json.dumps(card)))
    else:
        tensors = load_file(out / "model.safetensors")
        change_tensor(tensors, rng)
        save_file(tensors, out / "model.safetensors")
    reseal(out)


def _use_packed(folder: Path) -> bool:
    shown = _commands(["models", "show", str(folder / "forged")])
    return _commands(["score", str(folder / "forged"), str(folder / "text.txt")]) and shown


def _state(folder: Path, rng: random.Random) -> None:
    _remove(folder / "forged")
    tensors, seal = read_tensors(folder / "tuned.state")
    if rng.random() < 0.7:
        change_tensor(tensors, rng)
        seal["sha256"] = hash_tensors(tensors)
    else:
        seal[rng.choice(list(seal))] = str(rng.choice(ODD))
    save_file(tensors, folder / "forged", seal)


def _use_state(folder: Path) -> bool:
    score = ["score", str(folder / RUN), str(folder / "text.txt"), "--state", str(folder / "forged")]
    return _commands(score)


def _use_export(folder: Path) -> bool:
    """Through transformers, whose errors are its own: only a crash of the process would be one of ours."""
    from block_recurrent.hub.modeling import BlockRecurrentForCausalLM
    from block_recurrent.hub.tokenization import BlockRecurrentTokenizer

    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            tokenizer = BlockRecurrentTokenizer.from_pretrained(folder / "forged")
            model = BlockRecurrentForCausalLM.from_pretrained(folder / "forged")
            model.generate(**tokenizer("and what follows", return_tensors="pt"), max_new_tokens=3)
        except Exception:
            return False
    return True


def _remove(path: Path) -> None:
    path.unlink() if path.is_symlink() or path.is_file() else shutil.rmtree(path, ignore_errors=True)


FORGERIES = {
    "memory files": Forgery(_memory, _use_memory),
    "checkpoints": Forgery(_checkpoint, _resume),
    "prepared data": Forgery(_data, _use_data),
    "configurations": Forgery(_configuration, _use_configuration),
    "tokenizers": Forgery(_tokenizer, _use_tokenizer),
    "exports": Forgery(_export, _use_export),
    "packed models": Forgery(_packed, _use_packed),
    "tuned states": Forgery(_state, _use_state),
}
