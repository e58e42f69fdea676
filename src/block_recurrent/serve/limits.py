"""How much a server takes on, and what it answers when it is asked for more."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields

from block_recurrent.errors import BlockRecurrentError, ConfigError


class RequestError(BlockRecurrentError):
    """A request that can't be answered: its HTTP status beside the sentence that says why."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Limits:
    """What `brt serve` takes as options of the same names."""

    lanes: int = 16
    """Texts that are written at once."""
    waiting: int = 64
    """Further texts, readings and scores that may wait."""
    prompt_bytes: int = 1 << 20
    """Of a request's JSON."""
    text_bytes: int = 64 << 20
    """Of a text that becomes a memory."""
    max_tokens: int = 8192
    """That one request may have written."""
    memories: int = 256
    """On disk."""
    trail: int = 8
    """Checkpoints of each memory; each takes as much disk as the memory."""
    trail_every: int = 4096
    """Tokens from checkpoint to checkpoint while reading."""
    seconds: int = 3600
    """That one request may take."""

    def __post_init__(self) -> None:
        for field in fields(self):
            if (value := getattr(self, field.name)) < 1:
                raise ConfigError(f"--{field.name.replace('_', '-')} is {value}: it must be at least 1")


class Admission:
    """Counts what is under way; more than the limit is refused at once rather than kept waiting."""

    def __init__(self, most: int) -> None:
        self.most, self.count = most, 0

    @contextmanager
    def take(self, count: int = 1) -> Iterator[None]:
        if count > self.most:
            raise RequestError(400, f"the request asks for {count} texts: this server takes at most {self.most}")
        if self.count + count > self.most:
            raise RequestError(429, f"{self.count} texts are under way, and {self.most} is the most: try again later")
        self.count += count
        try:
            yield
        finally:
            self.count -= count
