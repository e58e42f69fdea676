"""One thread per model makes all calls of its engine.

Each generation has a lane; all lanes share one `decode_many`, at any positions, and join and leave at any token.
Other work, such as reading or scoring a segment, runs between decode calls, in the order of requests:
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

from torch import Tensor

from block_recurrent.errors import InputError
from block_recurrent.inference import Engine
from block_recurrent.inference.writer import Writer, WrittenToken

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


Steps = asyncio.Queue[Step | Exception]


class Lane:
    """One text being generated. The lanes of a request share a queue of generated tokens."""

    def __init__(self, index: int, writer: Writer, queue: Steps, top: int) -> None:
        self.index, self.writer, self.queue, self.top = index, writer, queue, top
        self.gone = False

    def advance(self, logits: Tensor, memory: Any) -> Step | Exception:
        try:
            top: list[tuple[int, float]] = []
            if self.top:
                best = logits.double().log_softmax(-1).topk(min(self.top, len(logits)))
                top = list(zip(best.indices.tolist(), best.values.tolist(), strict=True))
            return Step(self.index, self.writer.take(logits, memory), top, self.writer.ended)
        except InputError as error:
            self.gone = True
            return error


class Scheduler(threading.Thread):
    """Start it inside the event loop that receives its results."""

    def __init__(self, engine: Engine, lanes: int) -> None:
        super().__init__(name="scheduler", daemon=True)
        self.engine, self.most = engine, lanes
        self.loop = asyncio.get_running_loop()
        self.lanes: list[Lane] = []
        self.waiting: list[Lane] = []
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
        queue: Steps = asyncio.Queue()
        lanes = [Lane(index, writer, queue, top) for index, writer in enumerate(writers)]
        with self._wake:
            self.waiting.extend(lanes)
            self._wake.notify()
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

    def _admit(self) -> None:
        """Give lanes to waiting texts, first of the request that has the fewest, so that none starves others."""
        self.lanes = [lane for lane in self.lanes if not lane.gone and lane.writer.ended is None]
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
        states = [lane.writer.state for lane in lanes]
        steps: list[Step | Exception]
        try:
            logits, memories = self.engine.decode_many([s.pending for s in states], [s.memory for s in states])
            steps = [lane.advance(*one) for lane, *one in zip(lanes, logits, memories, strict=True)]
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


def _resolve(future: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
    if future.cancelled():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)


def _deliver(lanes: list[Lane], steps: list[Step | Exception]) -> None:
    for lane, step in zip(lanes, steps, strict=True):
        lane.queue.put_nowait(step)
