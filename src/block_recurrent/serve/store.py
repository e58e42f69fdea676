"""Named memories on disk, as files of `brt read`. Only one process at a time may use the folder.

`NAME` is a memory, `NAME@POSITION` a checkpoint of its trail. All changes are single atomic writes: a process that is
killed at any moment leaves each memory in its old or its new state.
"""

from __future__ import annotations

import os
import re
import threading
import time
import uuid
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from block_recurrent.errors import BlockRecurrentError, ConfigError, FileFormatError, OutputError
from block_recurrent.hub.manifest import NAME as EXPORT_MANIFEST
from block_recurrent.inference.memory_diff import difference
from block_recurrent.inference.session_file import MemoryFile, load_session, read_memory_file, save_session
from block_recurrent.inference.session_state import SessionState
from block_recurrent.inference.trail import SUFFIX, Place, Trail, checkpoint_path, collect, locked, save_checkpoint
from block_recurrent.io.door import MANIFEST
from block_recurrent.model.memory_file import load_header
from block_recurrent.models import CONFIG
from block_recurrent.serve.limits import Limits, RequestError
from block_recurrent.serve.reading import Prefix, Served, Tokens

NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
REFERENCE = rf"({NAME})(?:@(\d{{1,18}}))?"
CACHED = 16
"""Number of memories to keep loaded."""


@dataclass(frozen=True)
class Memory:
    """The header of a memory: everything except the tensors."""

    name: str
    model_hash: str
    model_name: str
    tokens: int
    text_hash: str
    text_bytes: int
    recent: tuple[int, ...]
    held: bytes
    notes: dict[str, Any]

    @property
    def trail(self) -> Trail:
        return Trail.of(self.notes)


class Store:
    """All memories of a folder. Methods are thread-safe, and block on the disk."""

    def __init__(self, folder: Path, limits: Limits) -> None:
        self.folder, self.limits = folder, limits
        self.notes: list[str] = []
        """Problems with files of the folder."""
        self._lock, self._cache_lock = threading.RLock(), threading.Lock()
        self._cache: OrderedDict[Path, tuple[int, SessionState]] = OrderedDict()
        self._known: dict[str, Memory] = {}
        self._reserved: Counter[str] = Counter()
        """Uses of checkpoints by work in progress: the memories that it continues may be deleted meanwhile."""

    @contextmanager
    def opened(self) -> Iterator[Store]:
        """Lock the folder, and delete temporary files of killed processes."""
        for name in (CONFIG, MANIFEST, EXPORT_MANIFEST):
            if (self.folder / name).exists():
                raise ConfigError(
                    f"'{self.folder}' contains '{name}': it is a run, a model or prepared data; choose another folder "
                    "for the memories"
                )
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OutputError(f"the folder '{self.folder}' can't be created: {error.strerror or error}") from None
        with locked(self.folder):
            collect(self.folder)
            for path in sorted(self.folder.glob(f"*{SUFFIX}")):
                try:
                    name = self.checked_name(path.name.removesuffix(SUFFIX))
                    self._known[name] = _memory(name, path)
                except BlockRecurrentError as error:
                    self.notes.append(f"'{path.name}' is ignored: {error}")
            yield self

    # ---- Reading ----------------------------------------------------------------------------------------------------

    # Without the lock, which is held while a memory is written: the event loop and readers must not wait for that.

    def list(self) -> list[Memory]:
        return sorted(self._known.copy().values(), key=lambda memory: memory.name)

    def get(self, name: str) -> Memory:
        if (memory := self._known.get(self.checked_name(name))) is None:
            raise RequestError(404, f"there is no memory '{name}': GET /v1/memories lists them")
        return memory

    def load(self, reference: str, model: Served) -> SessionState:
        """The state of a memory, or of a checkpoint of its trail."""
        return self._load(self.path_of(reference), model)

    def load_place(self, place: Place, model: Served) -> SessionState:
        return self._load(checkpoint_path(self.folder, place), model)

    def _load(self, path: Path, model: Served) -> SessionState:
        with self._cache_lock, there(path):
            stamp = path.stat().st_mtime_ns
            if path in self._cache and self._cache[path][0] == stamp:
                self._cache.move_to_end(path)
                state = self._cache[path][1]
                if state.memory.fingerprint == model.engine.fingerprint():
                    return state
        state = load_session(path, model.engine, model.tokenizer, model.name).state
        _check_fits(state, model)
        self._remember(path, stamp, state)
        return state

    def file(self, reference: str) -> MemoryFile:
        return read_memory_file(self.path_of(reference))

    def diff(self, a: str, b: str) -> dict[str, Any]:
        mine, theirs = self.file(a), self.file(b)
        layers = [vars(row) for row in difference(mine, theirs)]
        same_text = mine.text_hash == theirs.text_hash
        return {"tokens": [mine.tokens, theirs.tokens], "same_text": same_text, "layers": layers}

    def find_prefix(self, model: Served, tokens: Sequence[Tokens], least: int = 1) -> tuple[Trail, Prefix] | None:
        """A trail whose last checkpoint has the longest prefix of these tokens, without the last `least`."""
        trails = [memory.trail for memory in self._known.copy().values()]
        known = {
            place.prefix: Trail(t.places[: i + 1]) for t in trails for i, place in enumerate(t.places) if place.prefix
        }
        total = sum(map(len, tokens))
        prefix, found, position, size = Prefix.of(model), None, 0, model.call_tokens
        for piece in tokens if known else ():
            start = 0
            while start < len(piece):
                part = piece[start : start + size - position % size]
                prefix, start, position = prefix.then(part), start + len(part), position + len(part)
                if position % size == 0 and position <= total - least and (trail := known.get(prefix.key())):
                    found = trail, prefix
        return found

    def trace_to(self, place: Place) -> dict[str, Any]:
        """The trace of the state up to a checkpoint, by a memory that has it."""
        own = (m for m in self._known.copy().values() if place in m.trail.places)
        return next((trace for m in own if (trace := _notes_at(m, place.position).get("trace"))), {})

    def path_of(self, reference: str) -> Path:
        match = re.fullmatch(REFERENCE, reference, re.ASCII)
        if not match:
            raise RequestError(400, f"{_shown(reference)} is not a memory: give NAME, or NAME@POSITION")
        memory = self.get(match[1])
        if match[2] is None or int(match[2]) == memory.tokens:
            return self._path(memory.name)
        return checkpoint_path(self.folder, memory.trail.at(int(match[2])))

    def checked_name(self, name: str) -> str:
        if not re.fullmatch(NAME, name, re.ASCII):
            raise RequestError(
                400,
                f"{_shown(name)} is not a valid name: use 1 to 64 letters, digits, '.', '_' or '-', and begin "
                "with a letter or digit",
            )
        return name

    # ---- Changing ---------------------------------------------------------------------------------------------------

    def check_free(self, name: str) -> None:
        """Raise an error if a memory of this name exists."""
        if self.checked_name(name) in self._known:
            raise RequestError(409, f"memory '{name}' already exists: choose another name, or delete it first")

    def check_new(self, name: str) -> None:
        """Raise an error unless a memory of this name can be saved."""
        if self.checked_name(name) not in self._known and len(self._known) >= self.limits.memories:
            raise RequestError(409, f"there are {len(self._known)} memories, which is the limit: delete one first")

    def checkpoint(self, model: Served, state: SessionState, prefix: str | None) -> Place:
        """Save a checkpoint, reserved until it is released."""
        with self._lock:
            place = save_checkpoint(model.session(state), self.folder, prefix)
            self._reserved[place.id] += 1
            return place

    def reserve(self, trail: Trail) -> Trail:
        """The checkpoints that still exist; they do until they are released."""
        with self._lock:
            there = self._there(trail)
            self._reserved.update(place.id for place in there.places)
            return there

    def release(self, trail: Trail) -> None:
        """The trail has been saved, or will not be: delete its checkpoints that are not in use."""
        with self._lock:
            self._reserved -= Counter(place.id for place in trail.places)
            self._drop(trail)

    def save(self, name: str, model: Served, state: SessionState, trail: Trail, notes: dict[str, Any]) -> Memory:
        """Save a memory under a name, replacing an existing one."""
        with self._lock:
            self.check_new(name)
            old = self._known.get(name)
            facts = {"id": uuid.uuid4().hex, "created": int(time.time()), "model": model.id} | notes
            save_session(model.session(state), self._path(name), facts | self._there(trail).to_notes())
            self._known[name] = _memory(name, self._path(name))
            self._remember(self._path(name), self._path(name).stat().st_mtime_ns, state)
            self._drop(old.trail if old else Trail())
            return self._known[name]

    def trail_to(self, reference: str, name: str) -> tuple[Trail, dict[str, Any]]:
        """To continue from a memory: its trail, with the memory as its last checkpoint, reserved; and its notes.

        A memory that is not at a checkpoint becomes one: the same file under a second name.
        """
        with self._lock:
            path, memory = self.path_of(reference), self.get(reference.split("@")[0])
            at = int(reference.split("@")[1]) if "@" in reference else memory.tokens
            notes = _notes_at(memory, at)
            if name != memory.name:
                kept = {key: notes[key] for key in ("title", "trace") if key in notes}
                notes = kept | {"parent": memory.notes.get("id"), "parent_at": at}
            if at in (place.position for place in memory.trail.places):
                place = memory.trail.at(at)
            else:
                place = Place(at, uuid.uuid4().hex)
                target = checkpoint_path(self.folder, place)
                target.parent.mkdir(exist_ok=True)
                with there(path):
                    os.link(path, target)
            return self.reserve(memory.trail.until(at).add(place, self.limits.trail)), notes

    def fork(self, reference: str, name: str, model: Served) -> Memory:
        with self._lock:
            self.check_free(name)
            self.check_new(name)
            trail, notes = self.trail_to(reference, name)
            try:
                return self.save(name, model, self.load(reference, model), trail, notes)
            finally:
                self.release(trail)

    def rewind(self, name: str, position: int, model: Served) -> Memory:
        with self._lock:
            memory = self.get(name)
            place = memory.trail.at(position)
            trail = memory.trail.until(position).add(place, self.limits.trail)
            return self.save(name, model, self.load_place(place, model), trail, _notes_at(memory, position))

    def rename(self, old: str, new: str) -> Memory:
        with self._lock:
            self.get(old)
            self.check_free(new)
            with there(self._path(old)):
                os.replace(self._path(old), self._path(new))
            self._known[new] = replace(self._known.pop(old), name=new)
            return self._known[new]

    def delete(self, name: str) -> None:
        with self._lock:
            memory = self.get(name)
            self._path(name).unlink(missing_ok=True)
            del self._known[name]
            self._drop(memory.trail)

    def take_in(self, name: str, path: Path, models: Sequence[Served]) -> Memory:
        """Save an uploaded memory file, if it is intact and belongs to one of the models. Its notes are not trusted."""
        made_by = str(load_header(path).get("fingerprint"))
        model = next((m for m in models if m.engine.fingerprint() == made_by), models[0])
        state = load_session(path, model.engine, model.tokenizer, model.name).state
        _check_fits(state, model)
        return self.save(name, model, state, Trail(), {})

    # ---- Inside -----------------------------------------------------------------------------------------------------

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}{SUFFIX}"

    def _there(self, trail: Trail) -> Trail:
        return Trail(tuple(place for place in trail.places if checkpoint_path(self.folder, place).is_file()))

    def _remember(self, path: Path, stamp: int, state: SessionState) -> None:
        with self._cache_lock:
            self._cache[path] = stamp, state
            self._cache.move_to_end(path)
            while len(self._cache) > CACHED:
                self._cache.popitem(last=False)

    def _drop(self, trail: Trail) -> None:
        """Delete its checkpoints that no memory uses any more."""
        named = {place.id for memory in self._known.values() for place in memory.trail.places}
        for place in trail.places:
            if place.id not in named and not self._reserved[place.id]:
                path = checkpoint_path(self.folder, place)
                path.unlink(missing_ok=True)
                with self._cache_lock:
                    self._cache.pop(path, None)


@contextmanager
def there(path: Path) -> Iterator[None]:
    """Use a file that another request, or a user, may have deleted."""
    try:
        yield
    except FileNotFoundError:
        name = path.name.removesuffix(SUFFIX)
        raise RequestError(404, f"'{name}' was deleted in the meantime: GET /v1/memories lists the others") from None


def _memory(name: str, path: Path) -> Memory:
    header = load_header(path)
    try:
        extra = header["extra"]
        held = bytes.fromhex(extra["held"])
        text_bytes = int(extra["text"]["length"]) + len(held)
        recent = tuple(int(token) for token in extra["recent"])
        facts = str(header["fingerprint"]), str(extra["model_name"]), int(header["tokens_read"][0])
        memory = Memory(name, *facts, str(extra["text_hash"]), text_bytes, recent, held, dict(extra.get("notes", {})))
        assert memory.trail is not None
        return memory
    except (KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
        raise FileFormatError(
            f"'{path}' is not the memory of a session: its header lacks or misstates {error}"
        ) from None


def _notes_at(memory: Memory, position: int) -> dict[str, Any]:
    """The notes of a memory at a position, with its trace cut there."""
    notes = {key: value for key, value in memory.notes.items() if key != "trail"}
    if trace := notes.get("trace"):
        count = sum(at <= position for at in trace["at"])
        notes["trace"] = {name: values[:count] for name, values in trace.items()}
    return notes


def _check_fits(state: SessionState, model: Served) -> None:
    """An uploaded file may contain anything: check that its shapes and values are possible for this model."""
    state.memory.check_same_shape(model.engine.config, "the model that is served")
    mark = model.tokenizer.eos_token_id
    ids = [state.pending, *state.recent]
    fits = all(0 <= token <= mark for token in ids) and state.position >= 0
    for mine, theirs in zip(state.memory.layers, model.beginning.memory.layers, strict=True):
        tensors, wanted = mine.named_tensors(), theirs.named_tensors()
        fits = fits and tensors.keys() == wanted.keys()
        for name, x in tensors.items() if fits else ():
            # With --dtype bfloat16, caches are bfloat16.
            dtypes = {wanted[name].dtype} | ({torch.bfloat16} if name != "state" else set())
            fits = fits and x.dtype in dtypes and bool(x.isfinite().all())
            fits = fits and ("recall" in name or x.shape == wanted[name].shape)
    if not fits:
        raise FileFormatError("the memory file has values that are impossible for this model: it is damaged")


def _shown(name: str) -> str:
    return repr(name if len(name) <= 80 else name[:80] + "…")
