"""The loss of every token as a file, for further work: `.npz` for programs, `.csv` for eyes and spreadsheets.

`.npz`: `bits` (float32, all documents one after the other), `tokens` (their ids), `offsets` (where each document
begins, and the end of the last), `names`. `.csv`: document, index (from 0), token, bits.
"""

from __future__ import annotations

import csv
import io
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from block_recurrent.errors import DataError
from block_recurrent.io.atomic import atomic_file

SUFFIXES = (".npz", ".csv")


def check_path(path: Path) -> None:
    """An error before the work begins, rather than after it."""
    if path.suffix.lower() not in SUFFIXES:
        raise DataError(f"--per-token '{path}': its name must end in .npz (arrays) or .csv (a table)")
    if not path.parent.is_dir():
        raise DataError(f"--per-token '{path}': there is no folder '{path.parent}'")


class TokenLosses:
    """Bits of every token, kept in a temporary file beside `path` until `write`, so that memory does not grow."""

    def __init__(self, path: Path, names: Sequence[str], documents: Sequence[NDArray[Any]], scratch: Path) -> None:
        self.path, self.names, self.documents = path, list(names), documents
        self.offsets = np.concatenate([[0], np.cumsum([len(d) for d in documents])]).astype(np.int64)
        self.bits = np.memmap(scratch, np.float32, "w+", shape=(max(1, int(self.offsets[-1])),))

    def add(self, document: int, start: int, bits: NDArray[np.float64]) -> None:
        begin = self.offsets[document] + start
        self.bits[begin : begin + len(bits)] = bits

    def write(self) -> None:
        """Put the file in its place, whole."""
        write = self._write_csv if self.path.suffix.lower() == ".csv" else self._write_npz
        try:
            with atomic_file(self.path) as aside, open(aside, "wb") as file:
                write(file)
        except OSError as error:
            raise DataError(f"can't write '{self.path}': {error.strerror or error}") from None

    def _write_npz(self, file: Any) -> None:
        tokens = np.concatenate([np.empty(0, np.uint16), *self.documents])
        np.savez(
            file,
            bits=self.bits[: self.offsets[-1]],
            tokens=tokens,
            offsets=self.offsets,
            names=np.array(self.names, dtype=np.str_),
        )

    def _write_csv(self, file: Any) -> None:
        text = io.TextIOWrapper(file, encoding="utf-8", newline="")
        rows = csv.writer(text, lineterminator="\n")
        rows.writerow(("document", "index", "token", "bits"))
        for number, tokens in enumerate(self.documents):
            bits = self.bits[self.offsets[number] : self.offsets[number + 1]]
            for index, (token, loss) in enumerate(zip(tokens, bits, strict=True)):
                rows.writerow((self.names[number], index, int(token), f"{loss:.6f}"))
        text.flush()
        text.detach()


@contextmanager
def token_losses(
    path: Path | None, names: Sequence[str], documents: Sequence[NDArray[Any]]
) -> Iterator[TokenLosses | None]:
    """A place for the losses, written to `path` when all has gone well; nothing where there is no path."""
    if path is None:
        yield None
        return
    check_path(path)
    handle, scratch = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    os.close(handle)
    try:
        losses = TokenLosses(path, names, documents, Path(scratch))
        yield losses
        losses.write()
    finally:
        Path(scratch).unlink(missing_ok=True)
