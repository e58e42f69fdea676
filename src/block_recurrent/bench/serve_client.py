"""Clients of `brt bench serve`. They share the cores with the server, so they do little."""

from __future__ import annotations

import http.client
import json
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, cast

from block_recurrent.errors import ConfigError

PATH = "/v1/completions"


class Client:
    """Requests to one port of this machine."""

    def __init__(self, port: int) -> None:
        self.port = port

    def ask(self, method: str, path: str, body: Any = None, seconds: float = 600) -> tuple[int, Any]:
        """Status and JSON of the response, which must begin within this time; body: JSON or raw bytes."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=seconds)
        try:
            kind = "text/plain" if isinstance(body, bytes) else "application/json"
            sent = body if isinstance(body, bytes) or body is None else json.dumps(body)
            connection.request(method, path, sent, {"content-type": kind})
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        finally:
            connection.close()

    def complete(self, **body: Any) -> Any:
        status, answer = self.ask("POST", PATH, body)
        if status != 200:
            raise ConfigError(f"the server answered {status}: {answer['error']['message']}")
        return answer

    def first_events(self, count: int, **body: Any) -> float:
        """Seconds until a number of tokens of a stream have arrived; then the client disconnects."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        began = time.perf_counter()
        connection.request("POST", PATH, json.dumps(body | {"stream": True}), {"content-type": "application/json"})
        answer = connection.getresponse()
        while count and (line := answer.readline()):  # the text may end earlier
            count -= line.startswith(b"data")
        seconds = time.perf_counter() - began
        connection.close()
        return seconds

    def streams(self, bodies: Sequence[dict[str, Any]], tokens: int) -> float:
        """Seconds until all texts have arrived, an event per token; one thread receives them."""
        selector, received = selectors.DefaultSelector(), [bytearray() for _ in bodies]
        began = time.perf_counter()
        for body, own in zip(bodies, received, strict=True):
            connection = socket.create_connection(("127.0.0.1", self.port))
            connection.sendall(_request(body | {"stream": True}))
            selector.register(connection, selectors.EVENT_READ, own)
        while selector.get_map():
            for key, _ in selector.select():
                connection = cast(socket.socket, key.fileobj)
                part = connection.recv(1 << 16)
                key.data.extend(part)
                if not part:
                    selector.unregister(connection)
                    connection.close()
        seconds = time.perf_counter() - began
        for own in received:
            if (found := _tokens(bytes(own))) != tokens:
                raise ConfigError(f"a stream has {found} tokens of {tokens}; it ends with {bytes(own[-200:])!r}")
        return seconds


def _request(body: dict[str, Any]) -> bytes:
    raw = json.dumps(body).encode()
    lines = [f"POST {PATH} HTTP/1.1", "host: 127.0.0.1", "content-type: application/json", "connection: close"]
    return "\r\n".join([*lines, f"content-length: {len(raw)}", "", ""]).encode() + raw


def _tokens(response: bytes) -> int:
    """The number of tokens in all events of a response."""
    events = [line[6:] for line in response.splitlines() if line.startswith(b"data: {")]
    return sum(len(choice["token_ids"]) for event in events for choice in json.loads(event)["choices"])


def together(count: int, work: Callable[[int], object]) -> float:
    """Seconds that a number of threads took for their work."""
    threads = [threading.Thread(target=work, args=(number,)) for number in range(count)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - began
