"""Token files of a corpus being prepared: one per split, appended to document by document."""

from __future__ import annotations

import os
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from block_recurrent.data.corpus.corpus import token_file
from block_recurrent.data.sources.document import SPLITS

Tokens = NDArray[np.unsignedinteger]
WRITE_TOKENS = 1 << 18  # per job of the writing thread: documents can be tiny
WAITING_WRITES = 4
SYNC_BYTES = 1 << 25


class TokenWriter:
    """Appends tokens to the files of the splits in a background thread, and removes unfinished documents."""

    def __init__(self, folder: Path, dtype: np.dtype) -> None:
        self._files = {split: (folder / token_file(split)).open("wb") for split in SPLITS}
        self._dtype = dtype
        self._ends = dict.fromkeys(SPLITS, 0)
        self._collected: list[tuple[str, Tokens]] = []
        self._collected_tokens = 0
        self._writes: deque[Future[None]] = deque()
        # Start writing to disk now, instead of all at the end.
        self._writing, self._syncing = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        self._sync: Future[None] | None = None
        self._unsynced = 0
        self._widened = np.empty(0, dtype)

    def end(self, split: str) -> int:
        """Tokens of a split so far."""
        return self._ends[split]

    def append(self, split: str, tokens: Tokens) -> None:
        """Appends tokens to a split. May raise the error of an earlier write."""
        self._ends[split] += len(tokens)
        self._collected.append((split, tokens))
        self._collected_tokens += len(tokens)
        if self._collected_tokens >= WRITE_TOKENS:
            self._hand_over()
            if len(self._writes) > WAITING_WRITES:
                self._writes.popleft().result()

    def take_back(self, split: str, end: int) -> None:
        """Drops the tokens of a split from `end` on."""
        self._finish_writes()
        self._files[split].flush()
        self._files[split].seek(end * self._dtype.itemsize)
        self._files[split].truncate()
        self._ends[split] = end

    def __enter__(self) -> TokenWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            if error is None:
                self._finish_writes()
                if self._sync is not None:
                    self._sync.result()  # the system reports a failed write only once, possibly here
                for file in self._files.values():
                    file.flush()
                    os.fsync(file.fileno())
        finally:
            for pool in (self._writing, self._syncing):
                pool.shutdown(wait=True, cancel_futures=True)
            for file in self._files.values():
                with suppress(OSError):  # write errors have been reported above, or don't matter now
                    file.close()

    def _hand_over(self) -> None:
        self._writes.append(self._writing.submit(self._write, self._collected))
        self._collected, self._collected_tokens = [], 0

    def _finish_writes(self) -> None:
        self._hand_over()
        while self._writes:
            self._writes.popleft().result()

    def _write(self, collected: list[tuple[str, Tokens]]) -> None:
        for split, tokens in collected:
            self._files[split].write(self._widen(tokens).data)
            self._unsynced += len(tokens) * self._dtype.itemsize
            if self._unsynced >= SYNC_BYTES and (self._sync is None or self._sync.done()):
                if self._sync is not None:
                    self._sync.result()
                self._sync = self._syncing.submit(os.fsync, self._files[split].fileno())
                self._unsynced = 0

    def _widen(self, tokens: Tokens) -> Tokens:
        if tokens.dtype == self._dtype:
            return tokens
        # Reuses a buffer: allocating memory for each piece costs more than writing it.
        if len(tokens) > len(self._widened):
            self._widened = np.empty(len(tokens), self._dtype)
        np.copyto(self._widened[: len(tokens)], tokens)
        return self._widened[: len(tokens)]
