"""Training a lossless SentencePiece vocabulary: `brt tokenizer train`."""

from __future__ import annotations

import io
import itertools
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from block_recurrent.data.sources import find_documents, total_size
from block_recurrent.data.sources.document import (
    Document,
    LeftOut,
    Remarks,
    UnreadableError,
    chance_of,
    check_shares,
    deal,
)
from block_recurrent.data.sources.text import Unit
from block_recurrent.data.tokenizers.base import ByteTokenizer, Tokenizer, tokenizer_from_model
from block_recurrent.data.tokenizers.sentencepiece import SPACE
from block_recurrent.errors import DataError
from block_recurrent.io.output import write_file

LEAST_SIZE, MOST_SIZE = 512, 131_072
# SentencePiece holds its sample in memory, several times over; more text than this hardly changes a vocabulary.
SAMPLE_BYTES = 100_000_000
SENTENCE_CHARACTERS = 1000
FIXED_PIECES = 258  # unknown, newline and the 256 bytes
ALPHABET_SHARE = 0.25  # maximum share of single characters among the other pieces; rarer ones are encoded as bytes


def train_tokenizer(
    sources: Sequence[str], vocab_size: int, unit: Unit = "file", validation: float = 0.05, test: float = 0.05
) -> Tokenizer:
    """A vocabulary of exactly `vocab_size` pieces, of the sources' training documents if there are any.

    `validation` and `test` are the shares for `prepare`: documents that it holds out are not trained on.
    """
    check_shares(validation, test)
    if not LEAST_SIZE <= vocab_size <= MOST_SIZE:
        raise DataError(f"--vocab-size must be {LEAST_SIZE} to {MOST_SIZE}, not {vocab_size}")
    found = partial(_sentences, sources, unit, validation, test)
    # A few documents may all belong to validation and test; then these are used.
    if not (sentences := list(found({"train"})) or list(found({"validation", "test"}))):
        raise DataError(f"no training text found in {', '.join(sources)}")
    return tokenizer_from_model(_train(sentences, vocab_size), "the new vocabulary")


def save_tokenizer(tokenizer: Tokenizer, path: Path) -> None:
    """Writes the vocabulary file atomically."""
    assert tokenizer.model is not None
    write_file(path, tokenizer.model, make_folder=True)


def _train(sentences: list[str], vocab_size: int) -> bytes:
    import sentencepiece

    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=_within_alphabet(sentences, vocab_size),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            character_coverage=1.0,
            # For lossless encoding: text is not normalized, and characters without a piece are encoded as bytes.
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            byte_fallback=True,
            user_defined_symbols=["\n"],
            # Runs of spaces (code, verse) become pieces; no piece contains the end of a word and a space.
            allow_whitespace_only_pieces=True,
            unk_id=0,
            bos_id=-1,
            eos_id=-1,
            pad_id=-1,
            minloglevel=3,
            num_threads=os.cpu_count() or 1,
        )
    except (RuntimeError, OSError) as error:
        limit = re.search(r"value <= (\d+)", str(error))
        advice = f"this text allows at most {limit[1]}" if limit else str(error).strip().splitlines()[-1]
        raise DataError(
            f"can't train a vocabulary of {vocab_size} pieces: {advice}; use more text or a smaller size"
        ) from None
    return model.getvalue()


def _within_alphabet(sentences: list[str], vocab_size: int) -> Iterator[str]:
    """The sentences without rare characters that would take more than their share of the vocabulary."""
    counts = Counter[str]()
    for sentence in sentences:
        counts.update(sentence)
    alphabet = max(1, int(ALPHABET_SHARE * (vocab_size - FIXED_PIECES)))
    # A line break in their place keeps their neighbors apart.
    rare = {ord(character): "\n" for character, _ in counts.most_common()[alphabet:]}
    return (sentence.translate(rare) for sentence in sentences) if rare else iter(sentences)


def _sentences(sources: Sequence[str], unit: Unit, validation: float, test: float, splits: set[str]) -> Iterator[str]:
    """Lines of the sample, long ones cut at spaces."""
    share = min(1.0, SAMPLE_BYTES / (total_size(sources) or 1))
    room = SAMPLE_BYTES  # for sources of unknown size
    every = itertools.chain.from_iterable(find_documents(source, unit) for source in sources)
    for found in deal(every, validation, test):
        if isinstance(found, LeftOut) or found.split not in splits:
            continue
        for piece in _sampled(found, share):
            for line in piece.decode().splitlines(keepends=True):
                yield from _short(line)
            room -= len(piece)
            if room < 0:
                return


def _sampled(document: Document, share: float) -> Iterator[bytes]:
    try:
        for index, piece in enumerate(ByteTokenizer().cut(document.read(Remarks()))):
            if chance_of(f"{document.name}\0{index}") < share:
                yield piece
    except UnreadableError:
        return


def _short(line: str) -> Iterator[str]:
    # A NUL or SentencePiece's own space sign would make it skip or misread the line.
    line = line.replace("\0", "").replace(SPACE, "")
    while len(line) > SENTENCE_CHARACTERS:
        end = line.rfind(" ", 1, SENTENCE_CHARACTERS)
        end = end if end > 0 else SENTENCE_CHARACTERS
        yield line[:end]
        line = line[end:]
    if line:
        yield line
