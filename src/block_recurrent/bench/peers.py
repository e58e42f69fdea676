"""`brt bench peers`: training compared with other implementations, and with full attention."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from block_recurrent.bench.contenders import CONTENDERS, Setting
from block_recurrent.bench.harness import best_seconds, chosen, peak_bytes_of
from block_recurrent.errors import MissingExtraError

SUMMARY = "training tokens per second, compared with other implementations"
EXAMPLE = "brt bench peers --parts recurrent --repeats 3"
NOTE = (
    "tokens_per_second: forward, backward and Adam on random tokens, best of the repeats, the models of a setting in "
    "turns. ours_over_this: the rate of this package over this one's. peak_bytes: peak memory of such a step, "
    "measured in a separate process. block-recurrent-transformer-pytorch has single-head keys and values: about 15% "
    "fewer FLOPs. full-attention has this package's layers with causal attention over the whole segment by torch's "
    "SDPA and no position bias."
)
OURS = "block-recurrent"
PARTS = {
    # part: (other contenders, settings)
    "recurrent": (["block-recurrent-transformer-pytorch"], [Setting(window=512), Setting(window=128)]),
    "dense": (
        ["full-attention", "gpt2"],
        [Setting(window=512, segment=length) for length in (512, 1024, 2048, 4096, 8192, 16384)],
    ),
    "memorizing": (["memorizing-transformers-pytorch"], [Setting(window=512, segment=512, memorizing=True)]),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--parts", default=",".join(PARTS), metavar="A,B", help=f"some of {', '.join(PARTS)} (default: all)"
    )
    parser.add_argument("--repeats", type=int, default=5, help="number of repeats; the best counts (default: 5)")
    parser.add_argument("--segments", metavar="N,M", help="only these segment lengths")
    parser.add_argument("--no-peak", action="store_true", help="skip the measurement of memory")


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """One row per model and setting."""
    segments = None if args.segments is None else {int(length) for length in args.segments.split(",")}
    rows: list[dict[str, Any]] = []
    for part in chosen(args.parts, PARTS, "part"):
        names, settings = PARTS[part]
        for setting in settings:
            if segments is None or setting.segment in segments:
                rows += _rows(part, [OURS, *names], setting, args.repeats, not args.no_peak)
    return rows


def _rows(part: str, names: list[str], setting: Setting, repeats: int, with_peak: bool) -> list[dict[str, Any]]:
    steps: dict[str, Callable[[], object]] = {}
    reasons = {}
    for name in names:
        try:
            step = CONTENDERS[name](setting)
            for _ in range(setting.steps_before):
                step()
            steps[name] = step
        except MissingExtraError:
            raise
        except Exception as error:  # code of another project: any error is a result
            if name == OURS:
                raise
            reasons[name] = f"does not run: {type(error).__name__}: {error}".split("\n")[0]
    best = best_seconds(steps, repeats)
    steps.clear()
    rows = []
    for name in names:
        row: dict[str, Any] = {"part": part, "model": name, "window": setting.window, "segment": setting.segment}
        if name in best:
            row["tokens_per_second"] = round(setting.segment / best[name], 1)
            row["ours_over_this"] = round(best[name] / best[OURS], 3)
            row["peak_bytes"] = peak_bytes_of(_two_steps, name, setting) if with_peak else None
        else:
            row |= {"tokens_per_second": None, "ours_over_this": None, "peak_bytes": reasons[name]}
        rows.append(row)
    return rows


def _two_steps(name: str, setting: Setting) -> None:
    step = CONTENDERS[name](setting)
    step()
    step()
