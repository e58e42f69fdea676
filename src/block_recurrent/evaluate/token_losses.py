"""Files with the loss of every token: `.npz` for programs, `.csv` for spreadsheets.

`.npz`: `bits` (float32, all documents concatenated), `tokens` (their ids), `offsets` (where each document
begins, and the end of the last), `names`. `.csv`: document, index (from 0), token, bits.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from block_recurrent.errors import DataError
from block_recurrent.io.output import write_file

SUFFIXES = (".npz", ".csv")


def check_path(path: Path) -> None:
    """Raise errors before the work begins, rather than after it."""
    if path.suffix.lower() not in SUFFIXES:
        raise DataError(f"--per-token '{path}': its name must end in .npz (arrays) or .csv (a table)")
    if not path.parent.is_dir():
        raise DataError(f"--per-token '{path}': there is no folder '{path.parent}'")


class TokenLosses:
    """Bits of every token, four bytes each, until `write`."""

    def __init__(self, path: Path, names: Sequence[str], documents: Sequence[NDArray[Any]]) -> None:
        check_path(path)
        self.path, self.names, self.documents = path, list(names), documents
        self.offsets = np.concatenate([[0], np.cumsum([len(d) for d in documents])]).astype(np.int64)
        self.bits = np.zeros(int(self.offsets[-1]), np.float32)

    def add(self, document: int, start: int, bits: NDArray[np.float64]) -> None:
        begin = self.offsets[document] + start
        self.bits[begin : begin + len(bits)] = bits

    def write(self) -> None:
        """Write the file atomically."""
        file = io.BytesIO()
        (self._write_csv if self.path.suffix.lower() == ".csv" else self._write_npz)(file)
        write_file(self.path, file.getvalue())

    def _write_npz(self, file: io.BytesIO) -> None:
        tokens = np.concatenate([np.empty(0, np.uint16), *self.documents])
        np.savez(file, bits=self.bits, tokens=tokens, offsets=self.offsets, names=np.array(self.names, dtype=np.str_))

    def _write_csv(self, file: io.BytesIO) -> None:
        text = io.TextIOWrapper(file, encoding="utf-8", newline="")
        rows = csv.writer(text, lineterminator="\n")
        rows.writerow(("document", "index", "token", "bits"))
        for number, tokens in enumerate(self.documents):
            bits = self.bits[self.offsets[number] : self.offsets[number + 1]]
            for index, (token, loss) in enumerate(zip(tokens, bits, strict=True)):
                rows.writerow((self.names[number], index, int(token), f"{loss:.6f}"))
        text.flush()
        text.detach()
