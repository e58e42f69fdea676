"""The numbers of the result tables are those of the files in results/."""

from __future__ import annotations

import json
import re
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch

from .golden.check import LIMIT

ROOT = Path(__file__).parent.parent


def result(name: str) -> Any:
    return json.loads((ROOT / "results" / f"{name}.json").read_text(encoding="utf-8"))


def row(name: str, **fields: object) -> dict[str, Any]:
    """The only row of a file that has these fields."""
    (found,) = [row for row in result(name)["rows"] if fields.items() <= row.items()]
    return found


def text_of(page: str) -> str:
    return " ".join((ROOT / page).read_text(encoding="utf-8").split())


def evidence(system: str, **fields: object) -> list[float]:
    """Bits per token of the finished runs on code, with 1,200 updates."""
    wanted = {"corpus": "code", "system": system, "steps": 1200, **fields}
    runs = [run for run in result("evidence/code")["runs"] if wanted.items() <= run.items()]
    return [run["validation"][-1]["bits_per_token"] for run in runs]


def recall() -> tuple[str, float]:
    found = result("recall")
    place = found["distances"].index([513, 1024])
    bits = {system["system"]: system["normal"][place] for system in found["systems"]}
    return f"a name from 513 to 1,024 tokens ago costs {bits['rec-fixed-skip']:.2f} bits", bits["slide-plus"]


def on_text() -> tuple[str, str, str]:
    ours, theirs = evidence("rec-fixed-skip", num_states=48, repeats=0.2), evidence("slide-plus", repeats=0.0)
    assert len(ours) == len(theirs) == 3
    chapters = result("evidence/code")["whole_chapters"]
    latex = [chapters[side]["bits_per_token"] for side in ("rec-fixed-skip, repeats 0.2", "slide-plus")]
    code = f"{mean(ours):.2f} against {mean(theirs):.2f} bits per token"
    novels = result("evidence/books-twin")["evaluation"]
    books = [novels[side]["bits_per_token"] for side in ("memory", "twin")]
    return code, f"{latex[0]:.2f} against {latex[1]:.2f}", f"{books[0]:.2f} against {books[1]:.2f} (1 seed each)"


def step_time(name: str) -> dict[str, Any]:
    return row(name, system="rec-fixed-skip")


def dense(segment: int) -> float:
    return row("peers-dense", model="full-attention", segment=segment)["ours_over_this"]


def ported(window: int) -> float:
    return row("peers-recurrent", model="block-recurrent-transformer-pytorch", window=window)["ours_over_this"]


def scoring() -> float:
    near, far = (row("length-scoring", tokens=tokens)["tokens_per_second"] for tokens in (10_000, 1_000_000))
    return far / near


def reversing() -> str:
    found = result("tasks/reverse-24")
    ours, theirs = (
        run["accuracy"]["24"] for s in ("rec-fixed-skip", "slide-plus") for run in found["runs"] if run["system"] == s
    )
    (published,) = [row["accuracy"] for row in found["published"] if row["system"] == "Recurrent Memory Transformer"]
    return f"{ours:.2f} of them right, {theirs:.2f} for the sliding window, {published:.2f} published"


def twin() -> tuple[str, str]:
    card = json.loads((ROOT / "src/block_recurrent/models/code/card.json").read_text(encoding="utf-8"))
    found = card["evaluation"]
    ours, theirs = (found[side]["bits_per_token"] for side in ("memory", "twin"))
    low, high = found["twin_minus_model"]["interval_95"]
    return f"{ours:.2f} against {theirs:.2f} bits per token for its twin", f"ahead by {low:.2f} to {high:.2f}"


def carrying() -> str:
    found = result("books/clear-state")["difference"]
    low, high = found["interval_95"]
    return f"{found['bits_per_token']:.3f} bits per token (95%: {low:.3f} to {high:.3f})"


def sentences() -> list[tuple[tuple[str, ...], str]]:
    """What the pages say, with the numbers of the files."""
    readme, page = "README.md", "docs/results.md"
    remembered, forgotten = recall()
    far = row("write-0.1.0", part="position", position=100352)["ratio"]
    gpt2 = row("write-0.1.0", part="gpt2", model="gpt2 of transformers", position=8192)["ratio"]
    streams = row("serve-streams", what="float32, from a memory", clients=16)["ratio"]
    books = result("books/table1")["runs"]
    table = [mean(r["bits_per_token"] for r in books if r["label"] == s) for s in ("rec-fixed-skip", "slide-plus")]
    code, latex, books_now = on_text()
    return [
        ((readme, page), f"all errors below {LIMIT:.0e}".replace("e-0", "e-")),
        ((readme, page), remembered),
        ((readme,), f"at chance, {forgotten:.0f} bits"),
        ((page,), f"{forgotten:.2f} (chance: 4) for a sliding window"),
        ((readme, page, "docs/evidence.md"), f"{step_time('evidence/steptime-48-states')['relative']:.2f} times "),
        ((readme, page), code),
        ((readme, page), latex),
        ((readme, page), books_now),
        ((readme, page), f"{step_time('steptime-160m')['relative']:.3f} times the "),
        ((readme, page), f"{dense(4096):.1f} times its training speed at "),
        ((readme, page), f"{dense(16384):.1f} times at 16,384; slower below 2,048"),
        ((readme,), f"{ported(512):.2f} times its training speed at window 512, {ported(128):.2f} times at 128"),
        ((readme, page), f"no: {far:.3f} of the speed at position 100,000 compared with 1,000"),
        ((readme,), f"{gpt2:.1f} times GPT-2's at 8,192"),
        ((readme, page), f"no: {scoring():.3f} after a million tokens compared with ten thousand"),
        ((page,), f"{table[0]:.3f} against {table[1]:.3f} bits per token"),
        ((page,), reversing()),
        ((page,), carrying()),
        *(((page,), said) for said in twin()),
        ((page,), f"16 streams generate {streams:.1f} times the tokens per second of one"),
    ]


@pytest.mark.parametrize("sentence", sentences(), ids=lambda sentence: sentence[1])
def test_a_sentence_has_the_numbers_of_its_file(sentence: tuple[tuple[str, ...], str]) -> None:
    for page in sentence[0]:
        assert sentence[1] in text_of(page), page


def test_every_row_of_the_readme_names_its_file() -> None:
    table = (ROOT / "README.md").read_text(encoding="utf-8").partition("## Results")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (?!question|---).*$", table, flags=re.MULTILINE)
    assert 1 <= len(rows) <= 8
    for line in rows:
        targets = re.findall(r"\]\(([^)]+)\)", line)
        assert targets, line
        for target in targets:
            assert target.startswith(("results/", "tests/golden")), line
            assert (ROOT / target).exists(), line


def test_slower_below_2048_tokens() -> None:
    for segment in (512, 1024, 2048):
        ratio = row("peers-dense-short", model="full-attention", segment=segment)["ours_over_this"]
        assert (ratio < 1) == (segment < 2048)


@pytest.mark.parametrize("states", [32, 48, 64])
def test_the_cost_table(states: int) -> None:
    name = f"steptime-{states}-states"
    found = step_time(f"evidence/{name}")
    repeats = re.search(r"--repeats (\d+)", result(f"evidence/{name}")["command"])
    assert repeats is not None
    file = f"[{name}](../results/evidence/{name}.md), best of {repeats[1]}"
    assert f"| {states} | {found['relative']:.2f} | {found['flop_ratio']:.2f} | {file} |" in text_of("docs/evidence.md")


def test_the_table_of_step_times() -> None:
    """docs/performance.md, at size 160m."""
    text = text_of("docs/performance.md")
    for system in ("slide", "slide-plus", "rec-fixed-skip", "rec-lstm-dual", "feedback-fixed-skip", "memorizing"):
        found = row("steptime-160m-all", system=system)
        digits = 3 if system == "rec-fixed-skip" else 2
        relative = "1" if system == "slide-plus" else f"{found['relative']:.{digits}f}"
        paper = "1" if system == "slide-plus" else f"{found['paper']:.2f}"
        share, peak = found["limit_share"], found["peak_bytes"] / 1e9
        shares = {f"{share + nudge:.2f}" for nudge in (-1e-9, 1e-9)}  # a 5 at the end may be rounded either way
        rows = [f"| `{system}` | {found['seconds']:.1f} | {relative} | {paper} | {s} | {peak:.1f} GB |" for s in shares]
        assert any(line in text for line in rows), rows


def test_kernels_and_saved_bytes_on_a_gpu() -> None:
    """The table of docs/gpu.md, and the limits: half of the kernels of 0.1.0, with block feedback a quarter."""
    text = text_of("docs/gpu.md")
    found = result("kernel-counts")["rows"]
    assert {"slide-plus", "rec-fixed-skip", "feedback-fixed-skip"} <= {counts["system"] for counts in found}
    for counts in found:
        system, count = counts["system"], counts["forward"] + counts["backward"]
        assert count <= counts["first"] / (4 if "feedback" in system else 2)
        assert counts["saved_gib"] <= 2.6
        assert counts["fp32_gflop"] <= 1
        assert counts["waits"] == 0
        name = "memorizing (512 tokens)" if system == "memorizing" else system
        rooflines = f"{counts['a100_ms']} ms | {counts['h100_ms']} ms"
        assert f"| {name} | {counts['first']:,} | {count:,} | {counts['saved_gib']:.2f} GiB | {rooflines} |" in text


def test_kernels_in_triton_keep_everything_in_registers() -> None:
    """The committed file is of the tiles in use."""
    from block_recurrent.ops.triton.attention import tiles_of

    found = result("triton-aot")["rows"]
    kernels = ("forward", "queries_backward", "keys_backward")
    kernels += ("rms", "rms_backward", "add_dropout", "heads", "heads_backward")
    assert {(counts["kernel"], counts["architecture"], counts["dtype"]) for counts in found} == {
        *product(kernels, ("sm_80", "sm_90"), ("bfloat16", "float32"))
    }
    for counts in found:
        assert counts["spilled"] <= (64 if counts["kernel"] == "keys_backward" else 0), counts
        assert counts["registers"] <= 255
        assert counts["shared"] <= (163 if counts["architecture"] == "sm_80" else 227) * 1024
        if counts["kernel"] in kernels[:3]:
            tiles = tiles_of(counts["kernel"], counts["size"], getattr(torch, counts["dtype"]))
            assert tiles == (counts["queries"], counts["keys"], counts["threads"] // 32, counts["stages"]), counts
