"""Numbers and text for a page: compressed, in base64; fast to unpack in a browser."""

from __future__ import annotations

import base64
import zlib

import numpy as np
from numpy.typing import NDArray

from block_recurrent.analysis.comparison import DocumentPair

UNITS_PER_BIT = 1000
MOST = 65535
COMPRESSION = 6


def pack(raw: bytes) -> str:
    """The input of `unpack` in report.js."""
    return base64.b64encode(zlib.compress(raw, COMPRESSION)).decode("ascii")


def pack_bits(bits: NDArray[np.float32]) -> str:
    """Losses in thousandths of a bit, up to 65.5 bits."""
    units = np.clip(np.rint(np.nan_to_num(bits, nan=np.inf).astype(np.float64) * UNITS_PER_BIT), 0, MOST)
    return pack(units.astype("<u2").tobytes())


def pack_shares(values: NDArray[np.float32]) -> tuple[str, float]:
    """A heat map in 256 steps up to its 99.5th percentile (because of outliers), and that percentile."""
    values = np.nan_to_num(values)
    top = float(np.percentile(values, 99.5)) if values.size else 0.0
    levels = np.clip(values / (top or 1.0) * 255, 0, 255)
    return pack(levels.astype(np.uint8).tobytes()), top


def pack_document(document: DocumentPair) -> dict[str, str]:
    """The data to show a document token by token."""
    text = document.text
    return {
        "text": pack(text.raw.decode("utf-8", "replace").encode() if _is_utf8(text.raw) else _one_for_one(text.text)),
        "lengths": pack(text.lengths_in_utf16().astype("<u2").tobytes()),
        "a": pack_bits(document.bits_a),
        "b": pack_bits(document.bits_b),
        "distance": pack(text.distances.astype("<i4").tobytes()),
    }


def _is_utf8(raw: bytes) -> bool:
    try:
        raw.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _one_for_one(text: str) -> bytes:
    """The text with each invalid byte as one U+FFFD, so that positions of tokens are preserved."""
    return "".join("\ufffd" if "\udc80" <= c <= "\udcff" else c for c in text).encode()


def thin(values: NDArray[np.floating], most: int) -> tuple[NDArray[np.float64], int]:
    """Means over equal runs of rows, so that at most `most` rows are left, and how long the runs are."""
    run = max(1, -(-len(values) // most))
    if run == 1:
        return values.astype(np.float64), 1
    starts = np.arange(0, len(values), run)
    sums = np.add.reduceat(values.astype(np.float64), starts, axis=0)
    counts = np.diff(np.append(starts, len(values)))
    return sums / counts.reshape(-1, *[1] * (values.ndim - 1)), run
