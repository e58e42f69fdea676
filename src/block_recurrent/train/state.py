"""The contents of a checkpoint, and how training resumes from it exactly.

model.safetensors, optimizer.safetensors    one process, or DDP
sharded/                                    FSDP: both, by torch.distributed.checkpoint
memory-00000-of-00002.safetensors           the memories of the lanes of rank 0
random-00000-of-00002.safetensors           torch's random number generators on rank 0
state.json                                  step, tokens seen, best validation, the data cursor, versions

A thread writes and hashes it from copies on the CPU while training continues.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor, distribute_tensor

from block_recurrent import runtime as rt
from block_recurrent.checkpoint import (
    SHARDED,
    WEIGHT_PREFIX,
    WEIGHTS,
    Checkpoint,
    aside_of,
    check_fits,
    finish,
    prune,
    read_sharded,
    read_weights,
    step_folder,
    step_of,
    verify,
    write_tensors,
)
from block_recurrent.errors import CheckpointError, FileFormatError
from block_recurrent.io import door
from block_recurrent.io.atomic import remove
from block_recurrent.io.tensors import check_finite, read_tensors
from block_recurrent.model.language_model import BlockRecurrentLM
from block_recurrent.model.memory import DocumentMemory
from block_recurrent.runtime import Runtime
from block_recurrent.train.sharding import local

OPTIMIZER = "optimizer.safetensors"
OPTIMIZER_PREFIX = "optimizer/"
STATE = "state.json"


@dataclass
class Counters:
    """Progress of a run, as plain values for state.json."""

    step: int = 0
    tokens_seen: int = 0
    best_bits: float | None = None  # lowest bits per token on validation so far
    cursor: dict[str, Any] = field(default_factory=dict)  # position of the data stream; empty at the beginning


@dataclass
class TrainingState:
    """Everything that changes while a model trains, on this process."""

    runtime: Runtime
    model: BlockRecurrentLM
    optimizer: torch.optim.Optimizer
    memories: list[DocumentMemory]  # one per group of lanes (gradient accumulation), in the order of lanes
    counters: Counters = field(default_factory=Counters)
    _saving: Future[None] | None = None

    def __post_init__(self) -> None:
        # The threads that write a checkpoint communicate while training does: in a group of their own, on CPUs.
        self._group = dist.new_group(backend="gloo") if dist.is_initialized() else None

    @contextmanager
    def saving(self) -> Iterator[None]:
        """The context of `save`: at its end, a checkpoint that was begun has been written."""
        with ThreadPoolExecutor(1, "checkpoint") as self._thread:
            yield

    def save(self, run: Path, validation_bits: float | None, keep: int) -> Path:
        """Begin to write a checkpoint: a thread writes it atomically, and then deletes all others but the newest `keep`
        and the best. An error of the previous one, on any process, is raised on all."""
        self.wait_for_save()
        path, is_main = step_folder(run, self.counters.step), self.runtime.is_main
        self._together(path, None, lambda: self._prepare(aside_of(path)))
        write = self._snapshot(aside_of(path))

        def work() -> None:
            self._together(path, self._group, write)
            self._together(path, self._group, lambda: finish(path, step_of(path), validation_bits) if is_main else None)
            if is_main:
                prune(run, keep)

        self._saving = self._thread.submit(work)
        return path

    def wait_for_save(self) -> None:
        """Wait until the checkpoint that was begun is complete; raises the error of a failed one."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.result()

    def _together(self, path: Path, group: dist.ProcessGroup | None, work: Callable[[], None]) -> None:
        """Run a part of saving on every process; if it fails on any, clean up and raise the error on all."""
        problem = None
        try:
            work()
        except FileFormatError as error:  # a value that is not finite
            problem = f"{error}; lower schedule.learning_rate or set train.clip, and resume"
        except (OSError, CheckpointException) as error:
            reason = f"{getattr(error, 'strerror', None) or error}".replace("\n", " ")
            hint = "free some space, and " if "No space left" in reason or "quota" in reason else ""
            problem = f"{reason}; {hint}rerun the same command to resume"
        problems = [found for found in self.runtime.gather(problem, group) if found]
        if problems:
            if self.runtime.is_main:
                remove(aside_of(path))
            raise CheckpointError(
                f"the checkpoint of step {step_of(path)} can't be written to '{path.parent}': {problems[0]} "
                "(earlier checkpoints are intact)"
            )

    def _prepare(self, aside: Path) -> None:
        if self.runtime.is_main:
            _fresh_folder(aside)
        if self._is_sharded:
            check_finite({name: local(x) for name, x in self._all_tensors().items()})

    @property
    def _is_sharded(self) -> bool:
        return any(isinstance(p, DTensor) for p in self.model.parameters())

    def _snapshot(self, aside: Path) -> Callable[[], None]:
        """Copy everything that training changes; returns the function that writes the copies."""
        is_main, suffix = self.runtime.is_main, _suffix(self.runtime.rank, self.runtime.world)
        weights = optimizer = sharded = None
        if self._is_sharded:
            writer = dcp.FileSystemWriter(aside / SHARDED)
            saved = dcp.async_save(self._all_tensors(), storage_writer=writer, process_group=self._group)
            sharded = cast(Future[Any], saved)  # the other type is that of stagers with their own threads
        elif is_main:
            weights, optimizer = _copied(self.model.state_dict()), _copied(self._optimizer_tensors())
        # A memory is never changed in place. The checkpoint identifies the model: hashing all weights would be slow,
        # and is impossible for sharded ones.
        memory = self.memories[0] if len(self.memories) == 1 else DocumentMemory.cat(self.memories)
        memory = replace(memory, maker=None, fingerprint=f"checkpoint of step {self.counters.step}").to("cpu")
        random = rt.random_state(self.runtime.device)
        state = json.dumps(asdict(self.counters) | {"facts": self.runtime.facts()})

        def write() -> None:
            if sharded is not None:
                sharded.result()
            if weights is not None and optimizer is not None:
                write_tensors(aside / WEIGHTS, weights, {"config": json.dumps(self.model.config.to_dict())})
                write_tensors(aside / OPTIMIZER, optimizer)
            memory.save(aside / f"memory-{suffix}")
            write_tensors(aside / f"random-{suffix}", random)
            if is_main:
                (aside / STATE).write_text(state + "\n")

        return write

    def check(self, path: Path) -> Checkpoint:
        """The checkpoint, if training can resume from it, and its tensors are those of this model and optimizer."""
        return check_resumable(path, self._check_part)

    def _check_part(self, file: Path, tensors: dict[str, Tensor]) -> None:
        if file.name == WEIGHTS:
            check_fits(tensors, dict(self.model.named_parameters()), file)
        elif file.name == OPTIMIZER:
            check_fits(tensors, self._optimizer_tensors(), file)
        elif file.name.startswith("memory-"):
            lanes = self._lanes_in_file(int(file.stem[-5:]))
            found = DocumentMemory.load(file).named_tensors()
            check_fits(found, DocumentMemory.empty(self.model.config, lanes, "meta").named_tensors(), file)
        elif file.name.startswith("random-"):
            try:
                torch.Generator().set_state(tensors["cpu"])
            except (KeyError, TypeError, RuntimeError) as error:
                raise FileFormatError(f"its random state is not one of torch's ({door.first_line(error)})") from None

    def load(self, path: Path, seed: int) -> list[str]:
        """Resume from a checkpoint that `check` has accepted; returns notes about what has changed."""
        state = read_state(path)
        facts = state.pop("facts")
        self.counters = Counters(**state)
        self._read_tensors(path)
        for group in self.optimizer.param_groups:
            if "step" in group:
                group["step"] = self.counters.step
        self._read_memory(path, facts["world"])
        notes = [
            f"{name} was {there}, now it is {here}"
            for name, here in self.runtime.facts().items()
            if (there := facts.get(name)) != here
        ]
        if facts["world"] == self.runtime.world:
            random, _ = read_tensors(path / f"random-{_suffix(self.runtime.rank, self.runtime.world)}")
            rt.set_random_state(random, self.runtime.device)
        else:
            rt.seed(seed + self.counters.step, self.runtime.rank)
            notes.append(
                f"lanes are redistributed to {self.runtime.world} processes: each keeps its document and memory, "
                "but dropout uses different random numbers, and sums are rounded in a different order"
            )
        return notes

    def load_weights(self, path: Path) -> None:
        """Load only the weights of a checkpoint."""
        weights, own = read_weights(path), dict(self.model.named_parameters())
        check_fits(weights, own, path)
        for name, p in own.items():
            _assign(p, weights[name])

    def _optimizer_tensors(self) -> dict[str, Tensor]:
        return {
            f"{name}/{key}": value
            for name, p in self.model.named_parameters()
            for key, value in self.optimizer.state[p].items()
        }

    def _all_tensors(self) -> dict[str, Tensor]:
        weights = {WEIGHT_PREFIX + name: p.detach() for name, p in self.model.named_parameters()}
        return weights | {OPTIMIZER_PREFIX + name: x for name, x in self._optimizer_tensors().items()}

    def _read_tensors(self, path: Path) -> None:
        if not (path / WEIGHTS).is_file():
            read_sharded(self._all_tensors(), path)
            return
        self.load_weights(path)
        stored, _ = read_tensors(path / OPTIMIZER)
        for name, x in self._optimizer_tensors().items():
            _assign(x, stored[name])

    def _read_memory(self, path: Path, world: int) -> None:
        """The lanes of this process, from the files that contain them."""
        groups, size = len(self.memories), self.memories[0].lanes
        first, in_file = self.runtime.rank * groups * size, self._lanes_in_file(world)
        files = range(first // in_file, -(-(first + groups * size) // in_file))
        loaded = [DocumentMemory.load(path / f"memory-{_suffix(rank, world)}") for rank in files]
        memory = (loaded[0] if len(loaded) == 1 else DocumentMemory.cat(loaded)).adopted_by(self.model)
        first -= files[0] * in_file
        self.memories = [
            (memory if memory.lanes == size else memory.select(range(first + g * size, first + (g + 1) * size))).to(
                self.runtime.device
            )
            for g in range(groups)
        ]

    def _lanes_in_file(self, world: int) -> int:
        """The lanes of each process, where so many have saved them."""
        lanes = len(self.memories) * self.memories[0].lanes * self.runtime.world
        if lanes % world:
            raise FileFormatError(f"its lanes can't be of {world} processes")
        return lanes // world


def check_resumable(
    path: Path, check_part: Callable[[Path, dict[str, Tensor]], None] = lambda file, tensors: None
) -> Checkpoint:
    """The checkpoint, if training can resume from it: complete, intact and finite, and `check_part` raises no error."""
    found = verify(path)
    try:
        state = read_state(path)
        if state["step"] != found.step:
            raise FileFormatError(f"its {STATE} belongs to step {state['step']}")
        for name in _files_to_resume(path, state["facts"]["world"]):
            if not (path / name).is_file():
                raise FileFormatError(f"it has no {name}")
        for file in sorted(path.glob("*.safetensors")):
            tensors, _ = read_tensors(file)
            check_finite(tensors)
            check_part(file, tensors)
    except FileFormatError as error:
        raise CheckpointError(f"checkpoint '{path}' can't be resumed: {error}") from None
    return found


def _files_to_resume(path: Path, world: int) -> Iterator[str]:
    """The files, apart from the state, that training reads from a checkpoint of `world` processes."""
    yield from (f"{SHARDED}/.metadata",) if (path / SHARDED).is_dir() else (WEIGHTS, OPTIMIZER)
    for rank in range(world):
        yield from (f"memory-{_suffix(rank, world)}", f"random-{_suffix(rank, world)}")


def read_state(path: Path) -> dict[str, Any]:
    """The contents of a checkpoint's state.json."""
    try:
        state = json.loads((path / STATE).read_bytes())
    except FileNotFoundError:
        raise FileFormatError(f"it has no {STATE}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise FileFormatError(f"{STATE} can't be read ({door.first_line(error)})") from None
    rules: dict[str, door.Rule] = {
        "step": door.is_count,
        "tokens_seen": door.is_count,
        "best_bits": lambda bits: bits is None or door.is_number(bits),
        "cursor": lambda cursor: isinstance(cursor, dict),
        "facts": lambda facts: isinstance(facts, dict) and door.is_count(facts.get("world")) and facts["world"] > 0,
    }
    door.check_schema(state, rules, STATE)
    return state


def _copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.detach().to("cpu", copy=True) for name, x in tensors.items()}


def _suffix(rank: int, world: int) -> str:
    return f"{rank:05d}-of-{world:05d}.safetensors"


def _fresh_folder(folder: Path) -> None:
    remove(folder)
    folder.mkdir(parents=True)


@torch.no_grad()
def _assign(target: Tensor, value: Tensor) -> None:
    """Copy a full tensor into one that may be sharded."""
    if isinstance(target, DTensor):
        value = distribute_tensor(value.to(target.device), target.device_mesh, target.placements)
    target.copy_(value)
