"""Errors that users see: one line with what was wrong, the value, the rule and what to do."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

USAGE, FAILURE, INTERRUPTED = 2, 1, 130  # exit codes


class BlockRecurrentError(ValueError):
    """Base class of errors in user input. The command line prints one line and exits with `exit_code`."""

    exit_code = USAGE


class ConfigError(BlockRecurrentError):
    """An unknown or invalid setting."""


class InputError(BlockRecurrentError):
    """Tokens, lanes or lengths that the model can't accept."""


class MemoryMismatchError(BlockRecurrentError):
    """A document memory that belongs to another model, or has another number of lanes."""


class FileFormatError(BlockRecurrentError):
    """A file that is damaged, truncated, or of another format."""

    exit_code = FAILURE


class DataError(BlockRecurrentError):
    """Documents, tokenizers or prepared data that can't be used."""


class OutputError(DataError):
    """A file or folder that can't be written."""

    exit_code = FAILURE


class CheckpointError(BlockRecurrentError):
    """A run or checkpoint that is missing, damaged, or can't be written."""

    exit_code = FAILURE


class NotFoundError(FileFormatError, CheckpointError):
    """A file, a run or a checkpoint that does not exist."""

    exit_code = USAGE


class TrainingError(BlockRecurrentError):
    """Training that can't start, or can't continue."""

    exit_code = FAILURE


class MissingExtraError(BlockRecurrentError):
    """A feature that needs an optional package which is not installed."""

    def __init__(self, feature: str, extra: str) -> None:
        super().__init__(f"{feature} needs the optional extra '{extra}': pip install 'block-recurrent[{extra}]'")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """' (did you mean 'x'?)' for the nearest known word, or the empty string."""
    nearest = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f" (did you mean '{nearest[0]}'?)" if nearest else ""


def printable(text: str) -> str:
    """The text with control characters escaped: untrusted names and texts must not control a terminal."""
    return re.sub("[\0-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]|\r(?!\n)", lambda found: f"\\x{ord(found[0]):02x}", text)
