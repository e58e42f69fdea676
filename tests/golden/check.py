"""Run every golden model file of a folder through our importer and compare: python tests/golden/check.py DIR

Prints per case the largest error of logits, of the recurrent state, and of the gradients (relative to the largest
gradient of that parameter); exits with 1 if any is above the limit or if a case can't be built.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open

from block_recurrent import ModelConfig, from_meliad
from block_recurrent.model.meliad import meliad_names, to_our_layout

LIMIT = 2e-5


class Errors(NamedTuple):
    logits: float
    state: float
    gradient: float


def config_of(golden: dict) -> ModelConfig:
    """Our configuration from the one in a golden file, which counts layers from 0 and calls the fixed gate `bias`."""
    gate_config = "skip" if golden.get("skip") else "single" if golden.get("single") else "dual"
    return ModelConfig(
        vocab_size=golden["vocab"],
        d_model=golden["d_model"],
        num_layers=golden["layers"],
        num_heads=golden["heads"],
        head_dim=golden["head_dim"],
        mlp_dim=golden["mlp_dim"],
        window=golden["W"],
        segment=golden["N"],
        recurrent_layers=tuple(layer + 1 for layer in golden.get("rec") or ()),
        num_states=golden.get("states", 1),
        gate="fixed" if golden.get("gate", "bias") == "bias" else golden["gate"],
        gate_config=gate_config,
        # Where the file is silent, it is the authors' code: no bias on z, tanh only in `single`.
        gate_bias=golden.get("gate_bias", False),
        gate_tanh=golden.get("gate_tanh", gate_config == "single"),
        feedback=golden.get("feedback", False),
        memory_layers=tuple(layer + 1 for layer in golden.get("mem") or ()),
        memory_size=golden.get("memsize", 1),
        memory_neighbors=golden.get("topk", 1),
        dropout=0.0,
        attention_dropout=0.0,
    )


def load(path: Path) -> tuple[dict | None, dict[str, torch.Tensor]]:
    """The configuration (None if the file is not of a model) and the tensors of a golden file."""
    with safe_open(path, framework="pt") as file:
        config = (file.metadata() or {}).get("config")
        return json.loads(config) if config else None, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def check(path: Path, dtype: torch.dtype = torch.float32) -> Errors | None:
    """The errors of one file; None if it is not of a model."""
    golden, tensors = load(path)
    if golden is None:
        return None
    config = config_of(golden)
    params = {name.removeprefix("param/"): x for name, x in tensors.items() if name.startswith("param/")}
    model = from_meliad(params, config).to(dtype)
    names = meliad_names(config)
    memory, logit_error, state_error, gradient_error = None, 0.0, 0.0, 0.0
    for segment in range(len(tensors["tokens"])):
        tokens, targets = tensors["tokens"][segment], tensors["targets"][segment].long()
        starts = tensors["start_of_document"][segment]
        loss = model.loss(tokens, targets, memory, starts)
        mean_loss = loss.sum / loss.count
        logits, memory = model(tokens, memory, starts)
        logit_error = max(logit_error, _largest(logits - tensors[f"logits/{segment}"]))
        logit_error = max(logit_error, _largest(mean_loss - tensors[f"loss/{segment}"]))
        for layer in config.recurrent_layers:
            expected = _state(tensors, segment, layer - 1)
            state_error = max(state_error, _largest(memory.layers[layer - 1].state - expected))
        if segment == 1:
            gradient_error = _gradient_error(model, mean_loss, names, tensors)
        memory = memory.detach()
    return Errors(logit_error, state_error, gradient_error)


def _state(tensors: dict[str, torch.Tensor], segment: int, layer: int) -> torch.Tensor:
    prefix = f"state/{segment}/"
    found = [x for name, x in tensors.items() if name.startswith(prefix) and f"transformer{layer}/" in name]
    assert len(found) == 1, f"no single state of layer {layer} after segment {segment}"
    return found[0]


def _gradient_error(model: torch.nn.Module, loss: torch.Tensor, names: dict[str, str], tensors: dict) -> float:
    parameters = dict(model.named_parameters())
    gradients = torch.autograd.grad(loss, [parameters[ours] for ours in names.values()], allow_unused=True)
    worst = 0.0
    for (theirs, ours), gradient in zip(names.items(), gradients, strict=True):
        expected = to_our_layout(theirs, tensors[f"grad/{theirs}"])
        gradient = torch.zeros_like(parameters[ours]) if gradient is None else gradient
        error, largest = _largest(gradient - expected), _largest(expected)
        worst = max(worst, error / largest if largest else error)
    return worst


def _largest(x: torch.Tensor) -> float:
    """Largest absolute value; a NaN counts as infinite."""
    return float("inf") if x.isnan().any() else x.abs().max().item()


def main(folder: str) -> int:
    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        print(f"there is no golden file in '{folder}'", file=sys.stderr)
        return 1
    failed = checked = 0
    print(f"{'case':32} {'logits':>9} {'state':>9} {'gradient':>9}")
    for path in files:
        try:
            errors = check(path)
        except Exception as error:
            failed += 1
            print(f"{path.stem:32} can't be built: {type(error).__name__}: {error}")
            continue
        if errors is None:
            continue
        checked += 1
        bad = max(errors) > LIMIT
        failed += bad
        print(f"{path.stem:32} " + " ".join(f"{error:9.1e}" for error in errors) + ("  ABOVE 2e-5" if bad else ""))
    print(f"{checked} cases, {failed} failed, limit {LIMIT:.0e}")
    return 1 if failed or not checked else 0


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python tests/golden/check.py DIR")
    sys.exit(main(sys.argv[1]))
