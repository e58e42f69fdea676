"""`DocumentMemory`: everything that a model keeps of the documents it has read, as a value.

It is the input of a call, which returns a new one; nothing is changed in place. Its size does not depend on the length
that was read. Lane b of the batch reads one document; its memory is

- per layer, the keys and values of the last W tokens (2W in a recurrent layer: its state is updated at block ends, from
  the block and the one before, so the open block and the one before it must be available);
- per recurrent layer, the state at the start of the open block;
- per memorizing layer, past keys and values (`KNNMemory`);
- the number of tokens it has read, which determines the position in the open block.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from block_recurrent.config import ModelConfig
from block_recurrent.errors import InputError, MemoryMismatchError
from block_recurrent.model.knn_memory import KNNMemory, room_to_spare
from block_recurrent.ops import on_device

if TYPE_CHECKING:
    from block_recurrent.model.language_model import BlockRecurrentLM


@dataclass(frozen=True, eq=False)
class LayerMemory:
    """The memory of one layer. `keys` and `values` (B, H, C, K), newest last; `state` (B, S, D)."""

    keys: Tensor
    values: Tensor
    state: Tensor | None = None
    knn: KNNMemory | None = None

    def map(self, change: Callable[[Tensor], Tensor], change_knn: Callable[[KNNMemory], KNNMemory]) -> LayerMemory:
        """The same with every tensor changed."""
        state = None if self.state is None else change(self.state)
        knn = None if self.knn is None else change_knn(self.knn)
        return LayerMemory(change(self.keys), change(self.values), state, knn)

    def named_tensors(self) -> dict[str, Tensor]:
        """Every tensor by name, for comparison and saving."""
        named = {"keys": self.keys, "values": self.values}
        if self.state is not None:
            named["state"] = self.state
        if self.knn is not None:  # under the names that memory files have
            named["recall_keys"], named["recall_values"] = self.knn.tensors()
        return named


@dataclass(frozen=True, eq=False)
class DocumentMemory:
    """The memory of B lanes, as a value. Create one with `empty` or `load`; each call of a model returns the next."""

    layers: Sequence[LayerMemory]
    tokens_read: Tensor  # (B,) int64, on the CPU: number of tokens of its document that each lane has read
    config: ModelConfig  # the model's configuration; a memory can be used by models of the same shape
    maker: weakref.ref[BlockRecurrentLM] | None = None  # the model that made it, if known
    fingerprint: str | None = None  # hash of that model's shape and weights, if the memory was loaded from a file

    @classmethod
    def empty(
        cls,
        config: ModelConfig,
        lanes: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        cache_dtype: torch.dtype | None = None,
    ) -> DocumentMemory:
        """Create an empty memory. The model sets its learned initial state at the next call.

        Args:
            config: the configuration of the model.
            lanes: the number of documents read in parallel.
            device: where the memory is stored; default: torch's default device.
            dtype: of the states; default: torch's default dtype.
            cache_dtype: of keys and values, if it differs from that of the states.
        """
        if not isinstance(lanes, int) or isinstance(lanes, bool) or lanes < 1:
            raise InputError(f"lanes is {lanes!r}: a memory has at least 1 lane")
        like = torch.empty(0, device=device, dtype=dtype)
        H, K, W = config.num_heads, config.head_dim, config.window
        spare = room_to_spare(config)
        layers = []
        for number in range(1, config.num_layers + 1):
            recurrent, memorizing = number in config.recurrent_layers, number in config.memory_layers
            cached = 2 * W if recurrent else W
            layers.append(
                LayerMemory(
                    keys=like.new_zeros(lanes, H, cached, K, dtype=cache_dtype),
                    values=like.new_zeros(lanes, H, cached, K, dtype=cache_dtype),
                    state=like.new_zeros(lanes, config.num_states, config.d_model) if recurrent else None,
                    knn=KNNMemory.empty((lanes, H, config.memory_size, K), spare, like) if memorizing else None,
                )
            )
        return cls(tuple(layers), torch.zeros(lanes, dtype=torch.int64), config)

    def __repr__(self) -> str:
        read = self.tokens_read.tolist()
        shown = str(read) if len(read) <= 4 else f"[{', '.join(map(str, read[:3]))}, ...]"
        lanes = f"{self.lanes} lane{'s' * (self.lanes != 1)}"
        return (
            f"DocumentMemory({lanes}, tokens_read={shown}, {self.nbytes / 2**20:.2f} MiB, {self.dtype}, {self.device})"
        )

    def __getstate__(self) -> dict[str, Any]:
        """For pickle and deepcopy: the values alone, with the hash of the model's weights in place of the model."""
        return vars(self.detach()) | {"maker": None, "fingerprint": self.maker_fingerprint()}

    @property
    def lanes(self) -> int:
        return len(self.tokens_read)

    @property
    def device(self) -> torch.device:
        return self.layers[0].keys.device

    @property
    def dtype(self) -> torch.dtype:
        return self.layers[0].keys.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of all lanes, regardless of the length that was read."""
        total = 0
        for layer in self.layers:
            held = [layer.keys, layer.values] + ([] if layer.state is None else [layer.state])
            total += sum(x.numel() * x.element_size() for x in held)
            total += 0 if layer.knn is None else layer.knn.nbytes
        return total

    @property
    def fresh(self) -> list[bool]:
        """Lanes that have read nothing: their state is the learned initial one, regardless of what is stored."""
        return [count == 0 for count in self.tokens_read.tolist()]

    def named_tensors(self) -> dict[str, Tensor]:
        """Every tensor by layer and name, under the names that memory files have."""
        named = [(f"layers.{i}", layer.named_tensors()) for i, layer in enumerate(self.layers)]
        return {f"{layer}.{name}": x for layer, tensors in named for name, x in tensors.items()}

    def detach(self) -> DocumentMemory:
        """Detach from the graph: gradients stop here."""
        return self._map(lambda x: x.detach().contiguous(), lambda knn: knn)

    def for_autograd(self) -> DocumentMemory:
        """The same in tensors for autograd: those made in inference mode are copied."""
        if not self.layers[0].keys.is_inference():
            return self
        return self._map(lambda x: x.clone(), lambda knn: knn)

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> DocumentMemory:
        """Move to another device or dtype."""
        return self._map(lambda x: x.to(device=device, dtype=dtype), lambda knn: knn.to(device, dtype))

    def select(self, lanes: Sequence[int]) -> DocumentMemory:
        """Select lanes by index, in that order, possibly with repetitions."""
        lanes = lanes.tolist() if isinstance(lanes, Tensor) else list(lanes)
        if not lanes or any(isinstance(lane, bool) or lane not in range(self.lanes) for lane in lanes):
            raise InputError(f"lanes {lanes} can't be selected: give at least one, each from 0 to {self.lanes - 1}")
        selected = self._map(lambda x: x[lanes], lambda knn: knn.select(lanes))
        return replace(selected, tokens_read=self.tokens_read[lanes])

    @staticmethod
    def cat(memories: Sequence[DocumentMemory]) -> DocumentMemory:
        """Concatenate the lanes of several memories of one model."""
        if not memories:
            raise InputError("nothing to concatenate: give at least one memory")
        first = memories[0]
        for other in memories[1:]:
            first.check_same_shape(other.config, "the first memory")
        used = [memory for memory in memories if not memory.unused]
        one_origin = all((m.maker, m.fingerprint) == (used[0].maker, used[0].fingerprint) for m in used)
        if not one_origin and len({memory.maker_fingerprint() for memory in used}) > 1:
            raise MemoryMismatchError("these memories were made by different models and can't be concatenated")
        layers = tuple(_cat_layers([memory.layers[i] for memory in memories]) for i in range(len(first.layers)))
        known = used[0] if used else first
        return replace(known, layers=layers, tokens_read=torch.cat([memory.tokens_read for memory in memories]))

    def restart(self, lanes: Sequence[bool]) -> DocumentMemory:
        """Reset the marked lanes to an empty memory; others are unchanged."""
        if not any(lanes):
            return self
        marked = torch.tensor(lanes)
        gone = on_device(marked, self.device)[:, None, None, None]
        layers = [
            LayerMemory(
                layer.keys.masked_fill(gone, 0),
                layer.values.masked_fill(gone, 0),
                layer.state,
                layer.knn and layer.knn.reset(lanes),
            )
            for layer in self.layers
        ]
        return replace(self, layers=tuple(layers), tokens_read=self.tokens_read.masked_fill(marked, 0))

    def difference(self, other: DocumentMemory) -> float:
        """The largest difference of any value in the two memories; infinite if they have read different lengths."""
        self.check_same_shape(other.config, "the other memory")
        if self.tokens_read.tolist() != other.tokens_read.tolist():
            return float("inf")
        read = torch.tensor([not fresh for fresh in self.fresh])
        largest = 0.0
        for mine, theirs in zip(self.layers, other.layers, strict=True):
            named = theirs.named_tensors()
            for name, x in mine.named_tensors().items():
                if read.any():
                    gap = (x[read.to(x.device)].double() - named[name].to(x.device)[read.to(x.device)].double()).abs()
                    largest = max(largest, gap.max().item() if not gap.isnan().any() else float("inf"))
        return largest

    def equals(self, other: DocumentMemory, tolerance: float = 0.0) -> bool:
        """Whether the two have read the same number of tokens and have equal values within a tolerance."""
        return self.lanes == other.lanes and self.difference(other) <= tolerance

    def save(self, path: str | Path) -> None:
        """Write a safetensors file, atomically; see `memory_file`."""
        from block_recurrent.model.memory_file import save_memory

        save_memory(self, Path(path))

    @staticmethod
    def load(path: str | Path) -> DocumentMemory:
        """Load a file written by `save`. A model that uses the memory checks that it made it."""
        from block_recurrent.model.memory_file import load_memory

        return load_memory(Path(path))

    def check_same_shape(self, config: ModelConfig, whose: str) -> None:
        """Raise an error that names the differences, unless `config` has the shape of this memory's model."""
        if config is self.config or config.shape_json() == self.config.shape_json():
            return
        mine, theirs = self.config.to_dict(), config.to_dict()
        different = [f"{key} {mine[key]} against {theirs[key]}" for key in mine if mine[key] != theirs[key]]
        raise MemoryMismatchError(
            f"this memory belongs to a model of another shape than {whose}: {', '.join(different)}; "
            "a memory can be used only with the model that made it"
        )

    def adopted_by(self, model: BlockRecurrentLM) -> DocumentMemory:
        """Mark the memory as made by `model`, without a check."""
        return replace(self, config=model.config, maker=weakref.ref(model), fingerprint=None)

    @property
    def unused(self) -> bool:
        """Whether no model has used it yet: it can be used by every model of its shape."""
        return self.maker is None and self.fingerprint is None

    def origin(self) -> BlockRecurrentLM | str | None:
        """The model that made this memory (None if it was deleted), or its fingerprint if the memory was loaded."""
        return self.fingerprint if self.maker is None else self.maker()

    def maker_fingerprint(self) -> str | None:
        """Hash of the weights of the model that made this memory; None if no model has used it yet."""
        if self.maker is None:
            return self.fingerprint
        model = self.maker()
        if model is None:
            raise MemoryMismatchError(
                "the model that made this memory was deleted, so the memory can't be identified: "
                "keep the model as long as its memories, or save them before deleting it"
            )
        return model.fingerprint()

    def _map(self, change: Callable[[Tensor], Tensor], change_knn: Callable[[KNNMemory], KNNMemory]) -> DocumentMemory:
        return replace(self, layers=tuple(layer.map(change, change_knn) for layer in self.layers))


def _cat_layers(layers: Sequence[LayerMemory]) -> LayerMemory:
    states = [layer.state for layer in layers if layer.state is not None]
    knns = [layer.knn for layer in layers if layer.knn is not None]
    return LayerMemory(
        torch.cat([layer.keys for layer in layers]),
        torch.cat([layer.values for layer in layers]),
        torch.cat(states) if states else None,
        KNNMemory.cat(knns) if knns else None,
    )
