"""`brt bench serve`: the server under load: many streams, far memories, a peer, and thousands of mixed requests."""

from __future__ import annotations

import argparse
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from block_recurrent.bench.contenders import DEPTH, WIDTH, Setting, import_extra, our_config
from block_recurrent.bench.serve_client import Client, together
from block_recurrent.errors import ConfigError

SUMMARY = "the server under load: parallel streams, time to first token, a peer, mixed requests"
EXAMPLE = "brt bench serve --parts streams,mixed"
CONTEXT = 8192
NEAR = 1000
READING_SECONDS = 4 * 3600
NOTE = (
    f"Over HTTP on one machine; streams, first and peer: width {WIDTH}, {DEPTH} layers, window 512, random weights of "
    "the given precision. streams: tokens per second of all streams together, the best round, until the last event of "
    "each has arrived; each has a prompt of 8 or 9 bytes, from the beginning of a document or after a memory of "
    "2,048 tokens, which fills every cache; ratio over one stream. first: milliseconds to the first token of a request "
    "from a saved memory, for which the server has read that many bytes, the median; ratio over the near one. peer: "
    "transformers' generate behind FastAPI, one request at a time, GPT-2 of the same width and depth. Many clients "
    f"request continuations of the same text of nearly {CONTEXT} tokens; ours "
    "continues from the memory of the text, the peer from its cache of the text, which it keeps between requests. "
    "Generated tokens per second; ratio: ours over the peer. mixed: size micro, requests of all kinds at once; every "
    "text is compared with the response to the same request alone."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--parts", default=",".join(PARTS), metavar="A,B", help=f"some of {', '.join(PARTS)} (default: all)"
    )
    parser.add_argument(
        "--weights", default="float32", metavar="A,B", help="some of float32, bfloat16 and int8 (default: float32)"
    )
    parser.add_argument("--streams", type=int, default=16, help="number of parallel streams (default: 16)")
    parser.add_argument("--tokens", type=int, default=64, help="tokens per stream (default: 64)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each measurement (default: 3)")
    parser.add_argument(
        "--far", type=int, default=1_000_000, help="tokens of the far memory, read in full (default: 1000000)"
    )
    parser.add_argument("--requests", type=int, default=10_000, help="number of mixed requests (default: 10000)")
    parser.add_argument("--clients", type=int, default=32, help="number of clients that send them (default: 32)")


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    parts = args.parts.split(",")
    for part in parts:
        if part not in PARTS:
            raise ConfigError(f"unknown part '{part}': choose from {', '.join(PARTS)}")
    for module in ("fastapi", "uvicorn"):
        import_extra(module, "serve")
    return [row for part in parts for row in PARTS[part](args)]


def row(part: str, what: str, clients: int, value: float, ratio: float | None, note: str) -> dict[str, Any]:
    shown = None if ratio is None else round(ratio, 3)
    return {"part": part, "what": what, "clients": clients, "value": round(value, 2), "ratio": shown, "note": note}


# ---- A server, and clients -------------------------------------------------------------------------------------------


@contextmanager
def started(run_folder: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], Client]]:
    """`brt serve` as a separate process, on a free port of this machine."""
    memories = tempfile.TemporaryDirectory()
    command = [sys.executable, "-m", "block_recurrent", "serve", str(run_folder), "--memories", memories.name]
    process = subprocess.Popen([*command, "--port", "0", *options], stdout=subprocess.PIPE, text=True)
    try:
        yield process, Client(_port(process))
    finally:
        process.terminate()
        process.wait()
        memories.cleanup()


def _port(process: subprocess.Popen[str]) -> int:
    assert process.stdout is not None
    match = re.search(r"http://\S+:(\d+)", process.stdout.readline())
    if not match:
        raise ConfigError("the server did not start: see above")
    return int(match[1])


@contextmanager
def saved(config: Any) -> Iterator[Path]:
    """A run with random weights, for a server to load."""
    import torch

    from block_recurrent.checkpoint import CONFIG, WEIGHTS, aside_of, finish, step_folder, write_tensors
    from block_recurrent.model.language_model import BlockRecurrentLM
    from block_recurrent.run_config import DataConfig, RunConfig

    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        run_folder = Path(folder) / "model"
        aside = aside_of(step_folder(run_folder, 1))
        aside.mkdir(parents=True)
        run_config = RunConfig("rec-fixed-skip", "micro", config, DataConfig(path="none"))
        (run_folder / CONFIG).write_text(run_config.to_toml(), encoding="utf-8")
        write_tensors(aside / WEIGHTS, BlockRecurrentLM(config).state_dict())
        finish(step_folder(run_folder, 1), 1, None)
        yield run_folder


def _wide() -> Any:
    return replace(our_config(Setting(window=512)), vocab_size=257)


# ---- The parts -------------------------------------------------------------------------------------------------------


def _streams(args: argparse.Namespace) -> list[dict[str, Any]]:
    rows, note = [], "tokens per second, all streams together"
    config = _wide()
    text = ("The whale, the sea, and the ship that sailed. " * (config.window // 10))[: 4 * config.window].encode()
    with saved(config) as folder:
        for weights in args.weights.split(","):
            with started(folder, "--weights", weights, "--lanes", str(args.streams)) as (_, client):
                client.ask("POST", "/v1/memories/text/read", text)
                for what, start in (("a prompt", {}), ("a memory", {"memory": "text"})):
                    bodies = [
                        {"prompt": f"stream {n}", "max_tokens": args.tokens, "seed": n, "end_at_mark": False} | start
                        for n in range(args.streams)
                    ]
                    client.streams(bodies[:1], args.tokens)
                    rates: dict[int, float] = {1: 0, args.streams: 0}
                    for _ in range(args.rounds):
                        for n in rates:
                            rates[n] = max(rates[n], n * args.tokens / client.streams(bodies[:n], args.tokens))
                    name = f"{weights}, from {what}"
                    rows += [row("streams", name, n, rate, rate / rates[1], note) for n, rate in rates.items()]
    return rows


def _first(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The far text is read in full: its time is linear in its length."""
    places, words = {"near": NEAR, "far": args.far}, b"The whale, the sea, and the ship that sailed. "
    with saved(_wide()) as folder, started(folder, "--seconds", str(READING_SECONDS)) as (_, client):
        for name, count in places.items():
            text = (words * (1 + count // len(words)))[:count]
            status, memory = client.ask("POST", f"/v1/memories/{name}/read", text, READING_SECONDS)
            if status != 200 or memory["tokens"] != count:
                raise ConfigError(f"the {name} memory was not made: {memory}")
        seconds: dict[str, list[float]] = {name: [] for name in places}
        for _ in range(10 * args.rounds):
            for name in places:
                seconds[name].append(client.first_events(1, memory=name, max_tokens=8, end_at_mark=False))
    near = statistics.median(seconds["near"])
    return [
        row("first", f"{tokens:,} tokens", 1, 1000 * s, s / near, "milliseconds to the first token")
        for tokens, s in zip(places.values(), map(statistics.median, seconds.values()), strict=True)
    ]


def _peer(args: argparse.Namespace) -> list[dict[str, Any]]:
    import_extra("transformers", "hf")
    length, written = CONTEXT - args.tokens - 1, args.tokens
    text = ("The whale, the sea, and the ship that sailed. " * 200)[:length]
    tokens = list(text.encode())

    def rate(write: Callable[[int], object]) -> float:
        write(0)  # reads the text, where it has not been read
        return max(args.streams * written / together(args.streams, write) for _ in range(args.rounds))

    with saved(_wide()) as folder, started(folder, "--lanes", str(args.streams)) as (_, client):
        client.ask("POST", "/v1/memories/text/read", text.encode())
        ours = rate(lambda seed: client.complete(memory="text", max_tokens=written, seed=seed, end_at_mark=False))
    process = subprocess.Popen(
        [sys.executable, "-m", "block_recurrent.bench.serve_peer", str(CONTEXT)], stdout=subprocess.PIPE, text=True
    )
    try:
        peer = Client(_port(process))
        theirs = rate(lambda _: peer.ask("POST", "/generate", {"tokens": tokens, "max_new_tokens": written}))
    finally:
        process.terminate()
        process.wait()
    rates = {"brt serve, float32": ours, "transformers generate": theirs}
    return [row("peer", what, args.streams, x, ours / x, f"after {length:,} tokens") for what, x in rates.items()]


def _mixed(args: argparse.Namespace) -> list[dict[str, Any]]:
    from block_recurrent.bench.serve_mixed import mixed
    from block_recurrent.presets import preset

    options = ["--trail-every", "512", "--waiting", "200", "--memories-at-most", "1000"]
    with saved(preset("rec-fixed-skip", "micro", 257)) as folder, started(folder, *options) as (process, client):
        found = mixed(client, process.pid, args.requests, args.clients)
    note = (
        f"{found.compared} texts compared, {found.different} differ; {found.refused} bad ones rejected, "
        f"{found.cancelled} cancelled, {found.wrong} wrong answers; resident {found.before:.0f} MiB after a tenth, "
        f"{found.after:.0f} MiB at the end"
    )
    return [row("mixed", "requests per second", args.clients, args.requests / found.seconds, None, note)]


PARTS: dict[str, Callable[[argparse.Namespace], list[dict[str, Any]]]] = {
    "streams": _streams,
    "first": _first,
    "peer": _peer,
    "mixed": _mixed,
}
