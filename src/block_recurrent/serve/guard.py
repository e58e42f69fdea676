"""Checks of every request: key, host, origin and size; and counts of responses."""

from __future__ import annotations

import hmac
import json
from collections import Counter
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import urlsplit

from block_recurrent.serve.limits import RequestError

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
LOOPBACK = ("127.0.0.1", "localhost", "::1")
OPEN = ("/health", "/", "/docs", "/page", "/openapi.json")
"""Paths that need no key: they reveal nothing about memories or models."""
POLICY = "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"


def error_body(status: int, message: str) -> dict[str, Any]:
    """An error in OpenAI's format."""
    kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
    message = message.encode(errors="backslashreplace").decode()  # a name may contain half a character, as JSON may
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}


class Guard:
    """Middleware. body_bytes: maximum size of a body by path; answered: counts by route and status, for /metrics."""

    def __init__(
        self,
        app: Any,
        key: str | None,
        hosts: tuple[str, ...],
        body_bytes: Callable[[str], int],
        answered: Counter[tuple[str, int]],
    ) -> None:
        self.app, self.key, self.hosts, self.body_bytes, self.answered = app, key, hosts, body_bytes, answered

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        if scope["method"] == "HEAD":  # the server sends no body
            scope = {**scope, "method": "GET"}
        status = 499  # the usual code for a client that disconnected before the response

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [
                    *message.get("headers", ()),
                    (b"content-security-policy", POLICY.encode()),
                    (b"x-content-type-options", b"nosniff"),
                    (b"referrer-policy", b"no-referrer"),
                ]
            await send(message)

        try:
            headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
            try:
                self._check(scope["path"], headers)
            except RequestError as error:
                return await _answer(noting, error)
            await self.app(scope, _counted(receive, self.body_bytes(scope["path"])), noting)
        finally:
            route = getattr(scope.get("route"), "path", "other")
            self.answered[f"{scope['method']} {route}", status] += 1

    def _check(self, path: str, headers: dict[str, str]) -> None:
        # Pages of other sites must not reach a server on this machine, not even by DNS rebinding.
        host = urlsplit(f"//{headers.get('host', '')}")
        if self.hosts and host.hostname not in self.hosts:
            raise RequestError(403, f"host {host.hostname!r} is not allowed: use {self.hosts[0]}")
        origin = headers.get("origin")
        if origin and urlsplit(origin).netloc != host.netloc:
            raise RequestError(403, f"origin {origin!r} is not allowed: cross-origin requests are rejected")
        if self.key is not None and path not in OPEN and not path.startswith("/page/"):
            scheme, _, given = headers.get("authorization", "").partition(" ")
            if scheme.lower() != "bearer" or not hmac.compare_digest(given.encode(), self.key.encode()):
                raise RequestError(401, "the API key is missing or wrong: send 'Authorization: Bearer KEY'")
        if (encoding := headers.get("content-encoding", "identity").lower()) != "identity":
            raise RequestError(415, f"the body has Content-Encoding {encoding!r}: send it uncompressed")
        length, most = headers.get("content-length", "0"), self.body_bytes(path)
        if not length.isdecimal() or int(length) > most:
            raise RequestError(413, f"the request has {length} bytes: at most {most} are allowed here")


def _counted(receive: Receive, most: int) -> Receive:
    """Limits a body without a content length."""
    count = 0

    async def counting() -> Message:
        nonlocal count
        message = await receive()
        count += len(message.get("body", b""))
        if count > most:
            raise RequestError(413, f"the request has more than {most} bytes, the maximum here")
        return message

    return counting


async def _answer(send: Send, error: RequestError) -> None:
    body = json.dumps(error_body(error.status, str(error))).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
