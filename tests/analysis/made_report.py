"""Reports with known differences, without any model: for tests of the page, and for measuring how fast it opens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from block_recurrent.analysis.ablation import Ablation
from block_recurrent.analysis.comparison import Comparison, DocumentPair, find_top
from block_recurrent.analysis.inspector import Inspection, LayerInspection
from block_recurrent.analysis.memory_report import inspection_numbers, inspection_page_data
from block_recurrent.analysis.report import ReportData, Side, write_report
from block_recurrent.analysis.token_text import TokenText
from block_recurrent.data import load_tokenizer
from block_recurrent.data.tokenizers.base import Tokenizer
from block_recurrent.evaluate.cumulative import CumulativeCurve, Curve
from block_recurrent.evaluate.headroom import headroom_of
from block_recurrent.evaluate.measures import Score

WINDOW, SEGMENT = 64, 512


class WordTokenizer:
    """Token i is the word `word<i> `, or another stem for documents of their own."""

    def __init__(self, stem: str) -> None:
        self.stem = stem

    def decode_bytes(self, tokens: Any, begin: bool = True) -> bytes:
        return "".join(f"{self.stem}{int(i)} " for i in tokens).encode()


def _pair(name: str, text: TokenText, difference: NDArray[np.float64]) -> DocumentPair:
    bits_a = np.full(len(text), 10.0, np.float32)
    bits_b = (bits_a + difference).astype(np.float32)
    size = len(text.raw)
    scores = [Score(name, float(bits.sum()), len(text), size, len(text)) for bits in (bits_a, bits_b)]
    return DocumentPair(name, text, bits_a, bits_b, *scores)


def _curve(bits: NDArray[np.float32]) -> Curve:
    curve = CumulativeCurve(np.array([len(bits)]))
    curve.add(0, 0, bits.astype(np.float64))
    return curve.curve()


def _inspection(name: str, blocks: int) -> Inspection:
    rng = np.random.default_rng(1)
    read = rng.dirichlet(np.ones(32), blocks).astype(np.float32)
    layer = LayerInspection(
        3, {"attention_gate keep": np.full(blocks, 0.9)}, rng.random(blocks), rng.random(blocks), read, read
    )
    return Inspection(name, WINDOW, blocks * WINDOW, (layer,))


def write_made_report(
    folder: Path, tokens: int, spikes: dict[int, float] | None = None, content: str | None = None
) -> None:
    """A report of a document of so many tokens, with noise and some known differences, and of a short second one."""
    rng = np.random.default_rng(0)
    difference = rng.normal(0, 0.3, tokens)
    for index, value in (spikes or {}).items():
        difference[index] = value
    if content is None:
        words: Any = WordTokenizer("word")
        text = TokenText(np.arange(tokens, dtype=np.uint32), words)
    else:
        tokenizer: Tokenizer = load_tokenizer("bytes")
        text = TokenText(tokenizer.encode(content), tokenizer)
    other: Any = WordTokenizer("second")
    documents = (
        _pair("first", text, difference),
        _pair(
            "other",
            TokenText(np.arange(300, dtype=np.uint32), other),
            np.full(300, 0.01) + 3.0 * (np.arange(300) == 150),
        ),
    )
    tops = (find_top(documents, 20, sign, WINDOW, SEGMENT) for sign in (1, -1))
    curves = (_curve(documents[0].bits_a), _curve(documents[0].bits_b))
    tokens_of = [d.text.tokens for d in documents]
    headroom = tuple(
        headroom_of(tokens_of, bits, WINDOW, 3 * WINDOW)
        for bits in ([d.bits_a for d in documents], [d.bits_b for d in documents])
    )
    comparison = Comparison("made A", "made B", WINDOW, SEGMENT, documents, *curves, *tops, headroom)
    inspection = _inspection("first", max(2, tokens // WINDOW))
    ablations = [Ablation(3, count, 4.0, 4.0 + count / 100, 4.001) for count in (1, 4, 16, 32)]
    write_report(
        folder,
        ReportData(
            "made A against made B",
            "a made-up report",
            comparison,
            Side("made A", "run a, step 1", {"model.num_layers": 3}),
            Side("made B", "run b, step 1", {"model.num_layers": 4}),
            [inspection_numbers(inspection, ablations)],
            [inspection_page_data(inspection, ablations, text)],
        ),
    )
