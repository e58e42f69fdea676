"""The language model: `logits, memory = model(tokens, memory, starts)`.

Shape letters: B lanes, N tokens of the call, W window, T blocks, D width, V vocabulary, H heads,
K head size, S states.
"""

from __future__ import annotations

import hashlib
import math
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from block_recurrent.config import ModelConfig
from block_recurrent.errors import MemoryMismatchError
from block_recurrent.model import checks
from block_recurrent.model.blocks import BlockGrid, is_real
from block_recurrent.model.cell import RecurrentCell
from block_recurrent.model.copying import start_copying
from block_recurrent.model.layer import Layer, TokenWeights
from block_recurrent.model.memory import DocumentMemory, LayerMemory
from block_recurrent.model.memory_file import hash_tensors
from block_recurrent.nn.linear import normal
from block_recurrent.nn.norm import RMSNorm
from block_recurrent.ops import StateView, cross_entropy, on_device
from block_recurrent.ops.precision import product_dtype


class Loss(NamedTuple):
    """Result of `BlockRecurrentLM.loss`."""

    sum: Tensor
    """Cross-entropy in nats, summed over the tokens that count; float32, with gradient."""
    count: Tensor  # type: ignore[assignment]  # hides tuple.count, which is not needed
    """The number of tokens that count; float32."""
    memory: DocumentMemory
    """The next memory."""
    per_token: Tensor
    """(B, N) nats of every token, whether it counts or not; float32, without gradient."""


class BlockRecurrentLM(nn.Module):
    """A language model: any system of the paper, by its configuration. The memory is a value, not part of the model."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.embedding.weight = normal(config.vocab_size, config.d_model, deviation=1.0)
        self.layers = nn.ModuleList(Layer(config, number) for number in range(1, config.num_layers + 1))
        self.final_norm = RMSNorm(config.d_model)
        if config.copy_init:
            start_copying(self)

    def forward(
        self,
        tokens: Tensor,
        memory: DocumentMemory | None = None,
        starts: Tensor | None = None,
        lengths: Tensor | None = None,
    ) -> tuple[Tensor, DocumentMemory]:
        """Compute the logits (B, N, V) of the next tokens, and the memory after these tokens.

        Args:
            tokens: (B, N) integers, for any N.
            memory: the memory returned by the previous call; None is an empty one.
            starts: (B,) booleans, the lanes whose document begins with this call; their memory is reset.
            lengths: (B,) integers, the tokens of each lane that are not padding; default: all.
        """
        hidden, memory = self.hidden(tokens, memory, starts, lengths)
        return hidden @ self.embedding.weight.T, memory

    def hidden(
        self,
        tokens: Tensor,
        memory: DocumentMemory | None = None,
        starts: Tensor | None = None,
        lengths: Tensor | None = None,
    ) -> tuple[Tensor, DocumentMemory]:
        """Like `forward`, but return the vectors (B, N, D) whose products with the embeddings are the logits."""
        memory, grid = self._enter(tokens, memory, starts, lengths)
        run = self._block_by_block if self.config.feedback else self._stack
        x, layers = run(self.embedding(tokens.long()), memory.layers, grid)
        x = self.final_norm(x, self.config.dropout if self.training else 0.0) / math.sqrt(self.config.d_model)
        tokens_read = memory.tokens_read + torch.tensor(grid.lengths)
        return x, DocumentMemory(layers, tokens_read, self.config, maker=weakref.ref(self))

    def _stack(
        self,
        x: Tensor,
        memories: Sequence[LayerMemory],
        grid: BlockGrid,
        weights: Sequence[TokenWeights] | None = None,
    ) -> tuple[Tensor, Sequence[LayerMemory]]:
        """All layers over all tokens of the call at once. `weights`: those of each layer in block feedback."""
        after = []
        nothing = [None] * len(self.layers)
        views = nothing if weights is None else self._feedback_views(memories, weights)
        for layer, memory, view, own in zip(self.layers, memories, views, weights or nothing, strict=True):
            x, memory = layer(x, memory, grid, view, own)
            after.append(memory)
        return x, tuple(after)

    def _block_by_block(
        self, x: Tensor, memories: Sequence[LayerMemory], grid: BlockGrid
    ) -> tuple[Tensor, Sequence[LayerMemory]]:
        """Block feedback: the whole stack on block 1, then on block 2; gradients flow between them."""
        pieces, parts = grid.pieces(), []
        weights = zip(*(cast(Layer, layer).weights().for_blocks(len(pieces)) for layer in self.layers), strict=True)
        for piece, own in zip(pieces, weights, strict=True):
            y, memories = self._stack(piece.of(x), memories, piece.grid, own)
            parts.append(y)
        return grid.join(parts), memories

    def _feedback_views(
        self, memories: Sequence[LayerMemory], weights: Sequence[TokenWeights]
    ) -> Sequence[StateView | None]:
        """The state that each layer reads in block feedback: a recurrent layer its own, the others the highest one."""
        own = {index: cell.view(state, weights[index].state) for index, cell, state in self._cells(memories)}
        readers = [index if index in own else max(own) for index in range(len(memories))]
        views = {index: iter(view.for_readers(readers.count(index))) for index, view in own.items()}
        return [next(views[index]) for index in readers]

    def _cells(self, memories: Sequence[LayerMemory]) -> Iterator[tuple[int, RecurrentCell, Tensor]]:
        """Index, cell and current state of every recurrent layer."""
        for index, (layer, memory) in enumerate(zip(self.layers, memories, strict=True)):
            if isinstance(layer.cell, RecurrentCell) and memory.state is not None:
                yield index, layer.cell, memory.state

    def loss(
        self,
        tokens: Tensor,
        targets: Tensor,
        memory: DocumentMemory | None = None,
        starts: Tensor | None = None,
        mask: Tensor | None = None,
        lengths: Tensor | None = None,
    ) -> Loss:
        """Compute the cross-entropy of the targets, without storing all logits.

        Args:
            tokens: as in `forward`, like `memory`, `starts` and `lengths`.
            targets: (B, N) integers, the token that follows each of `tokens`.
            mask: (B, N) booleans, the targets that count; default: all that are not padding.
        """
        checks.check_tokens(targets, self.config.vocab_size, self.embedding.weight.device, "targets")
        checks.check_same_shape(targets, tokens, "targets", (targets.dtype,))
        if mask is None:
            real = checks.lengths_of(lengths, *targets.shape)
            mask = is_real(real, targets.shape[1], targets.device)
        checks.check_same_shape(mask, tokens, "mask", (torch.bool,))
        hidden, memory = self.hidden(tokens, memory, starts, lengths)
        total, per_token = cross_entropy(
            hidden.flatten(0, 1), self.embedding.weight, targets.flatten().long(), mask.flatten()
        )
        return Loss(total.float(), mask.sum().float(), memory, per_token.view(targets.shape).float())

    def fingerprint(self) -> str:
        """SHA-256 of the model's shape and weights, which identifies the memories of a model."""
        shape = hashlib.sha256(self.config.shape_json().encode()).hexdigest()
        return hashlib.sha256((shape + hash_tensors(dict(self.named_parameters()))).encode()).hexdigest()

    def _enter(
        self, tokens: Tensor, memory: DocumentMemory | None, starts: Tensor | None, lengths: Tensor | None
    ) -> tuple[DocumentMemory, BlockGrid]:
        """The memory, with lanes that start a document reset, and where its lanes stand."""
        weight = self.embedding.weight
        checks.check_tokens(tokens, self.config.vocab_size, weight.device)
        lanes, num_tokens = tokens.shape
        starting = checks.starts_of(starts, lanes)
        if memory is None:
            memory = DocumentMemory.empty(self.config, lanes, weight.device, weight.dtype, product_dtype(weight))
        memory = self.ready(memory, lanes, starting)
        offsets = tuple((memory.tokens_read % self.config.window).tolist())
        grid = BlockGrid(self.config.window, offsets, checks.lengths_of(lengths, lanes, num_tokens), num_tokens)
        return memory, grid

    def ready(self, memory: DocumentMemory, lanes: int, starts: Sequence[bool] = ()) -> DocumentMemory:
        """A memory as the layers take it: checked, and with the learned initial state of lanes that begin."""
        self._check_memory(memory, lanes)
        memory = (memory.for_autograd() if torch.is_grad_enabled() else memory).restart(starts)
        # In training, initial states are part of every call: all processes must use the same parameters.
        if not (self.training or any(memory.fresh)):
            return memory
        fresh = on_device(memory.fresh, memory.device)[:, None, None]
        layers = list(memory.layers)
        for index, cell, state in self._cells(memory.layers):
            layers[index] = replace(layers[index], state=torch.where(fresh, cell.fresh_state(memory.lanes), state))
        return replace(memory, layers=tuple(layers))

    def _check_memory(self, memory: DocumentMemory, lanes: int) -> None:
        if not isinstance(memory, DocumentMemory):
            raise MemoryMismatchError(f"memory is a {type(memory).__name__}: it must be a DocumentMemory or None")
        memory.check_same_shape(self.config, "this one")
        if memory.lanes != lanes:
            raise MemoryMismatchError(
                f"the memory has {memory.lanes} lanes, tokens has {lanes}: they must be the same; "
                "select lanes with memory.select, or concatenate memories with DocumentMemory.cat"
            )
        weight = self.embedding.weight
        if memory.device != weight.device or memory.dtype not in (weight.dtype, product_dtype(weight)):
            mine = f"{self.embedding.weight.dtype} on {self.embedding.weight.device}"
            raise MemoryMismatchError(
                f"the memory is {memory.dtype} on {memory.device}, the model {mine}: use memory.to(device, dtype)"
            )
        if memory.unused or memory.origin() is self:
            return
        theirs, mine = memory.maker_fingerprint(), self.fingerprint()
        if theirs != mine:
            raise MemoryMismatchError(
                f"this memory belongs to another model: it was made with weights {str(theirs)[:12]}, this model has "
                f"{mine[:12]}; a memory can be used only with the weights that made it"
            )
