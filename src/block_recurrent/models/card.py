"""Model cards: training data, evaluation and limits of a model, as `card.json` and as text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from block_recurrent import models
from block_recurrent.errors import ConfigError, FileFormatError, did_you_mean
from block_recurrent.io import door
from block_recurrent.io.output import markdown

FORMAT = "block-recurrent model card"
VERSION = 2
"""Sealed, like all formats from version 2 on."""


def _is_optional_number(value: Any) -> bool:
    return value is None or door.is_number(value)


def _is_interval(value: Any) -> bool:
    return value is None or (isinstance(value, list) and len(value) == 2 and all(map(door.is_number, value)))


def _is_splits(value: Any) -> bool:
    one = door.is_object({"documents": door.is_count, "bytes": door.is_count})
    return isinstance(value, dict) and all(map(one, value.values()))


_COUNTS = ("parameters", "parameters_without_embeddings", "vocabulary", "window", "segment", "states", "memory_bytes")
_BITS: dict[str, door.Rule] = {
    **dict.fromkeys(("bits_per_byte", "bits_per_token"), door.is_number),
    "interval_95": _is_interval,
    "documents": door.is_count,
}
_MEASURES = door.is_object(
    {**_BITS, "tokens": door.is_count, "split": door.is_text, "clear_every": _is_optional_number}
)
_POINT: dict[str, door.Rule] = {
    **dict.fromkeys(("step", "tokens"), door.is_count),
    "bits_per_token": door.is_number,
    "state_gain": _is_optional_number,
}
RULES: dict[str, door.Rule] = {
    **dict.fromkeys(("name", "summary", "licence"), door.is_text),
    "data": door.is_object(
        {"about": door.is_text, "splits": _is_splits, "trained_on": door.is_list_of(door.is_text)},
    ),
    "model": door.is_object(
        {**dict.fromkeys(("system", "size"), door.is_text), **dict.fromkeys(_COUNTS, door.is_count)}
    ),
    "training": door.is_object(
        {
            "command": door.is_text,
            **dict.fromkeys(("steps", "tokens"), door.is_count),
            "recipe": lambda value: isinstance(value, dict) and door.is_plain(value),
            "curve": door.is_list_of(door.is_object(_POINT)),
        }
    ),
    "evaluation": door.is_object(
        {
            **dict.fromkeys(("memory?", "cleared?", "twin?"), _MEASURES),
            **dict.fromkeys(("state_saves?", "twin_minus_model?"), door.is_object(_BITS)),
            **dict.fromkeys(("headroom?", "needle?"), door.is_plain),
        }
    ),
    "samples": door.is_list_of(door.is_object({"title": door.is_text, "text": door.is_text})),
    "limits": door.is_list_of(door.is_text),
}


def read_card(folder: Path) -> dict[str, Any]:
    """The card in a model's folder; an edited card is an error."""
    try:
        return door.read_manifest(folder / models.CARD, FORMAT, {VERSION: RULES})
    except FileFormatError as error:
        raise FileFormatError(f"model '{folder}' is damaged: {error}") from None


def card_of(name: str) -> dict[str, Any]:
    """The card of a bundled model, or of a folder made by `brt models pack`."""
    folder = models.locate(name)[0]
    if not (folder / models.CARD).is_file():
        known = models.names()
        listed = ", ".join(known) if known else "none in this installation"
        raise ConfigError(f"there is no bundled model '{name}'{did_you_mean(name, known)}; models: {listed}")
    return read_card(folder)


def card_text(card: dict[str, Any]) -> str:
    """The card as Markdown."""
    model, training = card["model"], card["training"]
    parts = [
        f"# {card['name']}\n\n{card['summary']}\n",
        f"Licence: {card['licence']}. {model['system']} {model['size']}: {model['parameters']:,} parameters "
        f"({model['parameters_without_embeddings']:,} without embeddings), vocabulary {model['vocabulary']:,}, window "
        f"{model['window']}, segment {model['segment']}, {model['states']} states, memory "
        f"{model['memory_bytes']:,} bytes regardless of length.\n",
        _evaluation(card["evaluation"]),
        _data(card["data"]),
        f"## Training\n\n{training['tokens']:,} tokens in {training['steps']:,} steps.\n\n"
        + (f"    {training['command']}\n\n" if training["command"] else "")
        + "Recipe: "
        + ", ".join(f"{key}={value}" for key, value in training["recipe"].items())
        + ".\n",
        _curve(training["curve"]),
        *(f"## {sample['title']}\n\n{_indented(sample['text'])}\n" for sample in card["samples"]),
        _bullets("Limits", card["limits"]),
    ]
    return "\n".join(part for part in parts if part)


def _evaluation(found: dict[str, Any]) -> str:
    names = {"memory": "with its memory", "cleared": "state cleared", "twin": "twin without recurrence"}
    rows = []
    for key, label in names.items():
        if key in found:
            row = found[key]
            interval = row.get("interval_95")
            within = f"{interval[0]:.4f} to {interval[1]:.4f}" if interval else "-"
            counts = [f"{row['documents']:,}", f"{row['tokens']:,}"]
            rows.append([label, f"{row['bits_per_byte']:.4f}", within, f"{row['bits_per_token']:.4f}", *counts])
    if not rows:
        return "## Evaluation\n\nNot evaluated yet.\n"
    head = ["held-out documents", "bits per byte", "95% interval", "bits per token", "documents", "tokens"]
    lines = [f"## Evaluation\n\n{markdown(head, rows)}"]
    for key, label in (("state_saves", "Saved by carrying the state"), ("twin_minus_model", "Extra bits of the twin")):
        if key in found:
            gap = found[key]
            within = gap["interval_95"]
            shown = f" (95% interval over documents {within[0]:+.4f} to {within[1]:+.4f})" if within else ""
            lines.append(f"{label}: {gap['bits_per_token']:+.4f} bits per token{shown}.\n")
    for key in ("headroom", "needle"):
        if key in found:
            values = found[key] if isinstance(found[key], dict) else {key: found[key]}
            lines.append(f"{key.capitalize()}:\n\n" + "".join(f"- {k}: {_flat(v)}\n" for k, v in values.items()))
    return "\n".join(lines)


def _data(data: dict[str, Any]) -> str:
    lines = [f"## Data\n\n{data['about']}\n"]
    lines += [f"- {split}: {n['documents']:,} documents, {n['bytes']:,} bytes" for split, n in data["splits"].items()]
    if data["trained_on"]:
        lines.append(f"\nTrained on: {', '.join(data['trained_on'])}.")
    return "\n".join(lines) + "\n"


def _curve(curve: list[dict[str, Any]]) -> str:
    if not curve:
        return ""
    rows = [
        [f"{p['tokens']:,}", f"{p['bits_per_token']:.4f}", "-" if p["state_gain"] is None else f"{p['state_gain']:.4f}"]
        for p in curve
    ]
    return markdown(["tokens trained on", "validation, bits per token", "saved by the state"], rows)


def _bullets(title: str, lines: list[str]) -> str:
    return f"## {title}\n\n" + "".join(f"- {line}\n" for line in lines) if lines else ""


def _indented(text: str) -> str:
    return "\n".join(f"    {line}".rstrip() for line in text.splitlines())


def _flat(values: Any) -> str:
    """Nested plain values in one line."""
    if isinstance(values, dict):
        return ", ".join(f"{key} {_flat(value)}" for key, value in values.items())
    return f"{values:.4f}" if isinstance(values, float) else str(values)
