"""/v1/score: score a text after a memory, and how much the memory helped with each token."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from fastapi import APIRouter, Request
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from block_recurrent.evaluate.state_edits import initial_states
from block_recurrent.inference.session_state import SessionState
from block_recurrent.model.memory import DocumentMemory
from block_recurrent.serve.completions import token_text
from block_recurrent.serve.limits import RequestError
from block_recurrent.serve.reading import Served, Tokens, prompt_tokens
from block_recurrent.serve.server import Server, while_wanted

router = APIRouter()


class ScoreRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")

    model: str | None = Field(None, description="One of /v1/models; by default the memory's, or the first.")
    memory: str | None = Field(None, description="The memory that the text follows: NAME, or NAME@POSITION.")
    text: str | None = None
    token_ids: list[int] | None = Field(None, description="Tokens, instead of a text.")


@router.post("/v1/score")
async def score(request: Request, body: ScoreRequest) -> dict[str, Any]:
    """Bits of every token after the memory, after the memory with its recurrent state cleared, and after nothing."""
    server: Server = request.app.state.server
    if (body.text is None) == (body.token_ids is None):
        raise RequestError(400, "give either text or token_ids, not both")
    with server.admission.take():
        return await while_wanted(request, server.limits.seconds, _score(server, body))


async def _score(server: Server, body: ScoreRequest) -> dict[str, Any]:
    model = server.model(body.model, body.memory)
    state = await server.state_of(model, body.memory)
    if state.held:  # tokenized as if no more text followed
        held = prompt_tokens(model, state, "")
        state, _ = await server.read_prompt(model, replace(state, held=b""), held.tokens)
    piece = prompt_tokens(model, state, body.text if body.text is not None else body.token_ids or [])
    if len(piece.tokens) == 0:
        raise RequestError(400, "the text is empty: there is nothing to score")
    bits = {"memory": await _bits(model, state, piece.tokens)}
    if body.memory is not None:
        if model.engine.config.recurrent_layers:
            bits["cleared"] = await _bits(model, replace(state, memory=_cleared(model, state)), piece.tokens)
        bits["empty"] = await _bits(model, model.beginning, piece.tokens)
    server.counts["scored"] += len(piece.tokens)
    return {
        "object": "score",
        "model": model.id,
        "memory": body.memory,
        "position": state.position,
        "bytes": len(piece.raw),
        "bits_per_token": {name: float(values.mean()) for name, values in bits.items()},
        "bits_per_byte": {name: float(values.sum()) / len(piece.raw) for name, values in bits.items()},
        "token_ids": piece.tokens.tolist(),
        "tokens": [token_text(model.tokenizer, int(token)) for token in piece.tokens],
        "bits": {name: np.round(values, 4).tolist() for name, values in bits.items()},
    }


async def _bits(model: Served, state: SessionState, tokens: Tokens) -> NDArray[np.float64]:
    """Negative log2 probabilities, in calls that end at the same positions as those of reading."""
    memory, fed, size = state.memory, state.fed(tokens), model.call_tokens
    parts, start, position = [], 0, state.position
    while start < len(tokens):
        end = min(len(tokens), start + size - position % size)
        rows = [fed[start:end]], [tokens[start:end]]
        scored = await model.scheduler.call(partial(model.engine.score, *rows, memory))
        memory, position, start = scored.memory, position + end - start, end
        parts.append(scored.nats[0].astype(np.float64) / math.log(2))
    return np.concatenate(parts)


def _cleared(model: Served, state: SessionState) -> DocumentMemory:
    """The memory with the initial state; the window's keys and values are kept."""
    initial = initial_states(model.engine.snapshot.model)
    layers = [replace(x, state=initial[i][None]) if i in initial else x for i, x in enumerate(state.memory.layers)]
    return replace(state.memory, layers=tuple(layers))
