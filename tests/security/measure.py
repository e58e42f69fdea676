"""Byte flips, forged files, threads and kills, counted: `python -m tests.security.measure --out results/hardening`.

Every flip changes one byte of a real file, loads it as a command would, and puts it back. 'accepted' are those that
loaded without an error or a warning; 'tracebacks' those that raised anything but a one-line error of ours. A forged
file has a random change and hashes that fit: it is refused, or used without harm. 'stuck' are killed runs that did not
resume. 'sources' is the commit that a line was measured at, and the processor.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
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
import warnings
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from block_recurrent.bench.harness import machine, versions
from block_recurrent.checkpoint import list_checkpoints, load_run, load_state, verify
from block_recurrent.cli.main import main
from block_recurrent.data import Corpus, load_tokenizer
from block_recurrent.data.sources.document import SPLITS
from block_recurrent.errors import BlockRecurrentError
from block_recurrent.hub.manifest import check_export
from block_recurrent.inference.session_file import read_memory_file
from block_recurrent.io.tensors import read_tensors
from block_recurrent.model.language_model import BlockRecurrentLM
from block_recurrent.models.card import card_of, read_card
from block_recurrent.presets import preset
from block_recurrent.run_config import RunConfig, read_toml
from block_recurrent.train.state import check_resumable, read_state
from tests.security.forging import FORGERIES
from tests.security.made import RUN, SUBWORDS, SYSTEMS, Flips, flip, make_all, make_data, train_arguments


def _load_data(folder: Path) -> None:
    corpus = Corpus(folder)
    for split in SPLITS:
        for index in range(len(corpus.documents(split))):
            corpus.tokens(split, index)
    corpus.tokenizer  # noqa: B018


def _load_checkpoint(folder: Path) -> None:
    check_resumable(list_checkpoints(folder / RUN)[-1])


def _load_run(folder: Path) -> None:
    load_run(folder / SUBWORDS)
    check_resumable(list_checkpoints(folder / SUBWORDS)[-1])


class Kind(NamedTuple):
    """A kind of file: where it is, and what reads it."""

    path: Callable[[Path], Path]
    load: Callable[[Path], object]


# Logs are no input of anything: a run is read from its configuration, tokenizer and checkpoints.
LOGS = ("metrics.jsonl", "log.txt", "tensorboard", ".lock")
KINDS = {
    "memory file": Kind(lambda f: f / f"{RUN}.memory", lambda f: read_memory_file(f / f"{RUN}.memory")),
    "memory file, kNN": Kind(lambda f: f / "memorizing.memory", lambda f: read_memory_file(f / "memorizing.memory")),
    "checkpoint": Kind(lambda f: list_checkpoints(f / RUN)[-1], _load_checkpoint),
    "manifest of a checkpoint": Kind(lambda f: list_checkpoints(f / RUN)[-1] / "manifest.json", _load_checkpoint),
    "run folder": Kind(lambda f: f / SUBWORDS, _load_run),
    "config.toml of a run": Kind(lambda f: f / SUBWORDS / "config.toml", _load_run),
    "tokenizer.model of a run": Kind(lambda f: f / SUBWORDS / "tokenizer.model", _load_run),
    "prepared data, bytes": Kind(lambda f: f / "data", lambda f: _load_data(f / "data")),
    "prepared data, subwords": Kind(lambda f: f / "pieces", lambda f: _load_data(f / "pieces")),
    "packed model": Kind(lambda f: f / "box", lambda f: (load_run(f / "box"), card_of(str(f / "box")))),
    "tuned state": Kind(lambda f: f / "tuned.state", lambda f: load_state(load_run(f / RUN).model, f / "tuned.state")),
    "export": Kind(lambda f: f / "hf", lambda f: check_export(f / "hf")),
}
LOADERS: list[tuple[str, Callable[[Path], object]]] = [
    ("x.memory", read_memory_file),
    ("x.state", lambda path: load_state(_model(), path)),
    ("x.toml", lambda path: _load_config(path)),
    ("x.model", load_tokenizer),
    ("x.safetensors", read_tensors),
    ("manifest.json", lambda path: Corpus(path.parent)),
    ("manifest.json", lambda path: verify(path.parent)),
    ("card.json", lambda path: read_card(path.parent)),
    ("state.json", lambda path: read_state(path.parent)),
    ("block_recurrent_manifest.json", lambda path: check_export(path.parent)),
]
"""Each with the name of the file that it reads."""


@functools.cache
def _model() -> BlockRecurrentLM:
    torch.manual_seed(0)
    return BlockRecurrentLM(preset(RUN, "micro", vocab_size=257))


def _load_config(path: Path) -> object:
    """A run's configuration that says something: any text of comments is one that says nothing."""
    values = read_toml(path, sealed=True)
    if not values:
        raise BlockRecurrentError("it says nothing")
    return RunConfig.from_dict(values)


def flips(folder: Path, kind: str, count: int, seed: int = 0) -> dict[str, Any]:
    """So many byte flips in the files of a kind."""
    what = KINDS[kind]
    source = Flips(what.path(folder), seed, LOGS)
    accepted, tracebacks = [], []
    for _ in range(count):
        file, position, mask = source.one()
        flip(file, position, mask)
        try:
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                what.load(folder)
            if not warned:
                accepted.append([file.name, position, mask])
        except BlockRecurrentError as error:
            if "\n" in str(error):
                tracebacks.append([file.name, position, mask, "more than one line"])
        except Exception as error:
            tracebacks.append([file.name, position, mask, repr(error)])
        finally:
            flip(file, position, mask)
    what.load(folder)
    return {"what": f"byte flips: {kind}", "count": count, "accepted": accepted, "tracebacks": tracebacks}


def forged(folder: Path, kind: str, count: int, seed: int = 0) -> dict[str, Any]:
    """Files with random changes and valid hashes: refused in one line, or used; never a traceback or a crash."""
    rng, used = random.Random(seed), 0
    tracebacks: list[Any] = []
    for _ in range(count):
        FORGERIES[kind].make(folder, rng)
        try:
            used += FORGERIES[kind].use(folder)
        except Exception as error:
            tracebacks.append(repr(error))
    refused = count - used - len(tracebacks)
    return {"what": f"forged {kind}", "count": count, "refused": refused, "used": used, "tracebacks": tracebacks}


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


def kills(folder: Path, system: str, count: int, saves: int, seed: int = 0) -> dict[str, Any]:
    """kill -9 at any moment, and while a checkpoint is written; then to the end, and every line of metrics compared."""
    rng, differing, stuck, during = random.Random(seed), 0, 0, 0
    run = folder / system
    kept = ("step", "split", "bits_per_token", "tokens_seen", "learning_rate", "gradient_norm")
    command = [sys.executable, "-m", "block_recurrent", *train_arguments(folder, system, 12)]

    def rows() -> list[list[Any]]:
        lines = (json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines())
        return [[line.get(key) for key in kept] for line in lines]

    def written() -> int:
        metrics = run / "metrics.jsonl"
        return metrics.read_bytes().count(b"\n") if metrics.exists() else 0

    def different_lines() -> int:
        found = rows()
        return abs(len(found) - len(expected)) + sum(a != b for a, b in zip(found, expected, strict=False))

    def unfinished() -> bool:
        return any((run / "checkpoints").glob(".*.part"))

    shutil.rmtree(run, ignore_errors=True)
    subprocess.run(command, check=True, capture_output=True)
    expected = rows()
    shutil.rmtree(run)
    done = 0
    while done < count:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        waits_for_save = during < saves
        if waits_for_save:
            while process.poll() is None and unfinished():  # the one that the last kill has left is swept first
                time.sleep(0.0005)
            while process.poll() is None and not unfinished():
                time.sleep(0.0005)
        else:  # while it starts, or some lines later: by lines rather than by time, which depends on the machine
            until = written() + rng.randrange(4)
            while process.poll() is None and written() < until:
                time.sleep(0.001)
            time.sleep(rng.uniform(0.0, 0.5))
        process.send_signal(signal.SIGKILL)
        if process.wait() != -signal.SIGKILL:  # it was faster: no kill, and the next one begins anew
            stuck += process.returncode != 0
            differing += different_lines()
            shutil.rmtree(run)
            continue
        done, during = done + 1, during + (waits_for_save and unfinished())
    stuck += subprocess.run(command, capture_output=True).returncode != 0
    differing += different_lines()
    what = f"kill -9: {system}"
    return {"what": what, "count": done, "during_saves": during, "differing_lines": differing, "stuck": stuck}


def hash_cost(system: str, size: str, tokens: int, scored: int) -> dict[str, Any]:
    """Time to check the hashes of token files, as a share of a pass over the same tokens: the fastest there is, which
    is scoring. In seconds of the processor, so that other programs on the machine count little."""
    from block_recurrent.evaluate.scoring import score

    rng = random.Random(0)
    with tempfile.TemporaryDirectory() as place, contextlib.redirect_stdout(io.StringIO()):
        folder = Path(place)
        make_data(folder)
        for number in range(8):
            (folder / "books" / "train" / f"{number}.txt").write_bytes(bytes(rng.choices(b"abcdefgh ", k=tokens // 8)))
        command = ["data", "prepare", str(folder / "books"), "--out", str(folder / "data"), "--overwrite"]
        assert main(command) == 0
        checking = []
        for _ in range(5):
            corpus = Corpus(folder / "data")
            began = time.process_time()
            documents = [corpus.tokens("train", index) for index in range(8)]
            checking.append(time.process_time() - began)
        model = BlockRecurrentLM(preset(system, size, corpus.vocab_size)).eval()
        scoring = []
        for _ in range(2):
            began = time.process_time()
            list(score(model, [document[: scored // 8] for document in documents], 8))
            scoring.append(time.process_time() - began)
    checked, passed = min(checking) / tokens, min(scoring) / scored
    rates = {"tokens_checked_per_second": 1 / checked, "tokens_scored_per_second": 1 / passed}
    return {"what": f"checking token files: {system}, {size}", **rates, "share_of_a_pass": checked / passed}


def main_(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[1])
    parser.add_argument("--out", type=Path, required=True, help="results are written to OUT.json and OUT.md")
    parser.add_argument("--flips", type=int, default=1000, help="in each kind of file (default: %(default)s)")
    parser.add_argument("--forged", type=int, default=500, help="of memory files (default: %(default)s)")
    parser.add_argument("--forged-others", type=int, default=100, help="of each other kind (default: %(default)s)")
    parser.add_argument("--operations", type=int, default=5000, help="in threads, on forks (default: %(default)s)")
    parser.add_argument("--kills", type=int, default=10, help="of each family (default: %(default)s)")
    parser.add_argument("--saves", type=int, default=3, help="of them during saves (default: %(default)s)")
    names = ("flips", "forged", "threads", "hashes", "kills")
    parser.add_argument("--only", nargs="+", default=names, choices=names, help="which attacks (default: all)")
    parser.add_argument("--kinds", nargs="+", help="only these kinds of files, and families (default: all)")
    args = parser.parse_args(argv)
    _sources()

    def chosen(kinds: Iterable[str]) -> list[str]:
        return [kind for kind in kinds if args.kinds is None or kind in args.kinds]

    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            make_all(folder) if {"flips", "forged"} & {*args.only} else make_data(folder)
        counts = dict.fromkeys(FORGERIES, args.forged_others) | {"memory files": args.forged}
        attacks: dict[str, list[Callable[[], dict[str, Any]]]] = {
            "flips": [partial(flips, folder, kind, args.flips) for kind in chosen(KINDS)],
            "forged": [partial(forged, folder, kind, counts[kind]) for kind in chosen(counts)],
            "threads": [partial(threads, args.operations)],
            "hashes": [partial(hash_cost, RUN, "tiny", 4_000_000, 65_536)],
            "kills": [partial(kills, folder, system, args.kills, args.saves) for system in chosen(SYSTEMS)],
        }
        for work in (work for name in args.only for work in attacks[name]):
            result = work()
            print(json.dumps(_short(result)), flush=True)
            _write(args.out, result)
    return 0


def _short(result: dict[str, Any]) -> dict[str, Any]:
    return {key: len(value) if isinstance(value, list) else value for key, value in result.items()}


def _write(out: Path, result: dict[str, Any]) -> None:
    """Beside what was measured before: a result takes the place of an earlier one of its name, and says of which
    sources it is."""
    result["sources"] = _sources()
    before = json.loads(out.with_suffix(".json").read_text()) if out.with_suffix(".json").exists() else {}
    by_name = {each["what"]: each for each in [*before.get("results", []), result]}
    remarks = before.get("remarks", [])
    sanitizers = os.environ.get("BRT_SANITIZED", "")
    command = "make sanitize" if sanitizers else "python -m tests.security.measure --out results/hardening"
    found = {"command": command, "machine": machine(), "versions": versions(), "remarks": remarks}
    found["results"] = list(by_name.values())
    out.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
    built = f", kernels built with {sanitizers}" if sanitizers else ""
    lines = [f"`{command}`{built}", "", "| what | figures | sources |", "| --- | --- | --- |"]
    for each in by_name.values():
        shown = {k: v for k, v in _short(each).items() if k not in ("what", "sources")}
        figures = ", ".join(f"{k.replace('_', ' ')} {_figure(v)}" for k, v in shown.items())
        lines.append(f"| {each['what']} | {figures} | {each.get('sources', 'not recorded')} |")
    where = [f"{machine()['processor']}, {machine()['cores']} cores", *map(" ".join, versions().items())]
    notes = [part.strip() for part in (__doc__ or "").split("\n\n")[1:]]
    out.with_suffix(".md").write_text(
        "\n\n".join(["\n".join(lines), *notes, *remarks, f"Last on {'; '.join(where)}.\n"])
    )


@functools.cache
def _sources() -> str:
    """The commit that is measured, and the processor; asked for when the modules have just been imported."""
    git = ["git", "-C", str(Path(__file__).parent)]
    commit = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    changed = subprocess.run([*git, "status", "--porcelain", "--", "../../src"], capture_output=True, text=True).stdout
    return f"{commit or 'not recorded'}{' and changes' if changed else ''}; {machine()['processor']}"


def _figure(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"


if __name__ == "__main__":
    sys.exit(main_())
