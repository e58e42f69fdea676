"""A simple baseline: transformers' generate behind FastAPI, with the cache of the last text kept.

Started by `brt bench serve` as a process.
"""

from __future__ import annotations

import asyncio
import sys
import threading

import torch
import uvicorn
from fastapi import Body, FastAPI
from transformers import DynamicCache

from block_recurrent.bench.contenders import gpt2_model


def make_app(context: int) -> FastAPI:
    model = gpt2_model(context).eval()
    app, lock, cache, cached = FastAPI(), threading.Lock(), DynamicCache(), list[int]()

    @app.post("/generate")
    def generate(tokens: list[int] = Body(), max_new_tokens: int = Body()) -> list[int]:  # noqa: B008
        with lock, torch.no_grad():
            same = next((i for i, (a, b) in enumerate(zip(cached, tokens, strict=False)) if a != b), len(cached))
            if (surplus := len(cached) - min(same, len(tokens) - 1)) > 0:
                cache.crop(-surplus)
            written = model.generate(
                torch.tensor([tokens]), max_new_tokens=max_new_tokens, min_new_tokens=max_new_tokens, do_sample=True,
                pad_token_id=0, past_key_values=cache,
            )[0].tolist()  # fmt: skip
            cached[:] = written[:-1]
        return written[len(tokens) :]

    return app


async def _main(context: int) -> None:
    server = uvicorn.Server(uvicorn.Config(make_app(context), port=0, log_level="warning"))
    serving = asyncio.ensure_future(server.serve())
    while not server.started:
        await asyncio.sleep(0.02)
    print(f"serving at http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}", flush=True)
    await serving


if __name__ == "__main__":
    asyncio.run(_main(int(sys.argv[1])))
