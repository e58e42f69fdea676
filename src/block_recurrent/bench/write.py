"""`brt bench write`: speed of generation by position and batch, compared with other implementations."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from block_recurrent.bench.contenders import (
    DEPTH,
    VOCABULARY,
    WIDTH,
    Setting,
    gpt2_model,
    import_extra,
    our_config,
    peer_model,
)
from block_recurrent.bench.harness import resident_bytes, seconds_of
from block_recurrent.errors import ConfigError

SUMMARY = "speed of generation by position and batch, compared with others and with the memory bandwidth"
EXAMPLE = "brt bench write --parts position,limit"
ROUNDS = 16
SHORT_TURN = 8
NOTE = (
    f"Width {WIDTH}, {DEPTH} layers, window 512; matrices in float32, bfloat16 or int8 as named, keys and "
    "values in 24 bits, with the last two in 16, the rest in float32. tokens_per_second: all lanes together; the rows "
    f"of a part generate in {ROUNDS} turns of a few tokens, and the median turn counts. position: tokens before the "
    "first generated one. position part: the mean over whole blocks of 512 tokens, which includes every state update; "
    "ratio: over the first row of the same weights. batch part: ratio: over one lane of the same weights. peer and "
    "gpt2 parts: ratio: ours over this one. limit part: bytes of weights, once for all lanes, and of the memory of "
    "each lane that a step needs, over the read bandwidth, measured by reading 2 GB between turns of 8 tokens, which "
    "takes about as long; ratio: the achieved share of it, best turn over best reading. resident_mib: of "
    "the process, afterwards."
)
WINDOW = 512
NEAR, FAR = 1024, 100_352
CONTEXTS = (1024, 2048, 4096, 8192)
LANES = (1, 4, 16)
BANDWIDTH_BYTES = 1 << 29
READINGS = 4


@dataclass
class Writer:
    """A contender: generates a number of tokens per call, and records the seconds per token."""

    name: str
    position: int
    write: Callable[[int], None]
    lanes: int = 1
    seconds: list[float] = field(default_factory=list)

    def turn(self, tokens: int) -> None:
        began = time.perf_counter()
        self.write(tokens)
        self.seconds.append((time.perf_counter() - began) / tokens)

    @property
    def rate(self) -> float:
        """Tokens per second in the median turn."""
        return self.lanes / statistics.median(self.seconds)

    @property
    def best_rate(self) -> float:
        """Tokens per second in the best turn."""
        return self.lanes / min(self.seconds)

    @property
    def mean_rate(self) -> float:
        """Tokens per second over all turns."""
        return self.lanes / statistics.fmean(self.seconds)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--parts", default=",".join(PARTS), metavar="A,B", help=f"some of {', '.join(PARTS)} (default: all)"
    )
    parser.add_argument("--tokens", type=int, default=512, help="tokens per contender (default: 512, a whole block)")
    parser.add_argument(
        "--far", type=int, default=FAR, help=f"the far position, a multiple of {WINDOW} (default: {FAR})"
    )
    parser.add_argument(
        "--weights",
        default=",".join(BYTES),
        metavar="A,B",
        help=f"precisions of the weights: {', '.join(BYTES)} (default: all)",
    )
    parser.add_argument("--threads", type=int, help="threads of torch and of the kernels (default: torch's number)")


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of every requested part."""
    for weights in args.weights.split(","):
        if weights not in BYTES:
            raise ConfigError(f"unknown weights '{weights}': choose from {', '.join(BYTES)}")
    parts = args.parts.split(",")
    for part in parts:  # check before the first one begins
        if part not in PARTS:
            raise ConfigError(f"unknown part '{part}': choose from {', '.join(PARTS)}")
        if part in NEEDED:
            import_extra(NEEDED[part], "peers")
    if args.threads is not None:
        import torch

        torch.set_num_threads(args.threads)
    return [row for part in parts for row in PARTS[part](args)]


def _by_position(args: argparse.Namespace) -> list[dict[str, Any]]:
    pairs = [[_our_writer(engine, position) for position in (NEAR, args.far)] for engine in _engines(args)]
    resident = _resident_mib()
    _in_turns([writer for pair in pairs for writer in pair], args.tokens)
    told = f"grew by {_resident_mib() - resident:.0f} MiB"
    rated = [(writer, writer.mean_rate, pair[0].mean_rate) for pair in pairs for writer in pair]
    return [_row("position", writer, rate, rate / first, told) for writer, rate, first in rated]


def _by_batch(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Every kind of weights with every number of lanes, all in turns."""
    writers = [[_our_writer(engine, NEAR, lanes) for lanes in LANES] for engine in _engines(args)]
    _in_turns([writer for group in writers for writer in group], args.tokens // 2)
    rows = []
    for group in writers:
        first = writers[0][0]
        for writer in group:
            told = f"over one lane; {writer.rate / first.rate:.2f} of one lane in {first.name.split()[-1]}"
            rows.append(_row("batch", writer, writer.rate, writer.rate / group[0].rate, told))
    return rows


def _beside_peer(args: argparse.Namespace) -> list[dict[str, Any]]:
    """512 tokens after a full block. The peer runs its prefix again for every token, so a turn begins where the last
    one ended: `generate` on all tokens so far costs the same as continuing would."""
    import torch

    ours, model = _our_writer(_engines(args)[0], WINDOW), peer_model(Setting(window=WINDOW)).eval()
    text = [torch.randint(VOCABULARY, (1, WINDOW), generator=torch.Generator().manual_seed(0))]

    def write(tokens: int) -> None:
        before = torch.cat(text, dim=1)
        text.append(model.generate(before, before.shape[1] + tokens))

    peer = Writer("block-recurrent-transformer-pytorch", WINDOW, write)
    _in_turns([ours, peer], args.tokens)
    return [_row("peer", writer, writer.rate, ours.rate / writer.rate, "ours over this") for writer in (ours, peer)]


def _beside_gpt2(args: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for position in CONTEXTS:
        writers = [_our_writer(_engines(args)[0], position), _gpt2_writer(position, args.tokens)]
        _in_turns(writers, args.tokens // 2)
        ours = writers[0].rate
        rows += [_row("gpt2", writer, writer.rate, ours / writer.rate, "ours over this") for writer in writers]
    return rows


def _against_limit(args: argparse.Namespace) -> list[dict[str, Any]]:
    """One lane, which is limited by the weights, and the most lanes, which are limited by their memories."""
    bandwidth = _Bandwidth()
    pairs = [(engine, _our_writer(engine, NEAR, lanes)) for engine in _engines(args) for lanes in (1, LANES[-1])]
    for _ in range(0, args.tokens, SHORT_TURN):
        for _, writer in pairs:
            bandwidth.measure()
            writer.turn(SHORT_TURN)
    rows = []
    for engine, writer in pairs:
        needed = bytes_per_step(engine.model, engine.weights, writer.lanes)
        limit = writer.lanes * bandwidth.rate / needed
        told = f"of {limit:.1f} tokens/s: {bandwidth.rate / 1e9:.1f} GB/s, {needed / 1e6:.1f} MB a step"
        rows.append(_row("limit", writer, writer.best_rate, writer.best_rate / limit, told))
    return rows


PARTS: dict[str, Callable[[argparse.Namespace], list[dict[str, Any]]]] = {
    "position": _by_position,
    "batch": _by_batch,
    "limit": _against_limit,
    "peer": _beside_peer,
    "gpt2": _beside_gpt2,
}
BYTES = {"float32": 4, "bfloat16": 2, "int8": 1}
"""Bytes of each weight of a matrix that every token is multiplied with."""
NEEDED = {"peer": "block_recurrent_transformer_pytorch", "gpt2": "transformers"}
"""The packages that a part imports."""


def _engines(args: argparse.Namespace) -> list[Any]:
    """The model with each requested precision of weights."""
    import torch

    from block_recurrent.inference import Engine
    from block_recurrent.model.language_model import BlockRecurrentLM

    torch.manual_seed(0)
    model = BlockRecurrentLM(our_config(Setting(window=WINDOW)))
    return [Engine(model, weights) for weights in args.weights.split(",")]


def _our_writer(engine: Any, position: int, lanes: int = 1) -> Writer:
    import torch

    text = torch.randint(VOCABULARY, (lanes, position), generator=torch.Generator().manual_seed(position))
    logits, memory = engine.prefill(text)
    state: dict[str, Any] = {"memory": memory, "tokens": logits.argmax(-1)}

    def write(tokens: int) -> None:
        for _ in range(tokens):
            logits, state["memory"] = engine.decode(state["tokens"], state["memory"])
            state["tokens"] = logits.argmax(-1)

    return Writer(f"block-recurrent {engine.weights}", position, write, lanes)


def _gpt2_writer(position: int, more: int) -> Writer:
    import torch

    model = gpt2_model(position + more + 1).eval()
    text = torch.randint(VOCABULARY, (1, position), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        state: dict[str, Any] = {"cache": model(text, use_cache=True, logits_to_keep=1).past_key_values, "token": 0}

    @torch.no_grad()
    def write(tokens: int) -> None:
        for _ in range(tokens):
            out = model(torch.tensor([[state["token"]]]), past_key_values=state["cache"], use_cache=True)
            state["cache"], state["token"] = out.past_key_values, int(out.logits[0, -1].argmax())

    return Writer("gpt2 of transformers", position, write)


def _in_turns(writers: list[Writer], tokens: int) -> None:
    """Each generates a few tokens in its turn, so that other load on the machine affects all alike."""
    for index in range(ROUNDS):
        share = tokens * (index + 1) // ROUNDS - tokens * index // ROUNDS
        for writer in writers if share else ():
            writer.turn(share)


def _row(part: str, writer: Writer, rate: float, ratio: float, told: str) -> dict[str, Any]:
    return {
        "part": part,
        "model": writer.name,
        "position": writer.position,
        "lanes": writer.lanes,
        "tokens_per_second": round(rate, 2),
        "ratio": round(ratio, 3),
        "ratio_is": told,
        "resident_mib": round(_resident_mib()),
    }


def bytes_per_step(model: Any, weights: str = "float32", lanes: int = 1) -> float:
    """Bytes that a token of each lane must read: all weights of the token side, once for all lanes, and per lane its
    window's keys and values and those of the states, in 3 or 2 bytes per number and 4 for the scale of an entry.

    The weights of the state side are read once per block, and count by that share; they are always float32.
    """
    config, size = model.config, BYTES[weights]
    total = 0.0
    for name, p in model.named_parameters():
        if ".cell." in name:
            total += 4 * p.numel() / config.window
        elif p.ndim < 2 or ".position_bias." in name:
            total += 4 * p.numel()
        else:
            total += size * p.numel() + (4 * len(p) if weights == "int8" else 0)
    entry, layers = 2 * config.num_heads * config.head_dim, range(1, config.num_layers + 1)
    states = sum(config.num_states for number in layers if config.layer_reads_state(number))
    number = (3 if weights == "float32" else 2) + 4 / config.head_dim
    return total + lanes * entry * number * (config.window * len(layers) + states)


class _Bandwidth:
    """Reading memory: by a sum, and by a product with a vector; the faster one counts."""

    def __init__(self) -> None:
        import torch

        matrix = torch.ones(BANDWIDTH_BYTES // 4 // 4096, 4096)
        vector = torch.ones(4096)
        # As long as a short turn: a single reading could be faster than any sustained work.
        self._ways: list[Callable[[], Any]] = [
            lambda: [matrix.sum() for _ in range(READINGS)],
            lambda: [matrix @ vector for _ in range(READINGS)],
        ]
        self._seconds = float("inf")

    def measure(self) -> None:
        self._seconds = min(self._seconds, *map(seconds_of, self._ways))

    @property
    def rate(self) -> float:
        """Bytes per second in the best round."""
        return READINGS * BANDWIDTH_BYTES / self._seconds


def _resident_mib() -> float:
    return resident_bytes() / 2**20
