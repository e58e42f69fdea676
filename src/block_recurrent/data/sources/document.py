"""The output of sources: documents to read, skipped files with reasons, and the split of each document."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

from block_recurrent.data.utf8 import to_utf8
from block_recurrent.errors import DataError

SPLITS = ("train", "validation", "test")
SMALL_SET = 64
"""Up to this number of documents, chance may leave a split empty."""


@dataclass(frozen=True)
class LeftOut:
    """A document, or a part of one, that was skipped, and why."""

    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"


class UnreadableError(DataError):
    """Raised while a document is read: it is skipped."""

    def __init__(self, name: str, reason: str) -> None:
        self.left_out = LeftOut(name, reason)
        super().__init__(str(self.left_out))


@dataclass
class Remarks:
    """Findings while reading a document."""

    strict: bool = False  # reject text that is not UTF-8
    replaced: int = 0
    nul: int = 0
    left_out: list[LeftOut] = field(default_factory=list)  # parts of the document

    def note(self, raw: bytes, replaced: int) -> None:
        self.replaced += replaced
        if 0 in raw:  # much faster than counting, and NUL is rare
            self.nul += raw.count(0)


@dataclass(frozen=True)
class Package:
    """The Python distribution that a document is from."""

    name: str
    version: str
    license: str | None
    sha256: str | None  # of the wheel; None for an installed distribution

    @property
    def label(self) -> str:
        return f"{self.name}=={self.version}"


@dataclass(frozen=True)
class Document:
    """A name, the split it belongs to (None: chosen by a hash of the name), and how to read its UTF-8 in chunks."""

    name: str
    split: str | None
    read: Callable[[Remarks], Iterator[bytes]]
    package: Package | None = None

    def split_by(self, validation: float, test: float) -> str:
        """The document's split, given the shares of documents that are held out."""
        return self.split or deal_split(self.key, validation, test)

    @property
    def key(self) -> str:
        """What determines the split: all documents of a package share one, regardless of its version."""
        return self.package.name if self.package else self.name


Found = Document | LeftOut


def deal_split(name: str, validation: float, test: float) -> str:
    """The split of a document by a hash of its name: it never depends on the other documents."""
    chance = chance_of(name)
    return "test" if chance < test else "validation" if chance < test + validation else "train"


def deal(found: Iterable[Found], validation: float, test: float) -> Iterator[Found]:
    """Documents with their splits. In a small set every requested split gets a document, if there are enough.

    If the hashes of names leave a split empty, the document with the nearest hash is moved there.
    """
    found = iter(found)
    first = list(itertools.islice(found, SMALL_SET + 1))
    moved = _moved(first, validation, test) if len(first) <= SMALL_SET else {}
    for each in itertools.chain(first, found):
        if isinstance(each, Document):
            each = replace(each, split=moved.get(each.key) or each.split_by(validation, test))
        yield each


def _moved(found: list[Found], validation: float, test: float) -> dict[str, str]:
    documents = [each for each in found if isinstance(each, Document)]
    if any(document.split for document in documents):
        return {}
    keys = sorted({document.key for document in documents}, key=chance_of)
    splits = {key: deal_split(key, validation, test) for key in keys}
    shares = {"train": 1 - validation - test, "test": test, "validation": validation}
    for split, share in shares.items():
        dealt = list(splits.values())
        if share > 0 and split not in dealt:
            spare = [key for key in keys if dealt.count(splits[key]) > 1]
            splits.update(dict.fromkeys(spare[-1:] if split == "train" else spare[:1], split))
    return splits


def chance_of(name: str) -> float:
    """A pseudorandom number from 0 to 1 that depends only on the name."""
    return int.from_bytes(hashlib.sha256(to_utf8(name)).digest()[:8], "big") / 2**64


def check_shares(validation: float, test: float) -> None:
    """Raise an error unless the shares are valid."""
    for name, share in (("validation", validation), ("test", test)):
        if not 0 <= share <= 1:
            raise DataError(f"the share --{name} must be 0 to 1, not {share}")
    if validation + test > 1:
        raise DataError(f"--validation and --test must add up to at most 1, not {validation + test}")
