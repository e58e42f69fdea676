"""Thousands of requests of all kinds at once, each compared with its response alone."""

from __future__ import annotations

import random
import resource
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from block_recurrent.inference.text_hash import TextHash

WORDS = ("sea", "whale", "ship", "captain", "white", "harpoon", "leg", "and", "the", "of")
KNOWN = 120
"""Number of different requests that are sent alone first."""


class Client(Protocol):
    def ask(self, method: str, path: str, body: Any = None) -> tuple[int, Any]: ...
    def first_events(self, count: int, **body: Any) -> float: ...


@dataclass
class Found:
    """The results; `compared` counts the texts that could be compared."""

    seconds: float = 0.0
    compared: int = 0
    different: int = 0
    refused: int = 0
    cancelled: int = 0
    wrong: int = 0
    before: float = 0.0
    after: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def note(self, **counts: int) -> None:
        with self.lock:
            for name, count in counts.items():
                setattr(self, name, getattr(self, name) + count)


def mixed(client: Client, pid: int, requests: int, clients: int) -> Found:
    """Send a number of requests from a number of clients, in a reproducible mix."""
    for number in range(4):
        client.ask("POST", f"/v1/memories/shared-{number}/read", _text(300, number).encode())
    alone = [(path, body, _texts(client.ask("POST", path, body))) for path, body in map(_request, range(KNOWN))]
    found, done = Found(), 0

    def work(number: int) -> None:
        nonlocal done
        rng = random.Random(number)
        own = _Own(client, f"own-{number}", rng, found)
        share = requests // clients + (number < requests % clients)
        while share > 0:
            used = _one(client, rng, alone, own, found)
            share -= used
            with found.lock:
                done += used
                if not found.before and done >= requests / 10:
                    found.before = _resident_mib(pid)

    began = time.perf_counter()
    threads = [threading.Thread(target=work, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found.seconds, found.after = time.perf_counter() - began, _resident_mib(pid)
    return found


def _one(client: Client, rng: random.Random, alone: list[Any], own: _Own, found: Found) -> int:
    """One piece of work; returns its number of requests."""
    kind = rng.random()
    if kind < 0.7:
        path, body, expected = rng.choice(alone)
        found.note(compared=1, different=_texts(client.ask("POST", path, body)) != expected)
        return 1
    if kind < 0.8:
        path, body = rng.choice(BAD)
        status, _ = client.ask("POST", path, body)
        found.note(refused=400 <= status < 500, wrong=not 400 <= status < 500)
        return 1
    if kind < 0.85:
        client.first_events(rng.randint(1, 5), max_tokens=500, prompt="gone")
        found.note(cancelled=1)
        return 1
    return own.read_write_rewind_fork()


class _Own:
    """A client's own memory: other clients must not affect it."""

    def __init__(self, client: Client, name: str, rng: random.Random, found: Found) -> None:
        self.client, self.name, self.rng, self.found = client, name, rng, found

    def read_write_rewind_fork(self) -> int:
        path, text = f"/v1/memories/{self.name}", _text(self.rng.randint(5, 150), self.rng.randrange(10**6))
        status, info = self.client.ask("POST", f"{path}/read", text.encode())
        true_hash = TextHash().update(text.encode()).hexdigest()
        self.found.note(wrong=status != 200 or info["text_hash"] != true_hash)
        body = {"memory": self.name, "max_tokens": 12, "seed": self.rng.randrange(1000)}
        first = _texts(self.client.ask("POST", "/v1/completions", body | {"save_as": self.name}))
        self.client.ask("POST", f"{path}/rewind", {"to": len(text.encode())})
        again = _texts(self.client.ask("POST", "/v1/completions", body))
        self.client.ask("POST", f"{path}/fork", {"name": f"{self.name}-fork"})
        forked = _texts(self.client.ask("POST", "/v1/completions", body | {"memory": f"{self.name}-fork"}))
        self.found.note(compared=2, different=(again != first) + (forked != first))
        gone = [self.client.ask("DELETE", f"{path}{suffix}")[0] for suffix in ("", "-fork")]
        self.found.note(wrong=sum(status != 200 for status in gone))
        return 8


BAD: list[tuple[str, Any]] = [
    ("/v1/completions", {"max_tokens": -1}),
    ("/v1/completions", {"memory": "nobody"}),
    ("/v1/completions", {"memory": "../../secret"}),
    ("/v1/completions", b"not json"),
    ("/v1/score", {}),
    ("/v1/memories/nobody/rewind", {"to": 3}),
    ("/v1/memories/shared-0/read", b"a name that is taken"),
]


def _request(number: int) -> tuple[str, dict[str, Any]]:
    rng = random.Random(-number)
    memory = rng.choice([None, *(f"shared-{i}" for i in range(4))])
    if rng.random() < 0.15:
        return "/v1/score", {"memory": memory, "text": _text(rng.randint(1, 30), number)}
    words = rng.choice([0, 1, 10, 120])
    options = {"max_tokens": rng.randint(1, 24), "seed": number, "temperature": rng.choice([0, 0.8, 1.2])}
    return "/v1/completions", {"memory": memory, "prompt": _text(words, number)} | options


def _texts(answer: tuple[int, Any]) -> Any:
    """What must be the same each time."""
    status, body = answer
    if status != 200:
        return status
    return [choice["token_ids"] for choice in body["choices"]] if "choices" in body else body["bits"]


def _text(words: int, seed: int) -> str:
    return " ".join(random.Random(seed).choices(WORDS, k=words))


def _resident_mib(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize() / 2**20
