"""Who may ask, how much at once, what is left after kill -9; and a description that schemathesis can't break."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from block_recurrent import BlockRecurrentLM, preset
from block_recurrent.cli.main import main
from block_recurrent.data import load_tokenizer
from block_recurrent.inference.session_file import read_memory_file
from block_recurrent.inference.trail import locked, places_of
from block_recurrent.run_config import DataConfig, RunConfig
from block_recurrent.serve.limits import Limits
from tests.run_folders import save_run

from .conftest import Served, book, httpx, serving, wait_until

KEY = "a-key-of-a-test-0123"


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    model = BlockRecurrentLM(preset("rec-fixed-skip", "micro", vocab_size=257))
    folder = tmp_path_factory.mktemp("runs") / "micro"
    config = RunConfig("rec-fixed-skip", "micro", model.config, DataConfig(path="somewhere"))
    save_run(folder, config, model, load_tokenizer("bytes"), 7)
    return folder


# ---- Who may ask


def test_a_key(tmp_path: Path) -> None:
    with serving(tmp_path, Limits(), key=KEY, host="0.0.0.0") as served:
        assert served.client.get("/health").status_code == 200
        assert served.client.get("/").status_code == 200
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": KEY}):
            for path in ("/v1/models", "/v1/memories", "/metrics"):
                assert served.client.get(path, headers=headers).status_code == 401
        assert served.client.get("/v1/models", headers={"Authorization": f"Bearer {KEY}"}).status_code == 200


def test_other_sites_are_kept_out(served: Served) -> None:
    for headers in ({"Host": "evil.example"}, {"Origin": "https://evil.example"}, {"Origin": "null"}):
        answer = served.client.post("/v1/memories/x/read", content=b"text", headers=headers)
        assert answer.status_code == 403, headers
    assert served.client.get("/v1/models", headers={"Origin": served.url}).status_code == 200


def test_other_machines_need_a_key(run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", str(run_folder), "--host", "0.0.0.0"]) == 2
    assert "give --api-key-file" in capsys.readouterr().err
    (tmp_path / "key").write_text("short\n")
    assert main(["serve", str(run_folder), "--host", "0.0.0.0", "--api-key-file", str(tmp_path / "key")]) == 2
    assert "short" not in capsys.readouterr().err.replace("of at least", "")
    assert main(["serve", str(run_folder), "--lanes", "0"]) == 2
    assert "--lanes is 0" in capsys.readouterr().err


def test_one_server_has_the_folder(served: Served) -> None:
    from block_recurrent.errors import FileFormatError

    with pytest.raises(FileFormatError, match="in use by another process"), locked(served.folder):
        pass


def test_head_is_answered_like_get_without_a_body(served: Served) -> None:
    for path in ("/", "/health", "/v1/models"):
        answer = served.client.head(path)
        assert (answer.status_code, answer.content) == (200, b"")
        assert answer.headers["content-length"] == str(len(served.client.get(path).content))
    assert served.client.head("/v1/memories/nobody").status_code == 404


# ---- How much at once


def test_too_many_are_refused_and_lanes_are_freed(tmp_path: Path) -> None:
    with serving(tmp_path, Limits(lanes=2, waiting=2)) as served:

        def long_text() -> None:
            with (
                httpx.Client(base_url=served.url) as client,
                client.stream(
                    "POST", "/v1/completions", json={"max_tokens": 8000, "stream": True, "end_at_mark": False}
                ) as answer,
            ):
                for number, _ in enumerate(answer.iter_lines()):
                    if number > 3 and leave.is_set():
                        return

        leave = threading.Event()
        threads = [threading.Thread(target=long_text) for _ in range(4)]
        for thread in threads:
            thread.start()
        wait_until(lambda: served.server.admission.count == 4)
        assert served.client.get("/health").json()["writing"] <= 2
        answer = served.client.post("/v1/completions", json={})
        assert answer.status_code == 429
        assert answer.headers["retry-after"]
        assert served.client.post("/v1/memories/x/read", content=b"text").status_code == 429
        leave.set()
        for thread in threads:
            thread.join()
        wait_until(lambda: served.client.get("/health").json()["under_way"] == 0)
        wait_until(lambda: served.client.get("/health").json()["writing"] == 0)
        assert served.complete(max_tokens=3, end_at_mark=False)["usage"]["completion_tokens"] == 3


def test_a_client_who_hangs_up_frees_its_lane(served: Served) -> None:
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{served.url}/v1/completions", json={"max_tokens": 8000, "end_at_mark": False}, timeout=0.3)
    wait_until(lambda: served.client.get("/health").json() | {"version": ""} == {
        "status": "ok", "version": "", "writing": 0, "under_way": 0
    })  # fmt: skip


def test_a_long_book_does_not_stall_writers(served: Served) -> None:
    """While a book is read, a text is written from beginning to end."""

    async def both() -> tuple[bool, int]:
        async with httpx.AsyncClient(base_url=served.url, timeout=120) as client:
            reading = asyncio.create_task(client.post("/v1/memories/long/read", content=book(4000, seed=4).encode()))
            await asyncio.sleep(0.3)
            answer = await client.post("/v1/completions", json={"max_tokens": 50, "end_at_mark": False})
            in_time = not reading.done()
            return in_time, answer.json()["usage"]["completion_tokens"] + (await reading).json()["tokens"]

    in_time, tokens = asyncio.run(both())
    assert in_time
    assert tokens == 50 + len(book(4000, seed=4).encode())


def test_limits_on_memories_time_and_texts(tmp_path: Path) -> None:
    with serving(tmp_path, Limits(memories=1, seconds=1, max_tokens=100_000, text_bytes=5000)) as served:
        served.read("one", "text")
        assert served.client.post("/v1/memories/two/read", content=b"text").status_code == 409
        assert served.client.post("/v1/completions", json={"save_as": "two"}).status_code == 409
        answer = served.client.post("/v1/completions", json={"max_tokens": 100_000, "end_at_mark": False})
        assert answer.status_code == 504
        lines = served.client.post(
            "/v1/completions", json={"max_tokens": 100_000, "stream": True, "end_at_mark": False}
        )
        assert json.loads(lines.text.strip().splitlines()[-1][6:])["error"]["code"] == 504
        served.client.delete("/v1/memories/one")
        assert served.client.post("/v1/memories/one/read", content=b"x" * 5001).status_code == 413
        in_chunks = served.client.post("/v1/memories/one/read", content=iter([b"x" * 3000] * 2))
        assert in_chunks.status_code == 413


def test_a_body_that_stalls_or_breaks_off_frees_its_place(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with serving(tmp_path, Limits(seconds=1)) as served:
        url = httpx.URL(served.url)
        head = b"POST /v1/memories/x/read HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\nhalf"
        for leaves in (False, True):
            with socket.create_connection((url.host, url.port)) as connection:
                connection.sendall(head)
                wait_until(lambda: served.server.admission.count == 1)
                answer = b"" if leaves else connection.recv(4096)
            wait_until(lambda: served.server.admission.count == 0)
            assert leaves or answer.startswith(b"HTTP/1.1 408")
        assert not list(tmp_path.glob(".*.part"))
        assert "Traceback" not in caplog.text


def test_a_full_disk_is_told(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("block_recurrent.serve.store.save_session", full)
    answer = served.client.post("/v1/memories/new/read", content=b"text")
    assert (answer.status_code, "No space left" in answer.json()["error"]["message"]) == (507, True)
    assert served.client.get("/v1/memories/new").status_code == 404


# ---- What is left


@contextmanager
def process(run_folder: Path, memories: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    command = [sys.executable, "-m", "block_recurrent", "serve", str(run_folder), "--memories", str(memories)]
    started = subprocess.Popen([*command, "--port", "0", "--trail-every", "512"], stdout=subprocess.PIPE, text=True)
    try:
        assert started.stdout is not None
        match = re.search(r"http://\S+\d", started.stdout.readline())
        assert match
        yield started, match[0]
    finally:
        started.kill()
        started.wait()


def test_kill_during_saves_loses_nothing(run_folder: Path, tmp_path: Path) -> None:
    """Each memory is whole, and one that was ever answered for is there: as it was or as it became."""
    folder, saved = tmp_path / "memories", {}
    for round_number in range(2):
        with process(run_folder, folder) as (started, url):
            for name in saved:
                answer = httpx.post(f"{url}/v1/completions", json={"memory": name, "max_tokens": 1}, timeout=60)
                assert answer.status_code == 200, answer.text

            def save_on(number: int, url: str = url) -> None:
                with httpx.Client(base_url=url, timeout=60) as client:
                    name, text = f"memory-{number}", book(25, seed=number)
                    while True:
                        try:
                            there = {"from": name} if name in saved else {}
                            answer = client.post(f"/v1/memories/{name}/read", content=text.encode(), params=there)
                            saved[name] = answer.json()["tokens"]
                        except (httpx.HTTPError, KeyError):
                            return

            threads = [threading.Thread(target=save_on, args=(number,)) for number in range(20)]
            for thread in threads:
                thread.start()
            wait_until(lambda: len(saved) == 20, 60)
            time.sleep(0.1 + 0.13 * round_number)
            os.kill(started.pid, signal.SIGKILL)
            for thread in threads:
                thread.join()
        for name, tokens in saved.items():
            file = read_memory_file(folder / f"{name}.memory")
            assert file.tokens >= tokens
            assert len(places_of(file.path)) == len(file.notes["trail"])
            saved[name] = file.tokens
    with process(run_folder, folder):
        assert not list(folder.glob(".*.part"))


def test_rewind_of_the_command_line(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("block_recurrent.inference.text_input.FILE_BYTES", 4096)
    text, memory = tmp_path / "book.txt", tmp_path / "book.memory"
    text.write_text("The whale. " * 1500)
    read = ["read", str(run_folder), str(text), "--memory", str(memory), "--trail", "4", "--trail-every", "4000"]
    assert main(read) == 0
    capsys.readouterr()
    assert main(["memory", "rewind", str(memory)]) == 0
    places = [int(line.replace(",", "")) for line in capsys.readouterr().out.split()]
    assert places == [place.position for place in places_of(memory)]
    assert len(places) >= 2
    other = tmp_path / "other.memory"
    assert main(["memory", "rewind", str(memory), "--to", str(places[0]), "--out", str(other)]) == 0
    assert read_memory_file(other).tokens == places[0]
    assert main(["memory", "rewind", str(memory), "--to", str(places[1]), "--overwrite"]) == 0
    assert [place.position for place in places_of(memory)] == places[:2]
    assert main(["memory", "rewind", str(memory), "--to", "3", "--overwrite"]) == 2
    assert "there is no checkpoint at position 3" in capsys.readouterr().err


def test_schemathesis_finds_no_500(served: Served) -> None:
    schemathesis = pytest.importorskip("schemathesis", reason="needs schemathesis")
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis.errors import Unsatisfiable
    from schemathesis.checks import not_a_server_error

    schema = schemathesis.openapi.from_url(f"{served.url}/openapi.json")
    modes = list(schemathesis.GenerationMode)
    operations = [result.ok() for result in schema.get_all_operations()]
    assert len(operations) >= 15
    for operation in operations:
        for mode in modes:

            @given(case=operation.as_strategy(generation_mode=mode))
            @settings(
                max_examples=5, deadline=None, database=None, phases=[Phase.generate], derandomize=True,
                suppress_health_check=list(HealthCheck),
            )  # fmt: skip
            def check(case: Any) -> None:
                if isinstance(case.body, dict) and "max_tokens" in case.body:
                    case.body["max_tokens"] = 2
                answer = case.call(base_url=served.url, timeout=60)
                case.validate_response(answer, checks=[not_a_server_error])

            with suppress(Unsatisfiable):  # an operation without arguments has no wrong ones
                check()
