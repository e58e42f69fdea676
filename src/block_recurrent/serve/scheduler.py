"""One thread per model makes all calls of its engine.

Each generation has a lane; all lanes share one `decode_many`, at any positions, and join and leave at any token.
A short text to be read has one too. Other work, such as reading or scoring a segment, runs between decode calls, in
the order of requests:
a read submits its next segment when the last is done, so reads take turns. After such a call the lanes get as much
time as it took. Neither a lane's logits nor its random numbers depend on other lanes: its text is the one that
it would have alone.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from block_recurrent.errors import InputError
from block_recurrent.inference import Engine
from block_recurrent.inference.sampling import Choice
from block_recurrent.inference.writer import Writer, WrittenToken, chosen
from block_recurrent.model.memory import DocumentMemory

T = TypeVar("T")


class Step(NamedTuple):
    """A generated token."""

    choice: int
    """Index of its text in the request."""
    written: WrittenToken
    top: list[tuple[int, float]]
    """The most likely tokens and their log-probabilities, as many as requested."""
    ended: str | None
    """Why the text ended, for its last token."""


class Lane:
    """One text being generated. The lanes of a request share a queue of generated tokens."""

    def __init__(self, index: int, writer: Writer, queue: asyncio.Queue[Step | Exception], top: int) -> None:
        self.index, self.writer, self.queue, self.top = index, writer, queue, top
        self.gone = False

    @property
    def next(self) -> tuple[int, DocumentMemory]:
        return self.writer.state.pending, self.writer.state.memory

    @property
    def ended(self) -> bool:
        return self.writer.ended is not None

    def advance(self, choice: Choice, logits: Tensor, memory: DocumentMemory) -> Step | Exception:
        try:
            top: list[tuple[int, float]] = []
            if self.top:
                best = logits.double().log_softmax(-1).topk(min(self.top, len(logits)))
                top = list(zip(best.indices.tolist(), best.values.tolist(), strict=True))
            return Step(self.index, self.writer.accept(choice, memory), top, self.writer.ended)
        except InputError as error:
            self.gone = True
            return error


class PromptLane:
    """A short text being read: a token per call, and the memory after the last in its queue."""

    def __init__(self, tokens: NDArray[np.int64], memory: DocumentMemory) -> None:
        self.queue: asyncio.Queue[DocumentMemory | Exception] = asyncio.Queue()
        self.gone = False
        self._left, self._memory = tokens.tolist()[::-1], memory

    @property
    def next(self) -> tuple[int, DocumentMemory]:
        return self._left[-1], self._memory

    @property
    def ended(self) -> bool:
        return not self._left

    def advance(self, memory: DocumentMemory) -> DocumentMemory | None:
        self._left.pop()
        self._memory = memory
        return None if self._left else memory


AnyLane = Lane | PromptLane


class Scheduler(threading.Thread):
    """Start it inside the event loop that receives its results."""

    def __init__(self, engine: Engine, lanes: int) -> None:
        super().__init__(name="scheduler", daemon=True)
        self.engine, self.most = engine, lanes
        self.loop = asyncio.get_running_loop()
        self.lanes: list[AnyLane] = []
        self.waiting: list[AnyLane] = []
        self.work: deque[tuple[Callable[[], Any], asyncio.Future[Any]]] = deque()
        self.seconds = {"decode": 0.0, "other": 0.0}
        self.calls = {"decode": 0, "other": 0}
        self._wake = threading.Condition()
        self._owed = 0.0
        self._stopped = False

    async def call(self, work: Callable[[], T]) -> T:
        """Run `work` in the scheduler's thread, in its turn, and return its result."""
        future: asyncio.Future[T] = self.loop.create_future()
        with self._wake:
            self.work.append((work, future))
            self._wake.notify()
        return await future

    async def write(self, writers: Sequence[Writer], top: int = 0) -> AsyncGenerator[Step]:
        """The tokens of all texts of a request, as they are generated. Closing the iterator frees the lanes."""
        queue: asyncio.Queue[Step | Exception] = asyncio.Queue()
        lanes = [Lane(index, writer, queue, top) for index, writer in enumerate(writers)]
        self._enter(lanes)
        try:
            left = len(lanes)
            while left:
                step = await queue.get()
                if isinstance(step, Exception):
                    raise step
                left -= step.ended is not None
                yield step
        finally:
            for lane in lanes:
                lane.gone = True

    async def read(self, tokens: NDArray[np.int64], memory: DocumentMemory) -> DocumentMemory:
        """The memory after a few tokens, which are read in the calls that generate other texts."""
        lane = PromptLane(tokens, memory)
        self._enter([lane])
        try:
            after = await lane.queue.get()
        finally:
            lane.gone = True
        if isinstance(after, Exception):
            raise after
        return after

    def stop(self) -> None:
        with self._wake:
            self._stopped = True
            self._wake.notify()

    def run(self) -> None:
        while True:
            with self._wake:
                while not (self.work or self.waiting or self.lanes or self._stopped):
                    self._wake.wait()
                if self._stopped:
                    return
                self._admit()
                work = self.work.popleft() if self.work and (not self.lanes or self._owed <= 0) else None
            if work:
                self._do(*work)
            if self.lanes:
                self._decode()
            else:
                self._owed = 0.0

    def _enter(self, lanes: Sequence[AnyLane]) -> None:
        with self._wake:
            self.waiting.extend(lanes)
            self._wake.notify()

    def _admit(self) -> None:
        """Give lanes to waiting texts, first of the request that has the fewest, so that none starves others."""
        self.lanes = [lane for lane in self.lanes if not (lane.gone or lane.ended)]
        self.waiting = [lane for lane in self.waiting if not lane.gone]
        while self.waiting and len(self.lanes) < self.most:
            busy = [lane.queue for lane in self.lanes]
            lane = min(self.waiting, key=lambda lane: busy.count(lane.queue))
            self.waiting.remove(lane)
            self.lanes.append(lane)

    def _do(self, work: Callable[[], Any], future: asyncio.Future[Any]) -> None:
        if future.cancelled():  # the client has disconnected
            return
        began = time.perf_counter()
        try:
            result, error = work(), None
        except Exception as raised:
            result, error = None, raised
        self._owed += self._spent("other", began)
        self._later(_resolve, future, result, error)

    def _decode(self) -> None:
        began, lanes = time.perf_counter(), self.lanes
        steps: list[Any]
        try:
            logits, memories = self.engine.decode_many(*zip(*(lane.next for lane in lanes), strict=True))
            steps = _advanced(lanes, logits, memories)
        except Exception as error:  # reported to all lanes; the scheduler continues
            steps = [error] * len(lanes)
            self.lanes = []
        self._owed = max(0.0, self._owed - self._spent("decode", began))
        self._later(_deliver, lanes, steps)

    def _later(self, function: Callable[..., None], *arguments: Any) -> None:
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(function, *arguments)

    def _spent(self, what: str, began: float) -> float:
        seconds = time.perf_counter() - began
        self.seconds[what] += seconds
        self.calls[what] += 1
        return seconds


def _advanced(lanes: Sequence[AnyLane], logits: Tensor, memories: Sequence[DocumentMemory]) -> list[Any]:
    """What each lane delivers after a call."""
    rows = [row for row, lane in enumerate(lanes) if isinstance(lane, Lane)]
    choices = iter(chosen([lane.writer for lane in lanes if isinstance(lane, Lane)], logits[rows]) if rows else ())
    return [
        lane.advance(next(choices), own, memory) if isinstance(lane, Lane) else lane.advance(memory)
        for lane, own, memory in zip(lanes, logits, memories, strict=True)
    ]


def _resolve(future: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
    if future.cancelled():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)


def _deliver(lanes: list[AnyLane], steps: list[Any]) -> None:
    for lane, step in zip(lanes, steps, strict=True):
        if step is not None:
            lane.queue.put_nowait(step)
