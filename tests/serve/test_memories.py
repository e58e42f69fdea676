"""/v1/memories: values with names. Rewinding is exact, forks don't touch each other, files are those of `brt read`."""

from __future__ import annotations

import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import pytest

from block_recurrent.inference.session import Session
from block_recurrent.inference.session_file import read_memory_file, save_session
from block_recurrent.inference.trail import Place, Trail, save_checkpoint
from block_recurrent.serve.app import load_model
from block_recurrent.serve.limits import Limits
from block_recurrent.serve.reading import MOST_POINTS

from .conftest import Served, book, serving, wait_until

TEXT = book(600, seed=5)


def file_of(served: Served, name: str, tmp_path: Path) -> Path:
    answer = served.client.get(f"/v1/memories/{name}/file")
    assert answer.status_code == 200, answer.text
    path = tmp_path / "downloaded.memory"
    path.write_bytes(answer.content)
    return path


def post(served: Served, path: str, body: dict | None = None, status: int = 200) -> dict:
    answer = served.client.post(f"/v1/memories/{path}", json=body)
    assert answer.status_code == status, answer.text
    return answer.json()


def test_reading_gives_the_file_of_brt_read(served: Served, tmp_path: Path) -> None:
    info = served.read("book", TEXT, title="A book")
    size = len(TEXT.encode())
    assert (info["tokens"], info["text_bytes"], info["title"]) == (size, size, "A book")
    assert TEXT.endswith(info["ending"])
    session = served.session(TEXT)
    file = read_memory_file(file_of(served, "book", tmp_path))
    assert file.text_hash == session.state.text.hexdigest()
    assert file.state.memory.equals(session.memory, tolerance=1e-4)
    loaded = Session.load(file.path, served.engine, session.tokenizer)
    assert loaded.write_all(9, temperature=0) == session.write_all(9, temperature=0)


def test_progress_is_told(served: Served) -> None:
    url = "/v1/memories/told/read?stream=true"
    with served.client.stream("POST", url, content=TEXT.encode() * 8) as answer:
        lines = [line[6:] for line in answer.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    events = [json.loads(line) for line in lines[:-1]]
    assert events[0]["bytes"] == 0
    done = [event["bytes"] for event in events if "bytes" in event]
    assert done == sorted(done)
    assert done[-1] == events[0]["total_bytes"] == len(TEXT.encode() * 8)
    assert events[-1]["memory"]["tokens"] == done[-1]


def test_reading_on_is_reading_it_all(served: Served) -> None:
    half = len(TEXT) // 2
    served.read("halves", TEXT[:half])
    info = served.read("halves", TEXT[half:], **{"from": "halves"})
    assert info["text_hash"] == served.session(TEXT).state.text.hexdigest()
    assert info["trace"]["at"] == sorted(info["trace"]["at"])
    assert info["trace"]["at"][-1] == info["tokens"]


def test_rewinding_is_exact(served: Served) -> None:
    """From each place of the trail, the text is what it was when the memory stood there."""
    served.read("past", TEXT)
    answers = {}
    for number in range(4):
        at = served.client.get("/v1/memories/past").json()["tokens"]
        answers[at] = served.complete(memory="past", max_tokens=15, seed=number, save_as="past")["choices"]
    seeds = {at: number for number, at in enumerate(answers)}
    for at in sorted(answers, reverse=True):
        assert served.complete(memory=f"past@{at}", max_tokens=15, seed=seeds[at])["choices"] == answers[at]
        info = post(served, "past/rewind", {"to": at})
        assert info["tokens"] == at
        assert max(info["trail"]) <= at
        assert served.complete(memory="past", max_tokens=15, seed=seeds[at])["choices"] == answers[at]
    assert info["text_hash"] == served.session(TEXT).state.text.hexdigest()


def test_forks_go_their_own_ways(served: Served) -> None:
    served.read("trunk", TEXT)
    before = served.client.get("/v1/memories/trunk").json()
    fork = post(served, "trunk/fork", {"name": "branch"})
    assert (fork["parent"], fork["parent_at"]) == (before["id"], before["tokens"])
    earlier = post(served, "trunk/fork", {"name": "early", "at": 512})
    assert earlier["tokens"] == 512
    served.complete(memory="branch", prompt=" Another way.", max_tokens=5, save_as="branch")
    assert served.client.get("/v1/memories/trunk").json() == before
    expected = served.session(TEXT.encode()[:512].decode(errors="ignore")).state.text.hexdigest()
    assert earlier["text_hash"] == expected
    diff = served.client.get("/v1/memories/trunk/diff/branch").json()
    assert diff["tokens"][1] > diff["tokens"][0]
    same = served.client.get(f"/v1/memories/trunk/diff/branch@{before['tokens']}").json()
    assert same["same_text"]
    assert {row["largest"] for row in same["layers"]} == {0.0}


def test_a_word_that_may_continue_is_shown(tmp_path: Path) -> None:
    """Its tokens depend on what follows; until then, it is kept as text."""
    model, _ = load_model("books", "last", "cpu", "float32")
    with serving(tmp_path, Limits(), model=model) as served:
        info = served.read("held", "Hello there, my friend")
        assert (info["ending"], info["held"]) == ("Hello there, my friend", " friend")
        assert info["text_bytes"] == len("Hello there, my friend")
        assert info["model_name"].startswith("books, step ")


def test_names_change_and_go(served: Served) -> None:
    served.read("old", "some text")
    assert served.client.patch("/v1/memories/old", json={"name": "new"}).json()["name"] == "new"
    assert served.client.get("/v1/memories/old").status_code == 404
    assert served.client.delete("/v1/memories/new").json()["deleted"]
    assert "new" not in [memory["name"] for memory in served.client.get("/v1/memories").json()["data"]]


def test_a_file_can_be_sent(served: Served, tmp_path: Path) -> None:
    served.read("sent", TEXT)
    raw = file_of(served, "sent", tmp_path).read_bytes()
    answer = served.client.put("/v1/memories/received/file", content=raw)
    assert answer.status_code == 200, answer.text
    assert answer.json()["trail"] == []  # a stranger's file names no checkpoints here
    assert served.client.get("/v1/memories/sent/diff/received").json()["same_text"]
    for damaged in (raw[:-5], raw[: len(raw) // 2], b"\x80\x04" + raw, b"", raw[:-1] + bytes([raw[-1] ^ 1])):
        answer = served.client.put("/v1/memories/damaged/file", content=damaged)
        assert answer.status_code == 400, answer.text
        assert str(served.folder) not in answer.text
    assert served.client.get("/v1/memories/damaged").status_code == 404


def test_a_file_that_is_gone_is_told(served: Served) -> None:
    """Another request may delete a memory at any moment."""
    served.read("gone", "some text")
    with served.client.stream("GET", "/v1/memories/gone/file") as answer:
        (served.folder / "gone.memory").unlink()
        assert len(answer.read()) == int(answer.headers["content-length"])
    served.server.store._cache.clear()
    for method, path, body in (
        ("POST", "/v1/completions", {"memory": "gone"}),
        ("GET", "/v1/memories/gone/file", None),
        ("PATCH", "/v1/memories/gone", {"name": "elsewhere"}),
    ):
        answer = served.client.request(method, path, json=body)
        assert answer.status_code == 404, answer.text
        assert "was deleted in the meantime" in answer.json()["error"]["message"]
    assert served.client.delete("/v1/memories/gone").status_code == 200


def test_others_do_not_wait_while_a_memory_is_written(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    served.read("read", "some text")
    begun, go_on = threading.Event(), threading.Event()

    def slow(*given: object) -> None:
        begun.set()
        assert go_on.wait(60)
        save_session(*given)  # type: ignore[arg-type]

    monkeypatch.setattr("block_recurrent.serve.store.save_session", slow)
    with ThreadPoolExecutor() as pool:
        writing = pool.submit(served.read, "slow", "another text")
        try:
            assert begun.wait(60)
            assert served.client.get("/v1/memories").status_code == 200
            assert served.client.get("/v1/memories/read").json()["tokens"] == 9
            for memory in (None, "read"):
                answer = served.complete(prompt="sea", memory=memory, max_tokens=3, end_at_mark=False)
                assert answer["usage"]["completion_tokens"] == 3
            assert not writing.done()
        finally:
            go_on.set()
        assert writing.result()["tokens"] == 12


def test_score_tells_what_the_memory_was_worth(served: Served) -> None:
    served.read("scored", TEXT)
    answer = served.client.post("/v1/score", json={"memory": "scored", "text": " whale and ship"}).json()
    session = served.session(TEXT)
    expected = session.score(" whale and ship")
    count = expected.tokens
    assert sum(answer["bits"]["memory"]) == pytest.approx(expected.bits, rel=1e-3)
    assert sum(answer["bits"]["empty"]) == pytest.approx(served.session().loss_of(" whale and ship"), rel=1e-3)
    assert {name: len(values) for name, values in answer["bits"].items()} == dict.fromkeys(
        ("memory", "cleared", "empty"), count
    )
    assert answer["bits"]["cleared"] != answer["bits"]["memory"]
    again = served.client.post("/v1/score", json={"memory": "scored", "token_ids": answer["token_ids"]}).json()
    assert again["bits"] == answer["bits"]


def test_the_trail_keeps_the_newest_and_spreads_the_rest() -> None:
    trail = Trail()
    for position in range(100, 4001, 100):
        trail = trail.add(Place(position, f"p{position}"), keep=8)
    positions = [place.position for place in trail.places]
    assert len(positions) == 8
    assert positions[-4:] == [3700, 3800, 3900, 4000]
    assert max(b - a for a, b in zip([0, *positions], positions, strict=False)) < 2500
    assert Trail().add(Place(1, "a"), 1).add(Place(2, "b"), 1).places == (Place(2, "b"),)


def test_checkpoints_that_nobody_names_are_deleted(served: Served) -> None:
    with serving(served.folder.with_name("counted"), Limits(trail_every=512, trail=3)) as other:

        def files() -> int:
            return len(list((other.folder / "trail").glob("*")))

        other.read("a", TEXT)
        assert files() == 3
        post(other, "a/fork", {"name": "b"})
        assert files() == 4  # where the fork began; the rest is shared
        other.client.delete("/v1/memories/a")
        assert files() == 3
        other.client.delete("/v1/memories/b")
        assert files() == 0


def test_what_is_continued_may_be_deleted_meanwhile(served: Served) -> None:
    """Its checkpoints stay for the memory that will have them."""
    served.read("source", TEXT)
    with served.client.stream(
        "POST", "/v1/completions",
        json={"memory": "source", "save_as": "continued", "max_tokens": 300, "stream": True, "end_at_mark": False},
    ) as answer:  # fmt: skip
        lines = answer.iter_lines()
        next(lines)
        assert served.client.delete("/v1/memories/source").status_code == 200
        assert not any('"error"' in line for line in lines)
    trail = served.client.get("/v1/memories/continued").json()["trail"]
    assert len(trail) > 3
    for at in trail:
        assert served.complete(memory=f"continued@{at}", max_tokens=2)["usage"]["memory_tokens"] == at
    served.client.delete("/v1/memories/continued")
    wait_until(lambda: not served.server.store._reserved)


def test_a_read_that_is_cancelled_while_a_checkpoint_is_saved_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = threading.Event()

    def slow(*given: object) -> Place:
        begun.set()
        time.sleep(0.3)
        return save_checkpoint(*given)  # type: ignore[arg-type]

    monkeypatch.setattr("block_recurrent.serve.store.save_checkpoint", slow)
    with serving(tmp_path, Limits(trail_every=512)) as served:
        for path in ("gone/read", "gone/read?stream=true"):
            begun.clear()
            with socket.create_connection((served.client.base_url.host, served.client.base_url.port)) as connection:
                text = TEXT.encode()
                head = f"POST /v1/memories/{path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(text)}\r\n\r\n"
                connection.sendall(head.encode() + text)
                assert begun.wait(60)
            wait_until(lambda: served.server.admission.count == 0)
            time.sleep(0.4)
            wait_until(lambda: not list((tmp_path / "trail").glob("*")))
            assert not served.server.store._reserved


def test_the_trace_is_even(served: Served) -> None:
    """Also if the text is read in parts, or its beginning was read before."""
    text = book(9000, seed=2)
    served.read("even", text[: len(text) // 3])
    whole = served.read("whole", text)["trace"]
    at = served.read("even", text[len(text) // 3 :], **{"from": "even"})["trace"]["at"]
    assert served.client.get("/v1/memories/even").json()["tokens"] == whole["at"][-1]
    assert whole["at"][0] == 512
    assert whole["at"][-1] - whole["at"][-2] < 3 * 512
    assert len(at) == MOST_POINTS
    assert at == sorted(at)
    gaps = [b - a for a, b in pairwise(at[:-1])]
    assert max(gaps) <= 3 * min(gaps)


def test_a_server_that_starts_again_has_all_of_it(served: Served) -> None:
    folder = served.folder.with_name("again")
    limits = Limits(trail_every=512)
    with serving(folder, limits) as first:
        first.read("book", TEXT)
        before = first.client.get("/v1/memories").json()
        text = first.complete(memory="book@512", max_tokens=20, seed=1)["choices"]
    (folder / ".x.part").write_text("what a killed process left")
    with serving(folder, limits) as second:
        assert second.client.get("/v1/memories").json() == before
        assert second.complete(memory="book@512", max_tokens=20, seed=1)["choices"] == text
        assert not (folder / ".x.part").exists()
