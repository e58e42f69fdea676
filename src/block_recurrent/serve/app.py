"""The ASGI application."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from starlette.exceptions import HTTPException

from block_recurrent import __version__
from block_recurrent.checkpoint import load_run
from block_recurrent.data import Tokenizer
from block_recurrent.errors import BlockRecurrentError, ConfigError
from block_recurrent.inference import Engine
from block_recurrent.serve import completions, memories, scoring
from block_recurrent.serve.guard import LOOPBACK, Guard, error_body
from block_recurrent.serve.limits import Limits, RequestError
from block_recurrent.serve.reading import Served
from block_recurrent.serve.scheduler import Scheduler
from block_recurrent.serve.server import Server
from block_recurrent.serve.store import Store

Model = tuple[str, str, Engine, Tokenizer]
"""Id, name in memory files, engine, tokenizer."""
TYPES = {".html": "text/html; charset=utf-8", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
ROOM_FOR_HEADERS = 1 << 20
NO_ROOM = 507
SPOOLED = re.compile(r"'\.[0-9a-f]{32}\.part'")


def load_model(
    run: str, checkpoint: str, device: str, weights: str, dtype: str = "auto"
) -> tuple[Model, tuple[str, ...]]:
    """Load the model of a run, named after its folder, without its path; and the notes of the run."""
    from block_recurrent.runtime import pick_device, pick_dtype

    place = pick_device(device)
    computed_in = pick_dtype(dtype, place)
    loaded = load_run(run, checkpoint, place)
    id = Path(run).resolve().name
    name = f"{id}, step {loaded.checkpoint.step}{'' if weights == 'float32' else f', {weights}'}"
    return (id, name, Engine(loaded.model, weights, computed_in), loaded.tokenizer), loaded.notes


def make_app(
    models: Sequence[Model], folder: Path, limits: Limits, key: str | None = None, host: str = LOOPBACK[0]
) -> FastAPI:
    """The application that serves these models, with memories in a folder; run it while its store is opened."""
    ids = [model[0] for model in models]
    if len(set(ids)) < len(ids):
        raise ConfigError(f"two models have the same name ({', '.join(ids)}): rename a folder")
    server = Server(limits, Store(folder, limits))

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        for id, name, engine, tokenizer in models:
            scheduler = Scheduler(engine, limits.lanes)
            scheduler.start()
            server.models[id] = Served(id, name, engine, tokenizer, scheduler, int(time.time()))
        yield
        for model in server.models.values():
            model.scheduler.stop()
            await asyncio.to_thread(model.scheduler.join)

    app = FastAPI(
        title="block-recurrent",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        description="Language models that read a text once and keep a memory of fixed size.",
    )
    app.state.server, app.state.described = server, _described(folder)
    file_bytes = max(engine.empty().nbytes for _, _, engine, _ in models) + ROOM_FOR_HEADERS
    for router in (completions.router, memories.router, scoring.router):
        app.include_router(router)
    _add_errors(app)
    _add_pages(app)
    hosts = LOOPBACK if host in LOOPBACK else ()
    app.add_middleware(
        Guard, key=key, hosts=hosts, body_bytes=_body_bytes(limits, file_bytes), answered=server.answered
    )
    return app


def _body_bytes(limits: Limits, file_bytes: int) -> Callable[[str], int]:
    def most(path: str) -> int:
        if path.startswith("/v1/memories/") and path.endswith("/read"):
            return limits.text_bytes
        if path.startswith("/v1/memories/") and path.endswith("/file"):
            return file_bytes
        return limits.prompt_bytes

    return most


def _described(folder: Path) -> Callable[[BlockRecurrentError | OSError], dict[str, Any]]:
    """The message of an error for clients, without paths of files."""

    def described(error: BlockRecurrentError | OSError) -> dict[str, Any]:
        if isinstance(error, OSError):
            return error_body(NO_ROOM, f"the server can't use its files: {error.strerror or type(error).__name__}")
        status = error.status if isinstance(error, RequestError) else 400
        return error_body(status, SPOOLED.sub("the text", str(error).replace(f"{folder}/", "")))

    return described


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(OSError)
    @app.exception_handler(BlockRecurrentError)
    async def ours(request: Request, error: BlockRecurrentError | OSError) -> JSONResponse:
        body = app.state.described(error)
        headers = {"retry-after": "1"} if body["error"]["code"] == 429 else None
        return JSONResponse(body, body["error"]["code"], headers)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"][1:] if not str(part).startswith("list["))
        sentence = f"{where}: {first['msg']}"
        if not where or first["type"] == "json_invalid":
            sentence = f"the body is not a JSON object with 'Content-Type: application/json': {first['msg']}"
        return JSONResponse(error_body(400, sentence), 400)

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> JSONResponse:
        sentence = f"{request.method} {request.url.path}: {error.detail}; see /docs"
        return JSONResponse(error_body(error.status_code, sentence), error.status_code, error.headers)


def _add_pages(app: FastAPI) -> None:
    server: Server = app.state.server

    @app.get("/health")
    async def health() -> dict[str, Any]:
        """Health and load of the server."""
        schedulers = [model.scheduler for model in server.models.values()]
        alive = all(scheduler.is_alive() for scheduler in schedulers)
        busy = {"writing": sum(len(s.lanes) for s in schedulers), "under_way": server.admission.count}
        return {"status": "ok" if alive else "a scheduler has stopped", "version": __version__, **busy}

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> str:
        """Metrics for Prometheus."""
        return _metrics(server)

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return _page_file("index.html")

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        return _page_file("api.html")

    @app.get("/page/{name}", include_in_schema=False)
    async def page_file(name: str) -> Response:
        return _page_file(name)


def _page_file(name: str) -> Response:
    known = {file.name: file for file in (files("block_recurrent.serve") / "page").iterdir()}
    if name not in known:
        raise RequestError(404, f"the page has no file {name!r}")
    return Response(
        known[name].read_bytes(), media_type=TYPES[Path(name).suffix], headers={"cache-control": "no-cache"}
    )


def _metrics(server: Server) -> str:
    lines = []

    def add(name: str, kind: str, what: str, values: Mapping[str, float]) -> None:
        lines.extend([f"# HELP brt_{name} {what}", f"# TYPE brt_{name} {kind}"])
        lines.extend(f"brt_{name}{labels} {value}" for labels, value in values.items())

    answered = {f'{{route="{route}",status="{status}"}}': count for (route, status), count in server.answered.items()}
    add("requests_total", "counter", "Requests answered.", answered)
    kinds = {f'{{what="{what}"}}': server.counts[what] for what in ("read", "written", "scored", "reused")}
    add("tokens_total", "counter", "Tokens by operation.", kinds)
    for what in ("decode", "other"):
        seconds = {f'{{model="{m.id}",call="{what}"}}': m.scheduler.seconds[what] for m in server.models.values()}
        add(f"{what}_seconds_total", "counter", "Seconds in the engine.", seconds)
    add(
        "writing",
        "gauge",
        "Texts being generated.",
        {f'{{model="{m.id}"}}': len(m.scheduler.lanes) for m in server.models.values()},
    )
    add("under_way", "gauge", "Generations, reads and scores in progress.", {"": server.admission.count})
    add("memories", "gauge", "Memories kept.", {"": len(server.store.list())})
    return "\n".join(lines) + "\n"
