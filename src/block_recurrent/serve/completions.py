"""/v1/models and /v1/completions, compatible with OpenAI's clients; can continue from a memory, and save one."""

from __future__ import annotations

import asyncio
import secrets
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from operator import itemgetter
from typing import Annotated, Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field, model_validator

from block_recurrent.data import Tokenizer
from block_recurrent.inference.sampling import Sampling
from block_recurrent.inference.trail import Trail
from block_recurrent.inference.writer import LENGTH, Writer
from block_recurrent.serve.limits import RequestError
from block_recurrent.serve.reading import Served, prompt_tokens
from block_recurrent.serve.scheduler import Step
from block_recurrent.serve.server import Server, event_stream, while_wanted

router = APIRouter()
MOST_ALTERNATIVES = 20
Unused = Annotated[Any, Field(description="Accepted for compatibility; only the neutral value is supported.")]


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")
    include_usage: bool = False


class CompletionRequest(BaseModel):
    """The fields of OpenAI's request, and extensions."""

    model_config = ConfigDict(extra="forbid")

    model: str | None = Field(None, description="One of /v1/models; by default the memory's, or the first.")
    prompt: str | list[str] | list[int] | list[list[int]] = Field(
        "", description="A text or a list of tokens, or several of either."
    )
    max_tokens: int = Field(16, ge=1, description="Maximum number of tokens to generate.")
    temperature: float = Field(1.0, ge=0, description="0 is greedy.")
    top_p: float = Field(
        1.0, gt=0, le=1, description="Sample from the most likely tokens whose probabilities add up to this."
    )
    n: int = Field(1, ge=1, le=128, description="Completions per prompt; the i-th uses seed + i.")
    stream: bool = Field(False, description="Send every token as it is generated, as server-sent events.")
    stream_options: StreamOptions | None = None
    logprobs: int | None = Field(
        None, ge=0, le=MOST_ALTERNATIVES, description="Log-probabilities of the tokens, and of this many alternatives."
    )
    stop: str | list[str] | None = Field(None, description="Strings that end the text; they are not part of it.")
    seed: int | None = Field(None, ge=0, lt=2**53, description="Random seed; chosen at random by default.")
    user: str | None = None
    echo: Unused = False
    best_of: Unused = None
    suffix: Unused = None
    logit_bias: Unused = None
    presence_penalty: Unused = 0
    frequency_penalty: Unused = 0
    top_k: int = Field(0, ge=0, description="Sample from the k most likely tokens; 0: from all.")
    min_p: float = Field(
        0.0, ge=0, le=1, description="Drop tokens less likely than this fraction of the most likely one."
    )
    repetition_penalty: float = Field(1.0, gt=0, description="Above 1: make recent tokens less likely.")
    end_at_mark: bool = Field(True, description="Whether to stop at the end-of-document token.")
    memory: str | None = Field(None, description="The memory to continue from: NAME, or NAME@POSITION of its trail.")
    save_as: str | None = Field(None, description="Save the memory after the text under this name.")

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, body: Any) -> Any:
        """Null is the default, as for OpenAI."""
        if not isinstance(body, dict):
            return body
        return {name: value for name, value in body.items() if value is not None or name == "prompt"}

    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str) or (self.prompt and isinstance(self.prompt[0], int)):
            return [self.prompt]
        return list(self.prompt) or [""]  # type: ignore[arg-type]

    def sampling(self) -> Sampling:
        for name, neutral in (("echo", False), ("presence_penalty", 0), ("frequency_penalty", 0)):
            if getattr(self, name) not in (None, neutral):
                hint = ": /v1/score scores a given text" if name == "echo" else ": use repetition_penalty"
                raise RequestError(400, f"{name} is {getattr(self, name)!r}, which is not supported{hint}")
        if self.best_of not in (None, self.n):
            raise RequestError(400, f"best_of is {self.best_of!r}, which is not supported: omit it")
        for name in ("suffix", "logit_bias"):
            if getattr(self, name):
                raise RequestError(400, f"{name} is not supported: omit it")
        return Sampling(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            stop=() if self.stop is None else self.stop,  # type: ignore[arg-type]  # Sampling makes a tuple of it
            end_at_mark=self.end_at_mark,
        )


@dataclass
class Job:
    """A request in progress."""

    body: CompletionRequest
    model: Served
    sampling: Sampling
    seed: int
    id: str = field(default_factory=lambda: f"cmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))
    prompt_tokens: int = 0
    reused: int = 0
    written: int = 0
    memory_tokens: int = 0
    saved: dict[str, Any] | None = None
    offsets: dict[int, int] = field(default_factory=dict)

    def answer(self, choices: list[dict[str, Any]], usage: bool) -> dict[str, Any]:
        answer = {"id": self.id, "object": "text_completion", "created": self.created, "model": self.model.id}
        answer |= {"choices": choices, "seed": self.seed, "usage": self.usage() if usage else None}
        return answer | ({"saved": self.saved} if self.saved else {})

    def usage(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.written,
            "total_tokens": self.prompt_tokens + self.written,
            "prompt_tokens_details": {"cached_tokens": self.reused},
            "memory_tokens": self.memory_tokens,
        }

    def choice(self, step: Step) -> dict[str, Any]:
        """A step as a choice of a streamed response."""
        mark = step.written.token == self.model.tokenizer.eos_token_id
        ids = [] if mark else [step.written.token]
        self.written += len(ids)
        logprobs = None
        if self.body.logprobs is not None:
            logprobs = _logprobs(self.model.tokenizer, step, self.offsets.get(step.choice, 0), bool(ids))
            self.offsets[step.choice] = self.offsets.get(step.choice, 0) + len(step.written.text)
        reason = None if step.ended is None else "length" if step.ended == LENGTH else "stop"
        return {
            "index": step.choice,
            "text": step.written.text,
            "token_ids": ids,
            "logprobs": logprobs,
            "finish_reason": reason,
        }


@router.get("/v1/models")
async def models(request: Request) -> dict[str, Any]:
    """List the models."""
    server: Server = request.app.state.server
    return {"object": "list", "data": [_model(model) for model in server.models.values()]}


@router.get("/v1/models/{model}")
async def model(request: Request, model: str) -> dict[str, Any]:
    """A model: the hash of its weights, the size of its memories, its window and recurrent layers."""
    return _model(request.app.state.server.model(model))


@router.post("/v1/completions", response_model=None)
async def complete(request: Request, body: CompletionRequest) -> Response | dict[str, Any]:
    """Generate from a prompt, a memory, or both."""
    server: Server = request.app.state.server
    job = _checked(server, body)
    if body.stream:
        events = _events(server, job)

        async def first() -> dict[str, Any]:
            return await anext(events)

        begun = await while_wanted(request, server.limits.seconds, first())  # errors until then have a status code
        return event_stream(begun, events, server.limits.seconds, request.app.state.described)
    return await while_wanted(request, server.limits.seconds, _whole(server, job))


def _checked(server: Server, body: CompletionRequest) -> Job:
    if body.max_tokens > server.limits.max_tokens:
        most = server.limits.max_tokens
        raise RequestError(400, f"max_tokens is {body.max_tokens}: at most {most} are allowed per request")
    if body.save_as is not None:
        if body.n * len(body.prompts()) > 1:
            raise RequestError(400, "save_as needs a single completion: omit n, and give one prompt")
        server.store.check_new(body.save_as)
    model = server.model(body.model, body.memory)
    seed = secrets.randbits(31) if body.seed is None else body.seed
    return Job(body, model, body.sampling(), seed)


async def _whole(server: Server, job: Job) -> dict[str, Any]:
    """All completions, each as one choice."""
    choices: dict[int, dict[str, Any]] = {}
    async with aclosing(_written(server, job)) as parts:
        async for part in parts:
            whole = choices.setdefault(part["index"], part)
            if whole is not part:
                whole["text"] += part["text"]
                whole["token_ids"] += part["token_ids"]
                whole["finish_reason"] = part["finish_reason"]
                for name, values in (part["logprobs"] or {}).items():
                    whole["logprobs"][name] += values
    return job.answer([choices[index] for index in sorted(choices)], usage=True)


async def _events(server: Server, job: Job) -> AsyncGenerator[dict[str, Any]]:
    """The completions, token by token; one without text, such as a part of a character, comes with the next."""
    held: dict[int, list[int]] = {}
    async with aclosing(_written(server, job)) as parts:
        async for part in parts:
            part["token_ids"] = held.pop(part["index"], []) + part["token_ids"]
            if part["text"] or part["logprobs"] or part["finish_reason"]:
                yield job.answer([part], usage=False)
            else:
                held[part["index"]] = part["token_ids"]
    if job.saved or (job.body.stream_options and job.body.stream_options.include_usage):
        yield job.answer([], usage=True)


async def _written(server: Server, job: Job) -> AsyncGenerator[dict[str, Any]]:
    body, model = job.body, job.model
    with server.admission.take(body.n * len(body.prompts())):
        trail, notes, writers = Trail(), dict[str, Any](), list[Writer]()
        start = await server.state_of(model, body.memory)
        job.memory_tokens = start.position if body.memory else 0
        if body.save_as is not None and body.memory is not None:
            work = partial(server.store.trail_to, body.memory, body.save_as)
            trail, notes = await server.hold(work, itemgetter(0))
        try:
            for prompt in body.prompts():
                piece = prompt_tokens(model, start, prompt)
                state, reused = await server.read_prompt(model, replace(start, held=b""), piece.tokens)
                state = replace(state, held=b"", text=start.text.update(piece.raw))
                job.prompt_tokens += len(piece.tokens)
                job.reused += reused
                for _ in range(body.n):
                    sampling = replace(job.sampling, seed=job.seed + len(writers) % body.n)
                    writers.append(Writer(model.tokenizer, state, sampling, body.max_tokens))
            async with aclosing(model.scheduler.write(writers, body.logprobs or 0)) as steps:
                async for step in steps:
                    server.counts["written"] += 1
                    yield job.choice(step)
            if body.save_as is not None:
                save = server.store.save
                memory = await asyncio.to_thread(save, body.save_as, model, writers[0].state, trail, notes)
                job.saved = {"name": memory.name, "tokens": memory.tokens}
        finally:
            server.release(trail)


def _model(model: Served) -> dict[str, Any]:
    config = model.engine.config
    return {
        "id": model.id,
        "object": "model",
        "created": model.created,
        "owned_by": "block-recurrent",
        "name": model.name,
        "hash": model.engine.fingerprint(),
        "window": config.window,
        "recurrent_layers": list(config.recurrent_layers),
        "memory_bytes": model.beginning.memory.nbytes,
    }


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """A token as text; like OpenAI if it is an incomplete character."""
    if token == tokenizer.eos_token_id:
        return "<|endoftext|>"
    raw = tokenizer.decode_bytes([token], begin=False)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _logprobs(tokenizer: Tokenizer, step: Step, offset: int, counts: bool) -> dict[str, list[Any]]:
    if not counts:  # the end-of-document token is not part of the text
        return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    top = {token_text(tokenizer, token): log_prob for token, log_prob in step.top}
    return {
        "tokens": [token_text(tokenizer, step.written.token)],
        "token_logprobs": [step.written.log_prob],
        "top_logprobs": [top],
        "text_offset": [offset],
    }
