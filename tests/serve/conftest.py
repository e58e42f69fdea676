"""A served micro model, over real HTTP on this machine."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from block_recurrent import BlockRecurrentLM, preset
from block_recurrent.data import load_tokenizer
from block_recurrent.inference import Engine
from block_recurrent.inference.session import Session

httpx = pytest.importorskip("httpx", reason="tests of the server need httpx")
uvicorn = pytest.importorskip("uvicorn", reason="tests of the server need the extra 'serve'")

from block_recurrent.serve.app import Model, make_app  # noqa: E402
from block_recurrent.serve.limits import Limits  # noqa: E402


@dataclass
class Served:
    """A server that is up, and what it serves."""

    url: str
    app: Any
    engine: Engine
    folder: Path
    client: Any

    @property
    def server(self) -> Any:
        return self.app.state.server

    def complete(self, **body: Any) -> Any:
        answer = self.client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def read(self, name: str, text: str, **query: Any) -> Any:
        answer = self.client.post(f"/v1/memories/{name}/read", content=text.encode(), params=query)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def session(self, text: str = "") -> Session:
        session = Session(self.engine, load_tokenizer("bytes"))
        if text:
            session.read(text)
        return session


def make_engine(seed: int = 0) -> Engine:
    torch.manual_seed(seed)
    return Engine(BlockRecurrentLM(preset("rec-fixed-skip", "micro", vocab_size=257)).eval())


@contextmanager
def serving(
    folder: Path, limits: Limits, name: str = "micro", model: Model | None = None, **options: Any
) -> Iterator[Served]:
    model = model or (name, "a test's model", make_engine(), load_tokenizer("bytes"))
    engine = model[2]
    app = make_app([model], folder, limits, **options)
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", timeout_graceful_shutdown=2))
    thread = threading.Thread(target=server.run, daemon=True)
    with app.state.server.store.opened():
        thread.start()
        while not server.started:
            assert thread.is_alive(), "the server did not start"
            time.sleep(0.01)
        url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        with httpx.Client(base_url=url, timeout=60) as client:
            yield Served(url, app, engine, folder, client)
        server.should_exit = True
        thread.join()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One for the tests of a file, with checkpoints every 512 tokens."""
    with serving(tmp_path_factory.mktemp("memories"), Limits(trail_every=512, waiting=100)) as served:
        yield served


def wait_until(true: Callable[[], bool], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


def book(words: int, seed: int = 0) -> str:
    generator = torch.Generator().manual_seed(seed)
    known = ["sea", "whale", "ship", "Ahab", "straße", "white", "leg", "日本"]
    return " ".join(known[i] for i in torch.randint(len(known), (words,), generator=generator).tolist())
