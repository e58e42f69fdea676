"""Examples of a problem as a stream of segments for training, in stages that grow as they are mastered."""

from __future__ import annotations

import json
import math
import time
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from block_recurrent.data import Segment, SegmentStream
from block_recurrent.data.streams.segments import Cursor
from block_recurrent.data.tokenizers.base import Encoded, Tokenizer
from block_recurrent.errors import DataError
from block_recurrent.studies.curriculum import Curriculum, Stages
from block_recurrent.studies.tasks.problem import Example, Problem, batch_of


@dataclass(frozen=True)
class TaskTraining:
    """Training options of a task."""

    steps: int = 2000  # maximum number of batches
    cooldown: int = 200  # the last of these, over which the learning rate decays to zero
    lanes: int = 32
    learning_rate: float = 2e-3
    gate_rate: float = 3.0  # factor on the learning rate of gate biases
    mastered: float = 0.5  # bits per answer below which the next level starts
    finished: float = 0.02  # bits per answer at the last level below which the cooldown begins
    enough: int = 1000  # number of answers to judge a stage by
    earlier: float = 0.2  # share of batches from earlier levels
    seed: int = 0


class Symbols(Tokenizer):
    """The vocabulary of a task: symbols by number, without text."""

    sha256 = ""  # there is no file, and nothing to compare
    model = None

    def __init__(self, size: int) -> None:
        self.size = size

    def encode_piece(self, piece: bytes, begin: bool) -> Encoded:
        raise DataError("a memory task has symbols, not text")

    def safe_end(self, buffer: bytes) -> int:
        return len(buffer)

    def decode_bytes(self, tokens: ArrayLike, begin: bool = True) -> bytes:
        return " ".join(map(str, self.check(tokens).tolist())).encode()


def padded_length(problem: Problem, level: int, window: int) -> int:
    """Tokens of an example in whole blocks."""
    return -(-problem.length(level) // max(1, window)) * window  # the model's configuration refuses a window of 0


class TaskStream(SegmentStream):
    """Batches of examples, all lanes at one level; each example is a separate document.

    A segment is a whole example, as long as its level makes it: gradients reach back to its beginning. If the model's
    segment is shorter (Transformer-XL), an example is divided into several pieces of equal length, each an update.
    """

    observes = True

    def __init__(
        self,
        problem: Problem,
        levels: list[int],
        training: TaskTraining,
        window: int,
        pieces: int = 1,
        stages: Stages | None = None,
        part: tuple[int, int] = (0, 1),
    ) -> None:
        """stages: of another run, in batches; None: by mastery. part: rank, and number of processes."""
        self.problem, self.levels, self.training, self.window, self.pieces = problem, levels, training, window, pieces
        self.curriculum = Curriculum(training, levels, stages, training.enough, training.finished)
        rank, world = part
        self._mine = slice(rank * training.lanes // world, (rank + 1) * training.lanes // world)
        self._given = 0  # segments so far
        self._began = 0.0
        self._level, self._mask = levels[0], np.zeros((0, 0), bool)
        self._batch: Example | None = None

    @property
    def last_step(self) -> int | None:  # type: ignore[override]
        last = self.curriculum.last_step
        return None if last is None else last * self.pieces

    @property
    def fingerprint(self) -> str:
        """Everything that determines the examples."""
        what = {"levels": self.levels, "window": self.window, "pieces": self.pieces} | asdict(self.training)
        return f"{type(self.problem).__name__} {json.dumps(vars(self.problem) | what)}"

    def __next__(self) -> Segment:
        number, piece = divmod(self._given, self.pieces)
        self._given += 1
        self._began = time.perf_counter()
        if self._batch is None or piece == 0:
            self._batch = self._make(number + 1)
        length = self._batch.tokens.shape[1] // self.pieces
        here = slice(piece * length, (piece + 1) * length)
        tokens, targets, mask = (part[:, here] for part in self._batch)
        self._mask = mask
        starts = np.full(len(tokens), piece == 0)[self._mine]
        mine = np.ascontiguousarray
        return Segment(mine(tokens[self._mine]), mine(targets[self._mine]), mine(mask[self._mine]), starts)

    def _make(self, number: int) -> Example:
        """A batch from its number and the stages, so that a stream can be resumed inside it."""
        rng = np.random.default_rng([self.training.seed, number])
        top = self.curriculum.level_at(number)
        before = [level for level in self.levels if level < top]
        self._level = int(rng.choice(before)) if before and rng.random() < self.training.earlier else top
        longest = self._level if self.pieces == 1 else self.levels[-1]
        length = padded_length(self.problem, longest, self.window)
        return batch_of(self.problem, rng, self._level, self.training.lanes, length, self.problem.symbols)

    def observe(self, step: int, nats: NDArray[np.float32]) -> dict[str, float]:
        number = (step - 1) // self.pieces + 1
        top, bits = self.curriculum.level_at(number), nats[self._mask] / math.log(2)
        tokens = self.training.lanes * nats.shape[1]
        is_whole = step % self.pieces == 0
        if self._level < top:
            bits = bits[:0]
        if is_whole:
            self.curriculum.observe(number, bits.tolist())
        else:
            self.curriculum.recent.extend(bits.tolist())
        return {
            "level": self._level,
            "top_level": top,
            "tokens_read": tokens,
            "seconds": time.perf_counter() - self._began,
        }

    def state_dict(self) -> Cursor:
        return {"given": self._given} | self.curriculum.state_dict()

    def load_state_dict(self, state: Cursor) -> None:
        self._given = state["given"]
        self.curriculum.load_state_dict(state)
        number, piece = divmod(self._given, self.pieces)
        self._batch = self._make(number + 1) if piece else None
