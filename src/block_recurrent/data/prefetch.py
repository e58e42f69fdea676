"""Runs an iterator ahead of its reader, in a thread with a bounded queue."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")
# Seconds after which a blocked thread looks whether it should stop. Closing drains the queue, so it rarely waits.
STOP_CHECK = 0.1


class _End:
    """The last thing in the queue: the iterator ended, or failed with an error."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


class Prefetcher(Generic[T]):
    """The same items as the iterator, built up to `depth` ahead (0: built when asked for, without a thread)."""

    def __init__(self, items: Iterator[T], depth: int) -> None:
        self._items = items
        self._end: _End | None = None
        self._stop = threading.Event()
        self._queue: queue.Queue[T | _End] = queue.Queue(depth)
        self._thread: threading.Thread | None = None
        if depth > 0:
            # A daemon, and told to stop when its reader is forgotten: it never keeps a program alive.
            self._thread = threading.Thread(target=_fill, args=(items, self._queue, self._stop), daemon=True)
            weakref.finalize(self, self._stop.set)
            self._thread.start()

    def __iter__(self) -> Prefetcher[T]:
        return self

    def __next__(self) -> T:
        if self._thread is None and self._end is None:
            return next(self._items)
        if self._end is None:
            item = self._queue.get()
            if not isinstance(item, _End):
                return item
            self._end = item
        if self._end.error is not None:
            raise self._end.error
        raise StopIteration

    def close(self) -> None:
        """Ends the thread; there are no more items after this."""
        self._stop.set()
        self._end = self._end or _End(None)
        while self._thread is not None and self._thread.is_alive():
            while not self._queue.empty():
                self._queue.get_nowait()
            self._thread.join(STOP_CHECK)


def _fill(items: Iterator[T], target: queue.Queue[T | _End], stop: threading.Event) -> None:
    end = _End(None)
    try:
        for item in items:
            if not _put(item, target, stop):
                return
    except BaseException as error:  # handed to the reader, whatever it is
        end = _End(error)
    _put(end, target, stop)


def _put(item: T | _End, target: queue.Queue[T | _End], stop: threading.Event) -> bool:
    while not stop.is_set():
        try:
            target.put(item, timeout=STOP_CHECK)
        except queue.Full:
            continue
        return True
    return False
