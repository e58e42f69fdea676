"""Runs an iterator ahead of its reader, in a thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

T = TypeVar("T")


class Prefetcher(Generic[T]):
    """The items of an iterator, prefetched up to `depth` ahead (0: no prefetching and no thread)."""

    def __init__(self, items: Iterator[T], depth: int) -> None:
        self._items = items
        # The thread ends when the pool is closed or garbage-collected; its function must not refer to this object.
        self._pool = ThreadPoolExecutor(1) if depth > 0 else None
        self._ahead: deque[Future[T]] = deque()
        for _ in range(depth):
            self._build_next()

    def __iter__(self) -> Prefetcher[T]:
        return self

    def __next__(self) -> T:
        if self._pool is None:
            return next(self._items)
        if not self._ahead:
            raise StopIteration
        if self._ahead[0].exception() is not None:  # the end, or an error: it stays in the queue and is raised again
            self._pool.shutdown(wait=False, cancel_futures=True)
        item = self._ahead[0].result()
        self._ahead.popleft()
        self._build_next()
        return item

    def close(self) -> None:
        """Ends the thread; there are no more items after this."""
        self._ahead.clear()
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def _build_next(self) -> None:
        assert self._pool is not None
        self._ahead.append(self._pool.submit(next, self._items))
