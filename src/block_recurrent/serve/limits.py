"""Limits of a server, and errors for requests beyond them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields

from block_recurrent.errors import BlockRecurrentError, ConfigError


class RequestError(BlockRecurrentError):
    """A request that is rejected, with its HTTP status and a message."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Limits:
    """The limits, set by options of `brt serve` with the same names."""

    lanes: int = 16
    """Texts generated at the same time."""
    waiting: int = 64
    """Generations, reads and scores that may wait."""
    prompt_bytes: int = 1 << 20
    """Maximum size of a JSON request."""
    text_bytes: int = 64 << 20
    """Maximum size of a text to read into a memory."""
    max_tokens: int = 8192
    """Maximum number of tokens to generate per request."""
    memories: int = 256
    """Maximum number of memories on disk."""
    trail: int = 8
    """Checkpoints per memory, each as large on disk as the memory."""
    trail_every: int = 4096
    """Tokens between checkpoints while reading."""
    seconds: int = 3600
    """Time limit of a request."""

    def __post_init__(self) -> None:
        for field in fields(self):
            if (value := getattr(self, field.name)) < 1:
                raise ConfigError(f"--{field.name.replace('_', '-')} is {value}: it must be at least 1")


class Admission:
    """Counts work in progress; more than the limit is rejected immediately instead of queued."""

    def __init__(self, most: int) -> None:
        self.most, self.count = most, 0

    @contextmanager
    def take(self, count: int = 1) -> Iterator[None]:
        if count > self.most:
            raise RequestError(400, f"the request needs {count} texts: at most {self.most} are allowed")
        if self.count + count > self.most:
            raise RequestError(
                429, f"{self.count} texts are in progress, and the limit is {self.most}: try again later"
            )
        self.count += count
        try:
            yield
        finally:
            self.count -= count
