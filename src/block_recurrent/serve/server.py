"""Shared by all requests: models, memories, limits, and waiting for work until the client disconnects."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import StreamingResponse

from block_recurrent.errors import BlockRecurrentError, did_you_mean
from block_recurrent.inference.session_state import SessionState
from block_recurrent.inference.trail import Trail
from block_recurrent.serve.guard import error_body
from block_recurrent.serve.limits import Admission, Limits, RequestError
from block_recurrent.serve.reading import Reading, Served, Tokens
from block_recurrent.serve.store import Memory, Store

T = TypeVar("T")
CLIENT_GONE, TOO_LONG = 499, 504


@dataclass
class Server:
    """One per process; `request.app.state.server`."""

    limits: Limits
    store: Store
    models: dict[str, Served] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    """Tokens read, generated, scored and reused."""
    answered: Counter[tuple[str, int]] = field(default_factory=Counter)
    """Requests by route and status."""

    def __post_init__(self) -> None:
        self.admission = Admission(self.limits.lanes + self.limits.waiting)

    def model(self, name: str | None, memory: str | None = None) -> Served:
        """The model of this name; by default the one that made the memory, or the first."""
        if name is not None:
            if name not in self.models:
                known = ", ".join(self.models)
                raise RequestError(
                    404, f"there is no model '{name}'{did_you_mean(name, self.models)}: models are {known}"
                )
            return self.models[name]
        if memory is None:
            return next(iter(self.models.values()))
        return self.model_of(self.store.get(memory.split("@")[0]))

    def model_of(self, memory: Memory) -> Served:
        for model in self.models.values():
            if model.engine.fingerprint() == memory.model_hash:
                return model
        raise RequestError(
            409,
            f"memory '{memory.name}' belongs to model '{memory.model_name}', which is not served here: a memory can be "
            "used only with the weights that made it",
        )

    async def state_of(self, model: Served, memory: str | None) -> SessionState:
        """The state of a memory; without one, the beginning of a document."""
        if memory is None:
            return model.beginning
        return await asyncio.to_thread(self.store.load, memory, model)

    async def hold(self, work: Callable[[], T], trail: Callable[[T], Trail]) -> T:
        """The result of `work`, in another thread, with a reserved trail; released if the request ends meanwhile."""
        running = asyncio.ensure_future(asyncio.to_thread(work))

        def too_late(done: asyncio.Future[T]) -> None:
            if not (done.cancelled() or done.exception()):
                self.release(trail(done.result()))

        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            running.add_done_callback(too_late)
            raise

    def release(self, trail: Trail) -> None:
        """In another thread, since the store may be busy; not awaited, since the request may have been cancelled."""
        if trail.places:
            asyncio.get_running_loop().run_in_executor(None, self.store.release, trail)

    async def read_prompt(self, model: Served, state: SessionState, tokens: Tokens) -> tuple[SessionState, int]:
        """The state after these tokens, and how many of them were reused from a stored memory."""
        reused, found = 0, None
        if state.position == 0 and len(tokens) > model.call_tokens:
            found = await asyncio.to_thread(self.store.find_prefix, model, [tokens])
        if found:
            with suppress(BlockRecurrentError, OSError):  # deleted in the meantime: read again
                state = await asyncio.to_thread(self.store.load_place, found[0].places[-1], model)
                reused = found[0].places[-1].position
        reading = Reading(model, state)
        await reading.add(tokens[reused:])
        self.counts["read"] += len(tokens) - reused
        self.counts["reused"] += reused
        return await reading.finish(), reused


async def while_wanted(request: Request, seconds: float, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, unless the client disconnects or the time limit is reached."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({task, gone}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        if gone.done():
            raise RequestError(CLIENT_GONE, "the client disconnected")
        raise RequestError(TOO_LONG, f"the request took longer than the limit of {seconds} seconds")
    finally:
        await _cancelled(task, gone)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _cancelled(*tasks: Awaitable[Any]) -> None:
    for task in tasks:
        if isinstance(task, asyncio.Future):
            task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def event_stream(
    first: dict[str, Any], events: AsyncGenerator[dict[str, Any]], seconds: float, described: Any
) -> StreamingResponse:
    """Server-sent events, with an error as the last one if something fails. Ends when the client disconnects."""

    async def lines() -> AsyncIterator[str]:
        try:
            yield _line(first)
            async with asyncio.timeout(seconds):
                async for event in events:
                    yield _line(event)
                yield "data: [DONE]\n\n"
        except TimeoutError:
            yield _line(error_body(TOO_LONG, f"the request took longer than the limit of {seconds} seconds"))
        except (BlockRecurrentError, OSError) as error:
            yield _line(described(error))
        finally:
            await events.aclose()

    return StreamingResponse(lines(), media_type="text/event-stream", headers={"cache-control": "no-store"})


def _line(event: dict[str, Any]) -> str:
    return f"data: {json.dumps(event, ensure_ascii=False)}\n\n"
