"""Weights in 8 bits, for writing on a CPU: a token costs the reading of all weights, and these are a quarter as large.

Every output row of a matrix has one scale: `weight = q * scale`, q a whole number from -127 to 127. What is quantised
are the maps that every token goes through and the output table; embeddings, norms, biases and the recurrent cell, which
works once a block, stay as they are. Inputs and outputs of a quantised map are rounded to bfloat16, sums are float32:
this is how torch's `_weight_int8pack_mm` is fast. It is not for many rows; those get the same numbers by a product
with the unpacked matrix, so that reading and writing go on computing the same function.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from block_recurrent.errors import ConfigError
from block_recurrent.model.language_model import BlockRecurrentLM
from block_recurrent.model.loss import CrossEntropy

FEW_ROWS = 16
"""Up to so many rows, the packed product is faster than unpacking the matrix."""
WIDTH_STEP = 32
"""torch's kernel reads whole vectors of numbers, past the end of a row whose width is no multiple of this."""
LARGEST = 127
LOGITS_AT_ONCE = 2**22


class Int8Linear(nn.Module):
    """A linear map without bias whose matrix is held in 8 bits."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        scale = (weight.detach().float().abs().amax(1) / LARGEST).clamp_min(torch.finfo(torch.float32).tiny)
        scale = scale.bfloat16()
        q = (weight.detach().float() / scale.float()[:, None]).round_().clamp_(-LARGEST, LARGEST)
        self.padding = -weight.shape[1] % WIDTH_STEP
        q = F.pad(q, (0, self.padding))
        # As parameters, so that they are part of the model's fingerprint; they are not trained.
        self.weight = nn.Parameter(q.to(torch.int8).contiguous(), requires_grad=False)
        self.scale = nn.Parameter(scale, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        rows = F.pad(x.flatten(0, -2), (0, self.padding)).bfloat16()
        if 0 < len(rows) <= FEW_ROWS:
            out = torch.ops.aten._weight_int8pack_mm(rows, self.weight, self.scale)
        else:
            # Scaled after the product, as the packed one does.
            out = ((rows.float() @ self.weight.float().T) * self.scale.float()).bfloat16()
        return out.to(x.dtype).unflatten(0, x.shape[:-1])


class Int8LM(BlockRecurrentLM):
    """The same model with 8-bit weights. Made by `quantize`; for reading and writing, not for training."""

    output: Int8Linear

    def _logits(self, hidden: Tensor) -> Tensor:
        return self.output(hidden)

    def _cross_entropy(self, hidden: Tensor, targets: Tensor, counts: Tensor) -> CrossEntropy:
        chunk = max(1, LOGITS_AT_ONCE // self.config.vocab_size)
        parts = zip(hidden.split(chunk), targets.split(chunk), strict=True)
        per_token = torch.cat(
            [F.cross_entropy(self.output(x).float(), wanted, reduction="none") for x, wanted in parts]
        )
        return CrossEntropy(per_token[counts].sum(), per_token)


def quantize(model: BlockRecurrentLM) -> Int8LM:
    """A model with 8-bit weights, for inference; the given one stays as it is, and what isn't quantised is shared."""
    weight = model.embedding.weight
    if weight.device.type != "cpu" or weight.dtype != torch.float32:
        raise ConfigError(
            f"the model is {weight.dtype} on {weight.device}: 8-bit weights are made from float32 and used on a CPU"
        )
    with torch.device("meta"):
        small = Int8LM(model.config)
    small.load_state_dict(model.state_dict(), assign=True)
    for layer in small.layers:
        for name, module in list(layer.named_modules()):
            if isinstance(module, nn.Linear) and not name.startswith("cell."):
                parent, _, last = name.rpartition(".")
                setattr(layer.get_submodule(parent), last, Int8Linear(module.weight))
    small.output = Int8Linear(model.embedding.weight)
    return small.requires_grad_(False).eval()
