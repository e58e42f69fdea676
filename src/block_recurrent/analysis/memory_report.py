"""Inspections as text, as JSON, and as data for a page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from block_recurrent.analysis.ablation import ABLATION_RULE, Ablation
from block_recurrent.analysis.inspector import Inspection, LayerInspection
from block_recurrent.analysis.packing import pack_shares, thin
from block_recurrent.analysis.page_file import write_page
from block_recurrent.analysis.token_text import TokenText

MAPS = ("read", "written")
MOST_COLUMNS = 800  # of a heat map: more than a screen shows


def inspection_numbers(inspection: Inspection, ablations: list[Ablation]) -> dict[str, Any]:
    """All values, block by block."""
    return {
        "name": inspection.name,
        "tokens": inspection.tokens,
        "window": inspection.window,
        "layers": [
            {
                "layer": layer.layer,
                "gates": {name.replace(" ", "_"): np.round(x, 6).tolist() for name, x in layer.gates.items()},
                **{name: np.round(getattr(layer, name), 6).tolist() for name in ("state_norm", "change")},
                **{name: np.round(x.mean(0), 6).tolist() if len(x := getattr(layer, name)) else [] for name in MAPS},
                "most_read": layer.by_reading if len(layer.read) else [],
                "most_changed_blocks": layer.most_changed,
                "ablation": [vars(ablation) for ablation in ablations if ablation.layer == layer.layer],
            }
            for layer in inspection.layers
        ],
        "ablation_rule": ABLATION_RULE,
    }


def inspection_page_data(inspection: Inspection, ablations: list[Ablation], text: TokenText) -> dict[str, Any]:
    """The data for showMemory of tables.js."""
    layers = [
        _layer_page_data(layer, [r for r in ablations if r.layer == layer.layer], inspection.window, text)
        for layer in inspection.layers
        if len(layer.change)
    ]
    return {"name": inspection.name, "layers": layers}


def _layer_page_data(layer: LayerInspection, ablations: list[Ablation], window: int, text: TokenText) -> dict[str, Any]:
    read, run = thin(layer.read, MOST_COLUMNS)
    written, _ = thin(layer.written, MOST_COLUMNS)
    read_packed, read_top = pack_shares(read.astype(np.float32))
    written_packed, written_top = pack_shares(written.astype(np.float32))
    blocks = layer.most_changed[:5]
    changed = "; ".join(f"block {block} (“{_begin(text, block * window)}…”)" for block in blocks)
    return {
        "layer": layer.layer,
        "states": layer.read.shape[1],
        "blocks": len(layer.change),
        "blocks_per_point": run,
        "columns": len(read),
        "gates": {name: np.round(thin(values, MOST_COLUMNS)[0], 5).tolist() for name, values in layer.gates.items()},
        "change": np.round(thin(layer.change, MOST_COLUMNS)[0], 5).tolist(),
        "state_norm": np.round(thin(layer.state_norm, MOST_COLUMNS)[0], 5).tolist(),
        "read": read_packed,
        "written": written_packed,
        "note": (
            f"{len(layer.change):,} blocks of {window} tokens, {layer.read.shape[1]} state vectors. Strongest color: "
            f"{100 * read_top:.1f}% of the attention, a change of norm {written_top:.2f}."
        ),
        "most_changed_note": f"Blocks that changed the state most: {changed}." if blocks else "",
        "ablation": [vars(ablation) for ablation in ablations],
    }


def _begin(text: TokenText, index: int) -> str:
    """The first words of a block. Position p of a document has token p - 1: the document mark comes first."""
    return " ".join(text.between(max(0, index - 1), index + 60)[:48].split())


def describe_inspection(inspection: Inspection, ablations: list[Ablation], text: TokenText) -> str:
    """The inspection in a few lines of text."""
    lines = [f"{inspection.name}: {inspection.tokens:,} tokens in blocks of {inspection.window}"]
    for layer in inspection.layers:
        if not len(layer.change):
            lines.append(f"\nlayer {layer.layer}: the text is shorter than one block, so the state was never updated")
            continue
        lines += ["", f"layer {layer.layer}"]
        for name, values in layer.gates.items():
            lines.append(f"  {name:24} mean {values.mean():.3f}, from {values.min():.3f} to {values.max():.3f}")
        lines.append(
            f"  {'norm of a state vector':24} mean {layer.state_norm.mean():.3f}, at the end {layer.state_norm[-1]:.3f}"
        )
        lines.append(
            f"  {'state replaced per block':24} mean {layer.change[1:].mean() if len(layer.change) > 1 else 0:.3f}"
        )
        shares = layer.read.mean(0)
        top = ", ".join(f"{s} ({100 * shares[s]:.1f}%)" for s in layer.by_reading[:6])
        lines.append(f"  most read vectors        {top}; uniform would be {100 / len(shares):.1f}%")
        moved = np.argsort(-layer.written.mean(0), kind="stable")[:6]
        lines.append(f"  most written vectors     {', '.join(str(int(s)) for s in moved)}")
        lines.append("  blocks that changed the state most:")
        for block in layer.most_changed[:5]:
            lines.append(f"    {block:>7}  {layer.change[block]:.3f}  “{_begin(text, block * inspection.window)}…”")
        mine = [r for r in ablations if r.layer == layer.layer]
        if mine:
            lines.append(f"  bits per token {mine[0].normal:.4f}; change with ablated vectors:")
            lines.append(f"    {'vectors':>7} {'most read':>12} {'least read':>12}")
            for r in mine:
                lines.append(f"    {r.count:>7} {r.most_read - r.normal:>+12.4f} {r.least_read - r.normal:>+12.4f}")
    return "\n".join(lines)


def write_inspection_page(path: Path, subtitle: str, data: dict[str, Any]) -> None:
    """The inspection as a separate page."""
    write_page(path, f"The memory while reading {data['name']}", subtitle, ["memory.html"], {"inspections": [data]})
