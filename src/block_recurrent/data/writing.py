"""Token files of a corpus being made: one per split, appended to document by document."""

from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from block_recurrent.data.corpus import SPLITS, token_file

SYNC_BYTES = 1 << 25


class TokenWriter:
    """Appends tokens to the files of the splits, and takes an unfinished document back out."""

    def __init__(self, folder: Path, dtype: np.dtype) -> None:
        self._files = {split: (folder / token_file(split)).open("wb") for split in SPLITS}
        self._dtype = dtype
        self._widened = np.empty(0, dtype)
        self._tokens = dict.fromkeys(SPLITS, 0)
        # The disk works while we do, instead of all at the end.
        self._disk = ThreadPoolExecutor(1)
        self._syncing: Future[None] | None = None
        self._unsynced = 0

    def end(self, split: str) -> int:
        """Tokens in the file of a split."""
        return self._tokens[split]

    def append(self, split: str, tokens: NDArray[np.unsignedinteger]) -> None:
        """Writes tokens after the last ones of a split."""
        if tokens.dtype != self._dtype:
            # Widened in memory that is used again: fresh memory for each piece costs more than writing it.
            if len(tokens) > len(self._widened):
                self._widened = np.empty(len(tokens), self._dtype)
            np.copyto(self._widened[: len(tokens)], tokens)
            tokens = self._widened[: len(tokens)]
        self._files[split].write(tokens.data)
        self._tokens[split] += len(tokens)
        self._unsynced += len(tokens) * self._dtype.itemsize
        if self._unsynced >= SYNC_BYTES and (self._syncing is None or self._syncing.done()):
            if self._syncing is not None:
                self._syncing.result()
            self._syncing = self._disk.submit(os.fsync, self._files[split].fileno())
            self._unsynced = 0

    def take_back(self, split: str, end: int) -> None:
        """Drops the tokens of a split from `end` on."""
        self._files[split].flush()
        self._files[split].seek(end * self._dtype.itemsize)
        self._files[split].truncate()
        self._tokens[split] = end

    def __enter__(self) -> TokenWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._disk.shutdown(wait=True, cancel_futures=True)
        if error is not None:
            for file in self._files.values():
                with suppress(OSError):
                    file.close()
            return
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
            file.close()
