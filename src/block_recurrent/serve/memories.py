"""/v1/memories: read, list, inspect, fork, rewind, rename, compare, delete, download and upload."""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, BinaryIO

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import ClientDisconnect

from block_recurrent.errors import did_you_mean
from block_recurrent.inference.session_state import SessionState
from block_recurrent.inference.text_input import check_text, read_text
from block_recurrent.inference.trail import Trail
from block_recurrent.serve.limits import RequestError
from block_recurrent.serve.reading import Piece, Prefix, Reading, Served, encoded, in_pieces
from block_recurrent.serve.server import CLIENT_GONE, Server, event_stream, while_wanted
from block_recurrent.serve.store import Memory, there

router = APIRouter(prefix="/v1/memories")
TITLE = Query(None, max_length=200)
READ_OPTIONS = ("model", "from", "title", "stream")
TEXT_BODY = {"requestBody": {"required": True, "content": {"text/plain": {"schema": {"type": "string"}}}}}
FILE_BODY = {
    "requestBody": {
        "required": True,
        "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
    }
}


class ForkRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: str = Field(description="Name of the new memory.")
    at: int | None = Field(None, ge=0, description="A position of the trail; by default the current one.")


class RewindRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")
    to: int = Field(ge=0, description="A position of the trail.")


class RenameRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: str


@router.get("")
async def listed(request: Request) -> dict[str, Any]:
    """List all memories."""
    server: Server = request.app.state.server
    return {"object": "list", "data": [_info(server, memory, whole=False) for memory in server.store.list()]}


@router.get("/{name}")
async def info(request: Request, name: str) -> dict[str, Any]:
    """A memory: its trail, the end of its text, and metrics of its state over the text."""
    server: Server = request.app.state.server
    return _info(server, server.store.get(name))


@router.delete("/{name}")
async def delete(request: Request, name: str) -> dict[str, Any]:
    """Delete a memory, and those checkpoints of its trail that no other memory has."""
    await asyncio.to_thread(request.app.state.server.store.delete, name)
    return {"object": "memory.deleted", "name": name, "deleted": True}


@router.patch("/{name}")
async def rename(request: Request, name: str, body: RenameRequest) -> dict[str, Any]:
    """Give a memory another name."""
    server: Server = request.app.state.server
    return _info(server, await asyncio.to_thread(server.store.rename, name, body.name))


@router.post("/{name}/fork")
async def fork(request: Request, name: str, body: ForkRequest) -> dict[str, Any]:
    """Copy a memory, at its current or an earlier position, to a new name."""
    server: Server = request.app.state.server
    model = server.model_of(server.store.get(name))
    reference = name if body.at is None else f"{name}@{body.at}"
    return _info(server, await asyncio.to_thread(server.store.fork, reference, body.name, model))


@router.post("/{name}/rewind")
async def rewind(request: Request, name: str, body: RewindRequest) -> dict[str, Any]:
    """Restore a memory exactly from a checkpoint of its trail."""
    server: Server = request.app.state.server
    model = server.model_of(server.store.get(name))
    return _info(server, await asyncio.to_thread(server.store.rewind, name, body.to, model))


@router.get("/{name}/diff/{other}")
async def diff(request: Request, name: str, other: str) -> dict[str, Any]:
    """The distance between two memories, layer by layer; each is NAME or NAME@POSITION."""
    return await asyncio.to_thread(request.app.state.server.store.diff, name, other)


@router.get("/{name}/file", response_class=StreamingResponse)
async def download(request: Request, name: str) -> Response:
    """Download the memory file, for `brt write --memory`."""
    path = request.app.state.server.store.path_of(name)
    with there(path):
        file = path.open("rb")  # the same file from now on, even if the memory is replaced or deleted
    headers = {
        "content-length": str(os.fstat(file.fileno()).st_size),
        "content-disposition": f'attachment; filename="{name.replace("@", "-")}.memory"',
    }
    return StreamingResponse(_chunks(file), media_type="application/octet-stream", headers=headers)


def _chunks(file: BinaryIO) -> Iterator[bytes]:
    with file:
        while chunk := file.read(1 << 20):
            yield chunk


@router.put("/{name}/file", openapi_extra=FILE_BODY)
async def upload(request: Request, name: str) -> dict[str, Any]:
    """Upload a memory file made by `brt read` or a download."""
    server: Server = request.app.state.server
    server.store.check_free(name)
    server.store.check_new(name)
    async with _spooled(request, server) as path:
        models = list(server.models.values())
        return _info(server, await asyncio.to_thread(server.store.take_in, name, path, models))


@router.post("/{name}/read", response_model=None, openapi_extra=TEXT_BODY)
async def read(
    request: Request,
    name: str,
    model: str | None = None,
    source: str | None = Query(None, alias="from", description="The memory to continue from; by default an empty one."),
    title: str | None = TITLE,
    stream: bool = Query(False, description="Report progress as server-sent events."),
) -> Response | dict[str, Any]:
    """Read the body, UTF-8 text, into a memory. With `from` set to the same name, the memory is extended."""
    server: Server = request.app.state.server
    _check_plain(request)
    if source is None or source.split("@")[0] != name:
        server.store.check_free(name)
    server.store.check_new(name)
    made_by = server.model(model, source)
    with server.admission.take():
        pass  # raise errors before the text arrives, while the status code can still be set
    job = _read(server, request, made_by, name, source, title)
    if stream:
        # Read the text before the response begins: browsers read no response before they have sent everything.
        first = await anext(job)
        return event_stream(first, job, server.limits.seconds, request.app.state.described)
    events: list[dict[str, Any]] = []
    async with aclosing(job):
        await anext(job)

        async def rest() -> None:
            async for event in job:
                events[:] = [event]

        await while_wanted(request, server.limits.seconds, rest())
    return events[0]["memory"]


async def _read(
    server: Server, request: Request, model: Served, name: str, source: str | None, title: str | None
) -> AsyncGenerator[dict[str, Any]]:
    """Events: progress, and finally the memory."""
    with server.admission.take():
        async with _spooled(request, server) as path:
            total = path.stat().st_size
            if total == 0:
                raise RequestError(400, "the text is empty: there is nothing to read")
            await asyncio.to_thread(check_text, path)
            yield {"bytes": 0, "total_bytes": total, "tokens": 0}
            book = Book(server, model, await server.state_of(model, source))
            notes: dict[str, Any] = {}
            if source is not None:
                work = partial(server.store.trail_to, source, name)
                book.trail, notes = await server.hold(work, itemgetter(0))
                book.reading.trace = notes.get("trace") or {}
            try:
                async with aclosing(book.read(path)) as events:
                    async for event in events:
                        yield event | {"total_bytes": total}
                notes |= {"trace": book.reading.trace} | ({"title": title} if title else {})
                save = server.store.save
                memory = await asyncio.to_thread(save, name, model, book.state, book.trail, notes)
            finally:
                server.release(book.trail)
            yield {"memory": _info(server, memory)}


class Book:
    """Reads a text into a memory, with checkpoints."""

    def __init__(self, server: Server, model: Served, state: SessionState) -> None:
        self.server, self.model, self.state, self.trail = server, model, state, Trail()
        self.reading = Reading(model, replace(state, held=b""), watch=True)

    async def read(self, path: Path) -> AsyncGenerator[dict[str, Any]]:
        """Events: progress. Afterwards `state` is that of the whole text."""
        start, began = self.state, time.perf_counter()
        skipped = await self._find_beginning(path) if start.position == 0 and not start.held else 0
        left, done, text = skipped, 0, start.text
        held = start.held
        async with aclosing(in_pieces(self._pieces(path))) as pieces:
            async for piece in pieces:
                again = min(left, len(piece.tokens))
                left, done, text = left - again, done + len(piece.raw), text.update(piece.raw)
                held = piece.held
                await self.reading.add(piece.tokens[again:], self._reached)
                tokens = self.reading.state.position
                rate = (tokens - start.position - skipped) / (time.perf_counter() - began)
                yield {"bytes": done, "tokens": tokens, "reused": skipped, "tokens_per_second": round(rate)}
        if self.reading.state.position > start.position + skipped:
            await self._reached(self.reading, least=1)  # so that a text that extends this one need not be read again
        self.state = replace(await self.reading.finish(), text=text, held=held)
        self.server.counts["read"] += self.state.position - start.position - skipped
        self.server.counts["reused"] += skipped

    def _pieces(self, path: Path) -> Iterator[Piece]:
        # Small pieces, for smooth progress.
        short = (text[i : i + 8192] for text in read_text(path) for i in range(0, len(text), 8192))
        return encoded(self.model.tokenizer, self.state, short)

    async def _find_beginning(self, path: Path) -> int:
        """Start from the longest checkpoint whose text is a prefix of this one; returns its number of tokens."""

        def find() -> Any:
            return self.server.store.find_prefix(self.model, [piece.tokens for piece in self._pieces(path)], least=0)

        self.reading.prefix = Prefix.of(self.model)
        if (found := await asyncio.to_thread(find)) is None:
            return 0
        found_trail, prefix = found
        place = found_trail.places[-1]
        self.trail = await self.server.hold(partial(self.server.store.reserve, found_trail), lambda trail: trail)
        if place not in self.trail.places:  # deleted in the meantime
            return 0
        state = await asyncio.to_thread(self.server.store.load_place, place, self.model)
        self.reading = Reading(self.model, state, prefix, watch=True)
        self.reading.trace = self.server.store.trace_to(place)
        return place.position

    async def _reached(self, reading: Reading, least: int | None = None) -> None:
        position = reading.state.position
        last = self.trail.places[-1].position if self.trail.places else 0
        if position - last >= (least or self.server.limits.trail_every):
            prefix = reading.prefix.key() if reading.prefix else None
            work = partial(self.server.store.checkpoint, self.model, reading.state, prefix)
            place = await self.server.hold(work, lambda place: Trail((place,)))
            before, self.trail = self.trail, self.trail.add(place, self.server.limits.trail)
            self.server.release(Trail(tuple(p for p in (*before.places, place) if p not in self.trail.places)))


def _check_plain(request: Request) -> None:
    """Reading something else than the text itself, or into another place, would go unnoticed."""
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if kind in ("multipart/form-data", "application/json"):
        raise RequestError(415, f"the body is {kind}: send the text itself, as text/plain (curl --data-binary @FILE)")
    for name in request.query_params:
        if name not in READ_OPTIONS:
            raise RequestError(400, f"unknown parameter {name!r}{did_you_mean(name, READ_OPTIONS)}")


@asynccontextmanager
async def _spooled(request: Request, server: Server) -> AsyncGenerator[Path]:
    """The request's body as a file; the guard has limited its size."""
    path, seconds = server.store.folder / f".{uuid.uuid4().hex}.part", server.limits.seconds
    try:
        try:
            async with asyncio.timeout(seconds):
                with path.open("wb") as file:
                    async for chunk in request.stream():
                        file.write(chunk)
        except TimeoutError:
            raise RequestError(408, f"the body did not arrive within the limit of {seconds} seconds") from None
        except ClientDisconnect:
            raise RequestError(CLIENT_GONE, "the client disconnected") from None
        yield path
    finally:
        path.unlink(missing_ok=True)


def _info(server: Server, memory: Memory, whole: bool = True) -> dict[str, Any]:
    model = next((m for m in server.models.values() if m.engine.fingerprint() == memory.model_hash), None)
    notes = memory.notes
    info = {
        "object": "memory",
        "name": memory.name,
        "title": notes.get("title") or memory.name,
        "model": model.id if model else None,
        "model_name": memory.model_name,
        "tokens": memory.tokens,
        "text_bytes": memory.text_bytes,
        "text_hash": memory.text_hash,
        "bytes": model.beginning.memory.nbytes if model else None,
        "created": notes.get("created"),
        "id": notes.get("id"),
        "parent": notes.get("parent"),
        "parent_at": notes.get("parent_at"),
        "trail": [place.position for place in memory.trail.places],
    }
    if whole:
        raw = model.tokenizer.decode_bytes(list(memory.recent)) if model else b""
        ending, held = (
            (raw + memory.held).decode(errors="replace").lstrip("\ufffd"),
            memory.held.decode(errors="replace"),
        )
        info |= {"trace": notes.get("trace") or {}, "ending": ending, "held": held, "recent": memory.recent}
    return info
