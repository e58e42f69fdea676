"""Results of a task as a table with published rows, and as a chart."""

from __future__ import annotations

import statistics
from typing import Any

from block_recurrent.analysis.plots import LineChart, Series
from block_recurrent.io.output import format_table, markdown

Rows = list[list[str]]


def grouped(found: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Runs that differ only in their seed, by system and variant."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for run in found["runs"]:
        groups.setdefault(f"{run['system']} {run['point']}".strip(), []).append(run)
    return groups


def mean_accuracy(runs: list[dict[str, Any]], level: str) -> float:
    return statistics.fmean(run["accuracy"][level] for run in runs)


def our_rows(found: dict[str, Any]) -> tuple[list[str], Rows]:
    """A row per model: accuracy by level, and the cost."""
    levels = list(found["runs"][0]["accuracy"])
    head = ["system", *(f"{found['axis']} {level}" for level in levels)]
    head += ["lowest of seeds", "seeds", "numbers in the state", "parameters", "updates", "tokens", "minutes"]
    rows = []
    for label, runs in grouped(found).items():
        lowest = min(run["accuracy"][levels[-1]] for run in runs)
        rows.append(
            [
                label,
                *(f"{mean_accuracy(runs, level):.3f}" for level in levels),
                f"{lowest:.3f}",
                str(len(runs)),
                *(f"{runs[0][key]:,}" for key in ("numbers in the state", "parameters without embeddings")),
                f"{statistics.fmean(run['updates'] for run in runs):,.0f}",
                f"{statistics.fmean(run['tokens'] for run in runs) / 1e6:,.2f}M",
                f"{statistics.fmean(run['minutes'] for run in runs):.1f}",
            ]
        )
    return head, rows


def published_rows(found: dict[str, Any]) -> tuple[list[str], Rows]:
    return ["published", "at", "accuracy"], [
        [row["system"], row["at"], f"{row['accuracy']:.2f}"] for row in found["published"]
    ]


def describe(found: dict[str, Any]) -> str:
    """The table for the terminal."""
    lines = [f"{found['task']}: {found['what']}; accuracy, chance is {found['chance']:.4f}", ""]
    lines.append(format_table(*our_rows(found)))
    if found["published"]:
        lines += ["", format_table(*published_rows(found))]
    return "\n".join(lines)


def page(found: dict[str, Any]) -> str:
    """The table in Markdown, with notes on the conditions."""
    training, machine = found["training"], found["machine"]
    lines = [f"# {found['task']}", "", f"`{found['command']}`", ""]
    lines += [f"{found['what'].capitalize()}. Accuracy of an answer; chance is {found['chance']:.4f}.", ""]
    lines += [markdown(*our_rows(found))]
    if found["published"]:
        lines += [markdown(*published_rows(found))]
    lines += [
        f"Size {found['size']}, window {found['window']} unless a row says otherwise; {training['lanes']} examples "
        f"per update, at most {found['steps at most']:,}; levels {', '.join(map(str, found['levels']))}; AdamW, rate "
        f"{training['learning_rate']:g}. Minutes are of training on {machine['processor']}, {machine['cores']} cores, "
        "shared. Numbers in the state: all that a lane keeps, including the window cache. Parameters are without "
        "embeddings.",
        "",
    ]
    if found["changed"]:
        said = ", ".join(f"{key} = {value}" for key, value in found["changed"].items())
        lines += [f"Changed settings: {said}.", ""]
    lines += [", ".join(f"{name} {version}" for name, version in found["versions"].items()), ""]
    return "\n".join(lines)


def chart(found: dict[str, Any], by_state: bool) -> LineChart:
    """Accuracy by level, a line per model; or by the numbers in the state, a line per system."""
    series = _by_state(found) if by_state else _by_level(found)
    last = list(found["runs"][0]["accuracy"])[-1]
    return LineChart(
        title=f"{found['task']}, size {found['size']}",
        note=f"{found['what'].capitalize()}. Mean over seeds.",
        x_label="numbers in the state" if by_state else found["axis"],
        y_label=f"accuracy at {found['axis']} {last}" if by_state else "accuracy",
        series=series,
        x_log=by_state or found["axis"] == "length",
        y_from=0.0,
        lines=[(found["chance"], "chance")],
    )


def _by_level(found: dict[str, Any]) -> list[Series]:
    levels = list(found["runs"][0]["accuracy"])
    return [
        Series(label, list(map(float, levels)), [mean_accuracy(runs, level) for level in levels], points=True)
        for label, runs in grouped(found).items()
    ]


def _by_state(found: dict[str, Any]) -> list[Series]:
    last = list(found["runs"][0]["accuracy"])[-1]
    points: dict[str, list[tuple[float, float]]] = {}
    for runs in grouped(found).values():
        place = (float(runs[0]["numbers in the state"]), mean_accuracy(runs, last))
        points.setdefault(runs[0]["system"], []).append(place)
    ours = len(points)
    for row in found["published"]:
        points.setdefault(f"{row['system']} (published)", []).append((float(row["numbers"]), row["accuracy"]))
    lines = [(label, sorted(places)) for label, places in points.items()]
    return [
        Series(label, [x for x, _ in places], [y for _, y in places], dashed=number >= ours, points=True)
        for number, (label, places) in enumerate(lines)
    ]
