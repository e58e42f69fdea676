"""Byte flips, forged files, threads and kills, counted: `python -m tests.security.measure --out results/hardening`.

Every flip changes one byte of a real file, loads it as a command would, and puts it back. 'accepted' are those that
loaded without a word; 'tracebacks' those that raised anything but a one-line error of ours.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from block_recurrent.checkpoint import list_checkpoints, load_run
from block_recurrent.data import Corpus, load_tokenizer
from block_recurrent.data.sources.document import SPLITS
from block_recurrent.errors import BlockRecurrentError
from block_recurrent.inference.session_file import load_session, read_memory_file
from block_recurrent.run_config import read_toml
from block_recurrent.train.state import check_resumable
from tests.security.made import Flips, flip, make_data, make_run, train_arguments

RUN = "rec-fixed-skip"


def _load_data(folder: Path) -> None:
    corpus = Corpus(folder / "data")
    for split in SPLITS:
        for index in range(len(corpus.documents(split))):
            corpus.tokens(split, index)
    corpus.tokenizer  # noqa: B018


def _load_checkpoint(folder: Path) -> None:
    check_resumable(list_checkpoints(folder / RUN)[-1])


def _load_export(folder: Path) -> None:
    from block_recurrent.hub.manifest import check_export

    check_export(folder / "hf")


class Kind(NamedTuple):
    """A kind of file: where it is, and what reads it."""

    path: Callable[[Path], Path]
    load: Callable[[Path], object]
    leave_out: tuple[str, ...] = ()


# Logs are no input of anything: a run is read from its configuration, tokenizer and checkpoints.
LOGS = ("metrics.jsonl", "log.txt", ".lock")
KINDS = {
    "memory file": Kind(lambda f: f / f"{RUN}.memory", lambda f: read_memory_file(f / f"{RUN}.memory")),
    "memory file, kNN": Kind(lambda f: f / "memorizing.memory", lambda f: read_memory_file(f / "memorizing.memory")),
    "checkpoint": Kind(lambda f: list_checkpoints(f / RUN)[-1], _load_checkpoint),
    "manifest of a checkpoint": Kind(lambda f: list_checkpoints(f / RUN)[-1] / "manifest.json", _load_checkpoint),
    "config.toml": Kind(lambda f: f / RUN / "config.toml", lambda f: load_run(f / RUN)),
    "prepared data": Kind(lambda f: f / "data", _load_data),
}
TARGETS: dict[str, Callable[[Path], object]] = {
    "x.memory": read_memory_file,
    "x.toml": lambda path: RunConfigOf(path),
    "x.model": load_tokenizer,
    "manifest.json": lambda path: Corpus(path.parent),
}


def RunConfigOf(path: Path) -> object:  # noqa: N802
    """A run's configuration that says something: any text of comments is one that says nothing."""
    values = read_toml(path, sealed=True)
    if not values:
        raise BlockRecurrentError("it says nothing")
    from block_recurrent.run_config import RunConfig

    return RunConfig.from_dict(values)


def flips(folder: Path, kind: str, count: int, seed: int = 0) -> dict[str, Any]:
    """So many byte flips in the files of a kind."""
    what = KINDS[kind]
    source = Flips(what.path(folder), seed, what.leave_out)
    accepted, tracebacks = [], []
    for _ in range(count):
        file, position, mask = source.one()
        flip(file, position, mask)
        try:
            what.load(folder)
            accepted.append([file.name, position, mask])
        except BlockRecurrentError as error:
            if "\n" in str(error):
                tracebacks.append([file.name, position, mask, "more than one line"])
        except Exception as error:
            tracebacks.append([file.name, position, mask, repr(error)])
        finally:
            flip(file, position, mask)
    what.load(folder)
    return {"what": kind, "flips": count, "accepted": accepted, "tracebacks": tracebacks}


def forged(folder: Path, count: int, seed: int = 0) -> dict[str, Any]:
    """Memory files with random changes and a valid hash: refused, or used without a crash."""
    from tests.security.made import forge

    loaded = {system: load_run(folder / system) for system in (RUN, "memorizing")}
    rng, outcomes = random.Random(seed), {"refused": 0, "used": 0}
    tracebacks: list[Any] = []
    for _ in range(count):
        system = rng.choice(list(loaded))
        path = forge(folder / f"{system}.memory", folder / "forged.memory", lambda h, t: _mutate(h, t, rng))
        try:
            session = load_session(path, loaded[system].model, loaded[system].tokenizer, None)
            session.loss_of("and what follows")
            "".join(session.write(4))
            outcomes["used"] += 1
        except BlockRecurrentError:
            outcomes["refused"] += 1
        except Exception as error:
            tracebacks.append(repr(error))
    return {"what": "forged memory files", "count": count, **outcomes, "tracebacks": tracebacks}


ODD = (0, 1, -1, 7, 2**31, 2**40, 2**63, 2**70, 1.5, True, None, "", "x", [], [0], [[1]], {}, {"1": [3]}, float("nan"))


def _mutate(header: dict[str, Any], tensors: dict[str, Any], rng: random.Random) -> None:
    """One change of a header's value, of a setting, or of a tensor's shape or type."""
    where = rng.choice(["header", "config", "extra", "tensor", "tensor", "drop"])
    if where in ("config", "extra") or where == "header":
        values = header if where == "header" else header[where]
        key = rng.choice([key for key in values if key != "version"])
        values[key] = rng.choice(ODD)
        return
    name = rng.choice(list(tensors))
    x = tensors[name]
    if where == "drop":
        del tensors[name]
        return
    dim = rng.randrange(x.dim())
    changes = [
        lambda: x.narrow(dim, 0, max(1, x.shape[dim] - rng.randrange(1, 4))),
        lambda: x.repeat_interleave(2, dim),
        lambda: x.transpose(0, dim),
        lambda: x.flatten(),
        lambda: x.double(),
        lambda: x.half(),
        lambda: x.int(),
        lambda: x * float("inf"),
        lambda: x[..., :0],
    ]
    tensors[name] = rng.choice(changes)().clone()


def threads(operations: int) -> dict[str, Any]:
    """Operations on forks of one session in threads, against the same ones alone."""
    from tests.security.test_threads import FAMILIES, make_session, operate

    done, wrong = 0, 0
    for system in FAMILIES:
        session = make_session(system)
        alone = [operate(session, seed) for seed in range(8)]
        with ThreadPoolExecutor(8) as pool:
            while done < operations * (FAMILIES.index(system) + 1) // len(FAMILIES):
                for mine, expected in zip(pool.map(operate, [session] * 8, range(8)), alone, strict=True):
                    wrong += mine[0] != expected[0] or abs(mine[1] - expected[1]) > 1e-3 or mine[2:] != expected[2:]
                done += 8 * 4
    return {"what": "operations on forks in threads", "count": done, "wrong": wrong}


def kills(folder: Path, count: int, during_saves: int, seed: int = 0) -> dict[str, Any]:
    """kill -9 at any moment, and while a checkpoint is written; then to the end, and every line of metrics compared."""
    rng, differing, stuck, done = random.Random(seed), 0, 0, 0
    kept = ("step", "split", "bits_per_token", "tokens_seen", "learning_rate", "gradient_norm")

    def lines(run: Path) -> list[list[Any]]:
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        return [[row.get(key) for key in kept] for row in rows]

    for system in ("slide", RUN, "memorizing"):
        arguments = train_arguments(folder, system, 12)
        command = [sys.executable, "-m", "block_recurrent", *arguments]
        shutil.rmtree(folder / system, ignore_errors=True)
        began = time.monotonic()
        subprocess.run(command, check=True, capture_output=True)
        whole, expected = time.monotonic() - began, lines(folder / system)
        shutil.rmtree(folder / system)
        share, saves = count // 3 + (system == RUN) * (count % 3), during_saves // 3
        for number in range(share):
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            if number < saves:
                while process.poll() is None and not list((folder / system / "checkpoints").glob(".*.part")):
                    time.sleep(0.0005)
            else:
                time.sleep(rng.uniform(0.3, 1.0) * whole)
            process.send_signal(signal.SIGKILL)
            process.wait()
            done += 1
            if process.returncode == 0:  # it was faster: the next one begins anew
                differing += lines(folder / system) != expected
                shutil.rmtree(folder / system)
        end = subprocess.run(command, capture_output=True)
        stuck += end.returncode != 0
        differing += lines(folder / system) != expected
    return {"what": "kill -9", "count": done, "during_saves": during_saves, "differing_runs": differing, "stuck": stuck}


def hash_cost(tokens: int) -> dict[str, Any]:
    """Time to check the hashes of token files, as a share of a pass over them: building the lanes of segments alone."""
    from block_recurrent.data import LaneStream

    with tempfile.TemporaryDirectory() as place, contextlib.redirect_stdout(io.StringIO()):
        folder = Path(place)
        make_data(folder)
        rng = random.Random(0)
        for number in range(8):
            (folder / "books" / "train" / f"{number}.txt").write_bytes(bytes(rng.choices(b"abcdefgh ", k=tokens // 8)))
        from block_recurrent.cli.main import main

        main(["data", "prepare", str(folder / "books"), "--out", str(folder / "data"), "--overwrite"])
        seconds = []
        for _ in range(2):
            corpus = Corpus(folder / "data")
            for _ in range(2):  # the first pass checks, the second does not
                began = time.perf_counter()
                for step in LaneStream(corpus, "train", 8, 1024, one_pass=True, prefetch=0):
                    assert step.tokens.size
                seconds.append(time.perf_counter() - began)
    checked, plain = min(seconds[0::2]), min(seconds[1::2])
    rate = tokens / max(checked - plain, 1e-9)
    return {"what": "checking token files", "tokens": tokens, "seconds": checked - plain, "tokens_per_second": rate}


def main_(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="results are written to OUT.json and OUT.md")
    parser.add_argument("--flips", type=int, default=1000)
    parser.add_argument("--forged", type=int, default=500)
    parser.add_argument("--operations", type=int, default=5000)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--saves", type=int, default=15)
    parser.add_argument("--only", choices=("flips", "forged", "threads", "hashes", "kills"), help="one kind of attack")
    args = parser.parse_args(argv)
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            make_data(folder)
            for system in (RUN, "memorizing"):
                make_run(folder, system)
        kinds = dict(KINDS)
        with contextlib.suppress(ImportError, BlockRecurrentError):
            from block_recurrent.hub.export import export_folder

            export_folder(folder / RUN, folder / "hf")
            kinds["export"] = KINDS["export"] = Kind(lambda f: f / "hf", _load_export)
        attacks: dict[str, list[Callable[[], dict[str, Any]]]] = {
            "flips": [partial(flips, folder, kind, args.flips) for kind in kinds],
            "forged": [partial(forged, folder, args.forged)],
            "threads": [partial(threads, args.operations)],
            "hashes": [partial(hash_cost, 4_000_000)],
            "kills": [partial(kills, folder, args.kills, args.saves)],
        }
        for name, works in attacks.items():
            for work in works if args.only in (None, name) else ():
                results.append(work())
                print(json.dumps(_short(results[-1])), flush=True)
    _write(args.out, results)
    return 0


def _short(result: dict[str, Any]) -> dict[str, Any]:
    return {key: len(value) if isinstance(value, list) else value for key, value in result.items()}


def _write(out: Path, results: list[dict[str, Any]]) -> None:
    """Beside what was measured before, with `--only`."""
    before = json.loads(out.with_suffix(".json").read_text())["results"] if out.with_suffix(".json").exists() else []
    measured = {result["what"] for result in results}
    results = [result for result in before if result["what"] not in measured] + results
    command = "python -m tests.security.measure --out results/hardening"
    sanitizers = os.environ.get("BRT_SANITIZED", "")
    out.with_suffix(".json").write_text(json.dumps({"command": command, "results": results}, indent=1) + "\n")
    built = f", kernels built with {sanitizers}" if sanitizers else ""
    lines = [f"`{command}`{built}", "", "| what | figures |", "| --- | --- |"]
    for result in results:
        figures = ", ".join(f"{k.replace('_', ' ')} {_figure(v)}" for k, v in _short(result).items() if k != "what")
        lines.append(f"| {result['what']} | {figures} |")
    out.with_suffix(".md").write_text("\n".join([*lines, "", (__doc__ or "").split("\n\n")[1]]))


def _figure(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"


if __name__ == "__main__":
    sys.exit(main_())
