"""Plots as files: pages (.html), and images (.png) with the extra `plots`."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from block_recurrent.analysis.comparison import Comparison, gain_by_distance
from block_recurrent.analysis.inspector import Inspection
from block_recurrent.analysis.page_file import write_page
from block_recurrent.errors import DataError, MissingExtraError
from block_recurrent.evaluate.cumulative import Curve
from block_recurrent.io.output import write_file

COLORS = ("#0b7a75", "#c8553d", "#6b5ca5", "#b8860b", "#3b7dd8", "#7a7a3a")
LINES = ("-", "-.", ":")  # when all colors have been used
MOST_INSIDE = 8  # labels that leave room for the lines
PAPER, FAINT, GRID = "#fffdf8", "#857d70", "#e6dfd2"


@dataclass(frozen=True)
class Series:
    """One line of a chart."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    dashed: bool = False
    points: bool = False


@dataclass(frozen=True)
class LineChart:
    """The data of a line chart, for lineChart of charts.js and for matplotlib."""

    title: str
    note: str
    x_label: str
    y_label: str
    series: list[Series]
    x_log: bool = False
    y_from: float | None = None
    counts: Series | None = None  # drawn as an area with a separate axis
    lines: list[tuple[float, str]] = field(default_factory=list)  # named horizontal lines

    def page_data(self) -> dict[str, Any]:
        spec = {
            "title": self.title,
            "note": self.note,
            "xLabel": self.x_label,
            "yLabel": self.y_label,
            "xLog": self.x_log,
            "yFrom": self.y_from,
            "counts": self.counts and vars(self.counts),
            "series": [vars(s) for s in self.series],
            "lines": [{"y": y, "label": label} for y, label in self.lines],
        }
        return {key: value for key, value in spec.items() if value is not None}


def cumulative_chart(curves: Mapping[str, Curve]) -> LineChart:
    """The paper's token-level figure, for any number of runs."""
    most = max(curves.values(), key=lambda curve: len(curve.positions))
    return LineChart(
        title="Cumulative cross-entropy",
        note="Mean bits per token over the first x tokens, over all documents at least that long.",
        x_label="position",
        y_label="mean bits per token up to here",
        series=[Series(label, c.positions.tolist(), c.bits_per_token.tolist()) for label, c in curves.items()],
        x_log=True,
        counts=Series("documents", most.positions.tolist(), most.documents.tolist()),
    )


def check_plot_path(path: Path) -> None:
    """Raise an error before the work begins, unless this kind of plot is supported here."""
    if path.suffix.lower() not in (".html", ".png"):
        raise DataError(f"--plot '{path}': its name must end in .html (a page) or .png (an image)")
    if path.suffix.lower() == ".png" and not has_matplotlib():
        raise MissingExtraError("a PNG plot", "plots")


def has_matplotlib() -> bool:
    return find_spec("matplotlib") is not None


def write_chart(path: Path, chart: LineChart, subtitle: str = "") -> None:
    """Write a chart as a page or an image, by the file's name."""
    check_plot_path(path)
    if path.suffix.lower() == ".html":
        write_page(path, chart.title, subtitle, ["charts.html"], {"charts": [chart.page_data()]})
        return
    with picture(path, (9, 5)) as axes:
        if chart.counts:
            twin = axes.twinx()
            twin.fill_between(chart.counts.x, chart.counts.y, color=COLORS[1], alpha=0.1, linewidth=0)
            twin.set_ylabel(chart.counts.label, color=FAINT)
            twin.set_ylim(bottom=0)
        for number, s in enumerate(chart.series):
            again, place = divmod(number, len(COLORS))
            color, style = COLORS[place], "--" if s.dashed else LINES[again % len(LINES)]
            axes.plot(s.x, s.y, style, color=color, label=s.label, marker="o" if s.points else None, markersize=4)
        for y, label in chart.lines:
            axes.axhline(y, color=FAINT, linestyle=":", linewidth=1)
            axes.annotate(label, (0.01, y), xycoords=("axes fraction", "data"), ha="left", va="bottom", color=FAINT)
        axes.set(title=chart.title, xlabel=chart.x_label, ylabel=chart.y_label)
        if chart.x_log:
            axes.set_xscale("log")
        if chart.y_from is not None:
            axes.set_ylim(bottom=chart.y_from)
        if len(chart.series) > MOST_INSIDE:
            axes.figure.legend(frameon=False, loc="outside right upper", fontsize="small")
        else:
            axes.legend(frameon=False)


def write_charts(path: Path, chart: LineChart) -> list[str]:
    """Write a chart as a page and, with matplotlib, as an image, to `path` with these endings; returns their names."""
    kinds = (".html", ".png") if has_matplotlib() else (".html",)
    paths = [path.with_name(f"{path.name}{kind}") for kind in kinds]
    for each in paths:
        write_chart(each, chart)
    return [each.name for each in paths]


@contextmanager
def picture(path: Path, size: tuple[float, float]) -> Iterator[Any]:
    """Axes to draw on, saved as a PNG afterwards."""
    if not has_matplotlib():
        raise MissingExtraError("a PNG plot", "plots")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, dpi=150, facecolor=PAPER, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_facecolor(PAPER)
    axes.grid(color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    yield axes
    image = io.BytesIO()
    figure.savefig(image)
    write_file(path, image.getvalue())


def write_pictures(folder: Path, comparison: Comparison, inspections: Sequence[Inspection]) -> list[Path]:
    """Write the plots of a report as images; returns their files."""
    paths = [folder / "cumulative.png", folder / "by_distance.png"]
    write_chart(
        paths[0], cumulative_chart({comparison.label_a: comparison.curve_a, comparison.label_b: comparison.curve_b})
    )
    _distance_picture(paths[1], comparison)
    for number, document in enumerate(comparison.documents):
        paths.append(folder / f"spikes-{number + 1:03d}.png")
        title = f"{document.name}: bits that {comparison.label_a} saves compared with {comparison.label_b}"
        _spike_picture(paths[-1], title, document.difference)
    for inspection in inspections:
        for layer in inspection.layers:
            for what, values in (("read", layer.read), ("written", layer.written)):
                if len(values):
                    paths.append(folder / f"memory-{what}-layer{layer.layer}.png")
                    _heat_picture(paths[-1], f"{inspection.name}: state vectors {what}, layer {layer.layer}", values)
    return paths


def _spike_picture(path: Path, title: str, difference: NDArray[np.float32]) -> None:
    with picture(path, (11, 4)) as axes:
        # One line per pixel is enough.
        run = max(1, len(difference) // 4000)
        starts = np.arange(0, len(difference), run)
        for reduce, color in ((np.maximum, COLORS[0]), (np.minimum, COLORS[1])):
            axes.vlines(starts, 0, reduce(reduce.reduceat(difference, starts), 0), color=color, linewidth=0.6)
        axes.set(title=title, xlabel="token", ylabel="difference, bits")


def _distance_picture(path: Path, comparison: Comparison) -> None:
    buckets = gain_by_distance(comparison)
    with picture(path, (9, 4.5)) as axes:
        values = [bucket.mean_difference or 0.0 for bucket in buckets]
        axes.bar([b.label for b in buckets], values, color=[COLORS[0] if v >= 0 else COLORS[1] for v in values])
        axes.axhline(0, color=FAINT, linewidth=0.8)
        axes.set(
            title="Where the gain comes from",
            xlabel="tokens back to the last mention of the word",
            ylabel=f"bits saved by {comparison.label_a} per token",
        )
        axes.tick_params(axis="x", rotation=25)


def _heat_picture(path: Path, title: str, values: NDArray[np.float32]) -> None:
    with picture(path, (11, 4)) as axes:
        axes.grid(visible=False)
        top = float(np.percentile(values, 99.5)) or 1.0
        axes.imshow(values.T, aspect="auto", cmap="viridis", vmin=0, vmax=top, interpolation="nearest")
        axes.set(title=title, xlabel="block", ylabel="state vector")
