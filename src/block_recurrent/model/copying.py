"""Initial weights with which a model can copy from the first update on: `ModelConfig.copy_init`.

Text repeats itself, and most of the value of a memory is in these repetitions: a token that followed the current one
before is likely to follow it again. From random weights, a small model needs millions of tokens to learn this. These
weights start with it; all others are random as usual (docs/evidence.md has the effect):

- a head of the first layer attends to the previous token, and writes an image of it into the residual stream;
- in each layer above, an induction head: its keys see that image, its queries see the current token itself, so that a
  query finds the positions after earlier occurrences of the same token; its values and its part of the output map copy
  the tokens there. In a layer with a memory all heads do so; without one, in the layer at three quarters of the stack;
- the state of a recurrent layer is a table that tokens are hashed into. A state vector collects the tokens whose keys
  are near the vector's address, and is found by queries near that address; half of its channels hold addresses, and
  the other half what was collected.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from block_recurrent.model.cell import RecurrentCell
    from block_recurrent.model.language_model import BlockRecurrentLM
    from block_recurrent.model.layer import Layer

PREVIOUS_BIAS = 1.0  # of the first head at distance 1; times the scale, so that the head sees little else
IMAGE_GAIN = 2.0  # of the image of the previous token, over the present token that it lies on
SELF_GAIN = 0.1  # of what a state vector takes from the other state vectors
INDUCTION_HEAD = 1


@torch.no_grad()
def start_copying(model: BlockRecurrentLM) -> None:
    """Set the weights described above; the others stay as they are."""
    config = model.config
    D, H, K = config.d_model, config.num_heads, config.head_dim
    image, seen, copied = (orthogonal(D) for _ in range(3))
    image, seen = image[:, :K], seen[:K]  # (D, K): where images lie; (K, D): what an image shows of a token
    layers = cast("list[Layer]", list(model.layers))
    first, *above = layers
    _see_previous(first, image, seen)
    all_heads = config.recurrent_layers or config.memory_layers or (round(3 * config.num_layers / 4),)
    for number, layer in enumerate(above, 2):
        for head in range(H) if number in all_heads else [INDUCTION_HEAD % H]:
            part = (number + head) % max(1, D // K) * K  # so that layers and heads copy different parts of a token
            _copy(layer, slice(head * K, (head + 1) * K), image, seen, copied[part : part + K])
    for layer in layers:
        if layer.to_state_queries is not None:
            HK = H * K
            layer.to_state_queries.weight.copy_(layer.to_queries.weight)
            layer.project.weight[:, HK:] = layer.project.weight[:, :HK]
        if layer.cell is not None:
            _hash_tokens(layer.cell)


def orthogonal(size: int) -> Tensor:
    """A random orthogonal matrix."""
    return torch.linalg.qr(torch.randn(size, size))[0]


def _see_previous(layer: Layer, image: Tensor, seen: Tensor) -> None:
    K = len(seen)
    if layer.position_bias is not None:
        layer.position_bias.table[0] = 0
        layer.position_bias.table[0, 1] = PREVIOUS_BIAS
    layer.to_values.weight[:K] = IMAGE_GAIN * seen
    layer.project.weight[:, :K] = image


def _copy(layer: Layer, head: slice, image: Tensor, seen: Tensor, copied: Tensor) -> None:
    turn = orthogonal(len(seen))  # heads differ in it, so that their hashes do
    layer.to_keys.weight[head] = turn @ image.T
    layer.to_queries.weight[head] = turn @ seen
    layer.to_values.weight[head] = copied
    layer.project.weight[:, head] = copied.T


def _hash_tokens(cell: RecurrentCell) -> None:
    D, HK = cell.state_ids.shape[1], cell.to_keys.weight.shape[0]
    half = D // 2
    cell.state_ids[:, :half] = 0
    cell.to_keys.weight[:, :half] = 0
    cell.to_keys.weight[:, half:] = torch.randn(HK, D - half) / (D - half) ** 0.5
    cell.to_token_queries.weight.copy_(cell.to_keys.weight)
    gate = getattr(cell.update, "attention_gate", None)
    if gate is None:  # the tokens that were found go through an MLP of random weights
        return
    collected = orthogonal(max(half, HK))[:half, :HK]
    cell.to_values.weight.zero_()
    cell.to_values.weight[:, :half] = collected.T
    map: nn.Linear = gate.candidate.map
    map.weight[:, :HK] *= SELF_GAIN
    map.weight[:, HK:] = 0
    map.weight[:half, HK:] = collected
