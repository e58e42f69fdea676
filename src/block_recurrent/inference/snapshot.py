"""A snapshot of a model's weights, in the precision and layout for decoding.

In bfloat16 and int8, the matrices that every token is multiplied with and the output table are packed. Norms, biases,
scales and the recurrent cell, which runs once per block, are not. An int8 matrix has one scale per output row:
`weight = packed * scale`. Products of many rows, as in prefill, widen a matrix for the call; decoding widens it in
registers. Both compute the same function, except for the rounding of the decoder's caches.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from block_recurrent.allocator import huge_pages
from block_recurrent.errors import ConfigError, did_you_mean
from block_recurrent.model.language_model import BlockRecurrentLM
from block_recurrent.model.layer import Layer
from block_recurrent.model.memory import DocumentMemory
from block_recurrent.ops import is_changed

WEIGHTS = ("float32", "bfloat16", "int8")
LARGEST = 127
ALIGNMENT = 64


class Packed(NamedTuple):
    """A matrix (out, in), row after row."""

    weight: Tensor
    scale: Tensor | None = None
    """(out,), for int8."""

    @classmethod
    def of(cls, weight: Tensor, weights: str) -> Packed:
        weight = weight.detach()
        if weights == "float32":
            return cls(weight.contiguous())
        if weights == "bfloat16":
            return cls(weight.to(torch.bfloat16).contiguous())
        scale = (weight.float().abs().amax(1) / LARGEST).clamp_min(torch.finfo(torch.float32).tiny)
        return cls((weight.float() / scale[:, None]).round_().to(torch.int8).contiguous(), scale)

    def widened(self, dtype: torch.dtype) -> Tensor:
        wide = self.weight.to(dtype)
        return wide if self.scale is None else wide * self.scale.to(dtype)[:, None]

    def split(self, rows: int) -> list[Packed]:
        scales = [None] * (len(self.weight) // rows) if self.scale is None else self.scale.split(rows)
        return [Packed(*part) for part in zip(self.weight.split(rows), scales, strict=True)]


class PackedLinear(nn.Module):
    """A linear map without bias whose packed matrix is widened at each call."""

    def __init__(self, packed: Packed, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        # As parameters, so that they are part of the model's fingerprint.
        self.packed = nn.Parameter(packed.weight, requires_grad=False)
        self.scale = None if packed.scale is None else nn.Parameter(packed.scale, requires_grad=False)

    @property
    def weight(self) -> Tensor:
        return Packed(self.packed, self.scale).widened(self.dtype)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class LayerWeights(NamedTuple):
    """The weights of a layer for decoding."""

    joint: Packed
    """Maps to values, keys, queries and, in recurrent layers, queries to the states: (3*H*K or 4*H*K, D)."""
    project: Packed
    hidden: Packed
    output: Packed


class Snapshot:
    """A copy of the weights: training the source does not change it."""

    def __init__(self, source: BlockRecurrentLM, weights: str) -> None:
        if weights not in WEIGHTS:
            raise ConfigError(
                f"weights is {weights!r}: it must be one of {', '.join(WEIGHTS)}{did_you_mean(str(weights), WEIGHTS)}"
            )
        self.config, self.weights = source.config, weights
        self.device, self.dtype = source.embedding.weight.device, source.embedding.weight.dtype
        self.model = _copy_of(source)
        self.is_plain = type(self.model) is BlockRecurrentLM
        """Whether the model is exactly the one of its configuration, without changes."""
        self._fingerprint: str | None = None
        if not self.is_plain:
            if weights != "float32":
                raise ConfigError(
                    f"the model was modified or is a subclass: {weights} weights need an unmodified model"
                )
            return
        kinds = sorted({f"{p.dtype} on {p.device}".removeprefix("torch.") for p in self.model.parameters()})
        if len(kinds) > 1:
            raise ConfigError(
                f"the model's weights are {', '.join(kinds)}: convert them to one dtype and device with model.to(...)"
            )
        # More than all matrices need: pages that are not written take no memory.
        size = sum(p.nbytes + ALIGNMENT for p in self.model.parameters())
        self._room = huge_pages(size) if self.device.type == "cpu" else None
        self.layers = [self._pack(layer) for layer in self.model_layers()]
        self.table = self._packed(self.model.embedding.weight)
        # Tokens are embedded and scored with the same rounded values.
        self.model.embedding.weight.data = self.table.widened(self.dtype)

    def fingerprint(self) -> str:
        """Hash of shape and weights, computed once: they never change."""
        if self._fingerprint is None:
            self._fingerprint = self.model.fingerprint()
        return self._fingerprint

    def signed(self, memory: DocumentMemory) -> DocumentMemory:
        """Mark a memory as made by these weights, by their hash: it outlives the snapshot and can be pickled."""
        return replace(memory, maker=None, fingerprint=self.fingerprint())

    def recognized(self, memory: DocumentMemory) -> DocumentMemory:
        """The memory for a call of the model, which would otherwise hash all weights to check who made it."""
        made_by = getattr(memory, "fingerprint", None)
        return memory.adopted_by(self.model) if made_by and made_by == self.fingerprint() else memory

    def model_layers(self) -> list[Layer]:
        return [cast(Layer, layer) for layer in self.model.layers]

    def logits(self, hidden: Tensor) -> Tensor:
        """(B, D), the output of `model.hidden` -> (B, V)."""
        return F.linear(hidden, self.model.embedding.weight)

    def _pack(self, layer: Layer) -> LayerWeights:
        """Change the layout of a layer's matrices; its linear maps become views of them."""
        maps = ["to_values", "to_keys", "to_queries"] + ["to_state_queries"] * (layer.to_state_queries is not None)
        joint = self._packed(torch.cat([getattr(layer, name).weight for name in maps]))
        parts = joint.split(len(joint.weight) // len(maps))
        for name, part in zip(maps, parts, strict=True):
            self._replace(layer, name, part)
        single = []
        parents: list[tuple[nn.Module, str]] = [(layer, "project"), (layer.mlp, "hidden"), (layer.mlp, "output")]
        for parent, name in parents:
            single.append(self._packed(getattr(parent, name).weight))
            self._replace(parent, name, single[-1])
        return LayerWeights(joint, *single)

    def _packed(self, weight: Tensor) -> Packed:
        packed = Packed.of(weight, self.weights)
        if self._room is None:
            return packed
        x = packed.weight
        place, self._room = self._room[: x.nbytes], self._room[-(-x.nbytes // ALIGNMENT) * ALIGNMENT :]
        return packed._replace(weight=place.view(x.dtype).view(x.shape).copy_(x))

    def _replace(self, parent: nn.Module, name: str, packed: Packed) -> None:
        if self.weights == "float32":
            getattr(parent, name).weight.data = packed.weight
        else:
            setattr(parent, name, PackedLinear(packed, self.dtype))


class _Changed(BlockRecurrentLM):
    """A model that was modified, by hooks or other modules, whatever its class."""


def _copy_of(source: BlockRecurrentLM) -> BlockRecurrentLM:
    """A copy of the model in eval mode; for a subclass or a modified one, the model itself."""
    with torch.device("meta"):
        plain = BlockRecurrentLM(source.config)
    if type(source) is BlockRecurrentLM and _parts(source) == _parts(plain):
        plain.load_state_dict({name: x.detach().clone() for name, x in source.state_dict().items()}, assign=True)
        return plain.requires_grad_(False).eval()
    changed = copy.deepcopy(source)
    if type(changed) is BlockRecurrentLM:
        changed.__class__ = _Changed
    return changed.requires_grad_(False).eval()


def _parts(model: nn.Module) -> list[tuple[Any, ...]]:
    """Every module by name and class, and whether it was changed."""
    return [(name, type(part), is_changed(part)) for name, part in model.named_modules()]
