"""Sixty kinds of bad requests: each is answered with 4xx and one clear sentence, and harms nobody."""

from __future__ import annotations

import gzip
import json
from typing import Any

import pytest

from .conftest import Served

COMPLETIONS: list[dict[str, Any]] = [
    {"model": "nano"},
    {"model": 3},
    {"model": "\ud83d"},
    {"\ud83d": 1},
    {"temperature": 10**400},
    {"prompt": 3},
    {"prompt": {"a": 1}},
    {"prompt": [1.5]},
    {"prompt": [[1], "a"]},
    {"prompt": [257]},
    {"prompt": [256]},
    {"prompt": [-1]},
    {"prompt": [10**30]},
    {"prompt": None},
    {"max_tokens": 0},
    {"max_tokens": -3},
    {"max_tokens": "many"},
    {"max_tokens": 10**9},
    {"max_tokens": 1.5},
    {"temperature": -1},
    {"temperature": "hot"},
    {"temperature": float("nan")},
    {"temperature": float("inf")},
    {"top_p": 0},
    {"top_p": 1.1},
    {"top_k": -1},
    {"min_p": 2},
    {"repetition_penalty": 0},
    {"n": 0},
    {"n": 129},
    {"n": 100, "prompt": ["a", "b", "c"]},
    {"logprobs": -1},
    {"logprobs": 21},
    {"stop": ""},
    {"stop": [""]},
    {"stop": 7},
    {"seed": -1},
    {"seed": 2**60},
    {"seed": "x"},
    {"stream": "perhaps"},
    {"stream_options": {"usage": True}},
    {"echo": True},
    {"best_of": 5},
    {"suffix": "end"},
    {"logit_bias": {"5": 1}},
    {"presence_penalty": 0.5},
    {"frequency_penalty": 1},
    {"temprature": 1},
    {"memory": "nobody"},
    {"memory": "../secret"},
    {"memory": "a/b"},
    {"memory": "x@y"},
    {"memory": "known@7"},
    {"memory": ""},
    {"memory": "known", "model": "nano"},
    {"save_as": "../up"},
    {"save_as": ".hidden"},
    {"save_as": "x" * 65},
    {"save_as": "a b"},
    {"save_as": "ok", "n": 2},
]
OTHERS: list[tuple[str, str, Any, int]] = [
    ("POST", "/v1/completions", b"not json", 400),
    ("POST", "/v1/completions", b"[1, 2]", 400),
    ("POST", "/v1/completions", b"", 400),
    ("POST", "/v1/completions", b"\xff\xfe", 400),
    ("POST", "/v1/completions", b'{"prompt": "' + b"a" * (1 << 20) + b'"}', 413),
    ("GET", "/v1/completions", None, 405),
    ("POST", "/v1/score", b"{}", 400),
    ("POST", "/v1/score", b'{"text": "a", "token_ids": [1]}', 400),
    ("POST", "/v1/score", b'{"text": ""}', 400),
    ("POST", "/v1/score", b'{"token_ids": [999]}', 400),
    ("POST", "/v1/score", b'{"text": "a", "memory": "nobody"}', 404),
    ("GET", "/v1/memories/nobody", None, 404),
    ("GET", "/v1/memories/%2e%2e%2fetc", None, 404),
    ("GET", "/v1/memories/..", None, 404),
    ("GET", "/v1/memories/a%00b", None, 400),
    ("DELETE", "/v1/memories/nobody", None, 404),
    ("PATCH", "/v1/memories/known", b'{"name": "a/b"}', 400),
    ("PATCH", "/v1/memories/known", b'{"name": "known"}', 409),
    ("POST", "/v1/memories/known/fork", b'{"name": "known"}', 409),
    ("POST", "/v1/memories/known/fork", b'{"name": "n", "at": 3}', 400),
    ("POST", "/v1/memories/known/rewind", b'{"to": 3}', 400),
    ("POST", "/v1/memories/known/rewind", b'{"to": -3}', 400),
    ("POST", "/v1/memories/known/read", b"text", 409),
    ("POST", "/v1/memories/new/read", b"", 400),
    ("POST", "/v1/memories/new/read", b"\xff\xfet\x00", 400),
    ("POST", "/v1/memories/new/read", b"caf\xe9", 400),
    ("POST", "/v1/memories/new/read?from=nobody", b"text", 404),
    ("POST", "/v1/memories/new/read?model=nano", b"text", 404),
    ("POST", f"/v1/memories/new/read?title={'t' * 201}", b"text", 400),
    ("POST", "/v1/memories/new/read?form=known", b"text", 400),
    ("POST", "/v1/memories/%20/read", b"text", 400),
    ("PUT", "/v1/memories/new/file", b"\x80\x04pickle", 400),
    ("PUT", "/v1/memories/new/file", b"x" * (3 << 20), 413),
    ("PUT", "/v1/memories/known/file", b"x", 409),
    ("GET", "/v1/memories/known/diff/nobody", None, 404),
    ("GET", "/v1/memories/nobody/file", None, 404),
    ("GET", "/v1/models/nano", None, 404),
    ("GET", "/page/..%2fapp.py", None, 404),
    ("GET", "/page/app.py", None, 404),
    ("GET", "/nowhere", None, 404),
]


@pytest.fixture(autouse=True)
def _a_known_memory(served: Served) -> Any:
    if served.client.get("/v1/memories/known").status_code == 404:
        served.read("known", "A text that is known.")
    before = served.client.get("/v1/memories").json()
    yield
    assert served.client.get("/v1/memories").json() == before
    assert served.client.get("/health").json()["under_way"] == 0


def check(answer: Any, status: range | int) -> None:
    found = answer.status_code
    assert found in status if isinstance(status, range) else found == status, f"{found}: {answer.text[:300]}"
    sentence = answer.json()["error"]["message"]
    assert 10 < len(sentence) < 400
    assert "\n" not in sentence
    assert "Traceback" not in sentence


@pytest.mark.parametrize("body", COMPLETIONS, ids=lambda body: str(body)[:60])
def test_completions(served: Served, body: dict[str, Any]) -> None:
    """Streams too: their status code comes with the first token."""
    for more in ({}, {"stream": True, "model": "micro"}):
        sent = json.dumps({"max_tokens": 2} | more | body)
        answer = served.client.post("/v1/completions", content=sent, headers={"content-type": "application/json"})
        check(answer, range(400, 500))


@pytest.mark.parametrize(("method", "path", "body", "status"), OTHERS, ids=lambda value: str(value)[:50])
def test_others(served: Served, method: str, path: str, body: bytes | None, status: int) -> None:
    kind = "text/plain" if path.split("?")[0].endswith(("/read", "/file")) else "application/json"
    check(served.client.request(method, path, content=body, headers={"content-type": kind}), status)


@pytest.mark.parametrize("kind", ["multipart/form-data; boundary=x", "application/json"])
def test_a_body_that_is_not_the_text_itself_is_not_read(served: Served, kind: str) -> None:
    answer = served.client.post("/v1/memories/new/read", content=b'{"text": "a"}', headers={"content-type": kind})
    check(answer, 415)
    assert "--data-binary" in answer.text


@pytest.mark.parametrize("path", ["completions", "memories/new/read"])
def test_compressed_bodies(served: Served, path: str) -> None:
    headers = {"content-type": "text/plain" if "read" in path else "application/json", "content-encoding": "gzip"}
    check(served.client.post(f"/v1/{path}", content=gzip.compress(b'{"max_tokens": 2}'), headers=headers), 415)


def test_names_of_temporary_files_are_not_told(served: Served) -> None:
    before = served.server.counts["read"]
    for body in (b"caf\xe9", b"a" * 70_000 + b"\xff", "text".encode("utf-16")):
        answer = served.client.post("/v1/memories/new/read", content=body)
        check(answer, 400)
        assert "the text is" in answer.json()["error"]["message"]
        assert ".part" not in answer.text
        if body.endswith(b"\xff"):
            assert "(byte 0xFF at offset 70,000)" in answer.text
    assert served.server.counts["read"] == before, "nothing is read of a text that is refused"


def test_there_are_sixty() -> None:
    assert len(COMPLETIONS) + len(OTHERS) >= 60
