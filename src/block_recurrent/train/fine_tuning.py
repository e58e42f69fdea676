"""The gain of fine-tuning: bits per byte before and after, with the memory and with its state cleared."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from block_recurrent.checkpoint import load_run, save_state
from block_recurrent.data import Corpus
from block_recurrent.evaluate.scoring import bits_of
from block_recurrent.evaluate.state_edits import StateEdit, clear_every
from block_recurrent.inference.engine import Engine
from block_recurrent.io.output import counted, format_table
from block_recurrent.io.progress import shown_progress
from block_recurrent.run_config import RunConfig
from block_recurrent.train.validation import first_tokens

TUNED_STATE = "tuned.state"
HELD_OUT = ("test", "validation")
WITH, CLEARED = "with its memory", "state cleared at each segment"


@dataclass(frozen=True)
class Gain:
    """Bits per byte of the same held-out texts before and after, with the memory and with the state cleared."""

    split: str
    documents: int
    tokens: int
    bits_per_byte: dict[str, tuple[float, float]]


def measure_gain(config: RunConfig, run: Path) -> Gain | None:
    """Score the beginnings of held-out documents with the initial weights and with the weights of the run."""
    corpus = Corpus(config.data.path)
    split = next((split for split in HELD_OUT if corpus.documents(split)), None)
    if split is None:
        return None
    lanes = min(config.train.lanes, len(corpus.documents(split)))
    texts = first_tokens(corpus, config.eval.tokens, lanes, split)
    size = sum(len(corpus.tokenizer.decode_bytes(text)) for text in texts)
    found: dict[str, list[float]] = {}
    for source in (config.train.init_from, run):
        model = load_run(source).model
        edits: dict[str, StateEdit | None] = {WITH: None}
        if model.config.recurrent_layers:
            edits[CLEARED] = clear_every(model, model.config.segment)
        for way, edit in edits.items():
            with shown_progress(f"scoring '{split}', {way}") as progress:
                bits = bits_of(Engine(model), texts, lanes=lanes, edit=edit, progress=progress)
            found.setdefault(way, []).append(float(sum(x.sum(dtype=np.float64) for x in bits)) / max(size, 1))
    return Gain(split, len(texts), sum(map(len, texts)), {way: (x[0], x[1]) for way, x in found.items()})


def describe_gain(gain: Gain | None) -> str:
    """The gain as a table."""
    if gain is None:
        return (
            "the gain was not measured, since the data has no test or validation documents: prepare it with --test 0.1"
        )
    rows = [[way, f"{a:.4f}", f"{b:.4f}", f"{b - a:+.4f}"] for way, (a, b) in gain.bits_per_byte.items()]
    table = format_table([f"bits per byte, split '{gain.split}'", "before", "after", "difference"], rows)
    before, after = gain.bits_per_byte[WITH]
    return (
        f"{table}\nFine-tuning {'saves' if after <= before else 'costs'} {abs(1 - after / before):.1%} of the bits "
        f"on text that was not trained on\n({gain.tokens:,} tokens of {counted(gain.documents, 'document')})."
    )


def write_tuned_state(run: Path) -> Path:
    """Write the initial states that a run has learned to a file in its folder."""
    path = run / TUNED_STATE
    save_state(load_run(run).model, path)
    return path
