"""Recall by distance as a table and a chart."""

from __future__ import annotations

from typing import Any

from block_recurrent.analysis.plots import LineChart, Series
from block_recurrent.io.output import format_table


def describe_recall(found: dict[str, Any]) -> str:
    """A row per bucket of distances, a column per system."""
    columns = _columns(found)
    rows = [
        [f"{low}-{high}", *(f"{values[number]:.3f}" for _, values in columns)]
        for number, (low, high) in enumerate(found["distances"])
    ]
    lines = [f"bits per queried name, {found['names']} names: chance is {found['chance']:.2f}", ""]
    lines.append(format_table(["distance", *(label for label, _ in columns)], rows))
    reach = ", ".join(f"{system} {reach}" for system, reach in found["reach"].items())
    lines += ["", f"window {found['window']}, segment {found['segment']}; layers x window: {reach} tokens"]
    for result in found["systems"]:
        keep = "" if result["keep"] is None else f"; fixed gates keep {result['keep']:.3f} of the state per block"
        lines.append(
            f"{result['system']}: {result['parameters']:,} parameters, {result['steps']} updates in "
            f"{result['seconds']:.0f} s{keep}"
        )
    return "\n".join(lines)


def recall_chart(found: dict[str, Any]) -> LineChart:
    """Bits per queried name by distance, with chance and with each system's reach without a memory."""
    middles = [(low * high) ** 0.5 for low, high in found["distances"]]
    series = [
        Series(label, middles, values, dashed=label.endswith("cleared"), points=True)
        for label, values in _columns(found)
    ]
    reach = max(found["reach"].values())
    return LineChart(
        title="Recall by distance",
        note=(
            f"One of {found['names']} names is mentioned and queried later: bits per query, by the distance in tokens. "
            f"The attention window is {found['window']} tokens; through all layers it reaches {reach} at most."
        ),
        x_label="distance in tokens",
        y_label="bits per queried name",
        series=series,
        x_log=True,
        y_from=0.0,
        lines=[(found["chance"], "chance")],
    )


def _columns(found: dict[str, Any]) -> list[tuple[str, list[float]]]:
    columns = []
    for result in found["systems"]:
        columns.append((result["system"], result["normal"]))
        if result["cleared"] is not None:
            columns.append((f"{result['system']}, state cleared", result["cleared"]))
    return columns
