"""What sources give: documents to read, what was left out and why, and the split that a document falls into."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from block_recurrent.data.utf8 import to_utf8
from block_recurrent.errors import DataError

SPLITS = ("train", "validation", "test")


@dataclass(frozen=True)
class LeftOut:
    """A document, or a part of one, that is not prepared, and why."""

    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"


class UnreadableError(DataError):
    """Raised while a document is read: it is left out."""

    def __init__(self, name: str, reason: str) -> None:
        self.left_out = LeftOut(name, reason)
        super().__init__(str(self.left_out))


@dataclass
class Remarks:
    """What reading a document found out beside its text."""

    strict: bool = False  # refuse what is not UTF-8
    replaced: int = 0
    nul: int = 0
    left_out: list[LeftOut] = field(default_factory=list)  # parts of the document

    def note(self, raw: bytes, replaced: int) -> None:
        self.replaced += replaced
        if 0 in raw:  # much faster than counting, and mostly there is none
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
    """A name, the split it belongs to (None: dealt by a hash of the name), and how to read its UTF-8 in chunks."""

    name: str
    split: str | None
    read: Callable[[Remarks], Iterator[bytes]]
    package: Package | None = None

    def split_by(self, validation: float, test: float) -> str:
        """The document's split, given the shares of documents that are held out."""
        # All documents of a package fall into one split, whatever its version.
        return self.split or deal_split(self.package.name if self.package else self.name, validation, test)


Found = Document | LeftOut


def deal_split(name: str, validation: float, test: float) -> str:
    """The split of a document by a hash of its name: it never depends on the other documents."""
    chance = chance_of(name)
    return "test" if chance < test else "validation" if chance < test + validation else "train"


def chance_of(name: str) -> float:
    """A number from 0 to 1 that looks random and always is the same for a name."""
    return int.from_bytes(hashlib.sha256(to_utf8(name)).digest()[:8], "big") / 2**64


def check_shares(validation: float, test: float) -> None:
    """Shares must be parts of a whole."""
    for name, share in (("validation", validation), ("test", test)):
        if not 0 <= share <= 1:
            raise DataError(f"the share --{name} must be 0 to 1, not {share}")
    if validation + test > 1:
        raise DataError(f"--validation and --test can't be more than 1 together, not {validation + test}")
