"""The models that `brt bench peers` and `brt bench write` compare, all with the same width, depth and heads."""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from block_recurrent.config import ModelConfig
from block_recurrent.errors import MissingExtraError

WIDTH, DEPTH, HEADS, HEAD_SIZE, VOCABULARY = 512, 12, 8, 64, 256
RECURRENT_LAYER = 6
MEMORIES, NEIGHBORS = 8192, 32


@dataclass(frozen=True)
class Setting:
    """Settings that the models of one comparison share. The number of states equals the window."""

    window: int
    segment: int = 2048
    memorizing: bool = False

    @property
    def steps_before(self) -> int:
        """Number of warm-up steps, until the kNN memory is full."""
        return MEMORIES // self.segment if self.memorizing else 1


def our_config(setting: Setting) -> ModelConfig:
    """rec-fixed-skip, or memorizing, at the dimensions of the comparison; no dropout, as the others have none."""
    return ModelConfig(
        vocab_size=VOCABULARY,
        d_model=WIDTH,
        num_layers=DEPTH,
        num_heads=HEADS,
        head_dim=HEAD_SIZE,
        mlp_dim=4 * WIDTH,
        window=setting.window,
        segment=setting.segment,
        recurrent_layers=() if setting.memorizing else (RECURRENT_LAYER,),
        num_states=setting.window,
        memory_layers=(9,) if setting.memorizing else (),
        memory_size=MEMORIES,
        memory_neighbors=NEIGHBORS,
        dropout=0.0,
        attention_dropout=0.0,
    )


class Step:
    """One training step: `loss()` forward and backward, then Adam."""

    def __init__(self, model: Any, setting: Setting) -> None:
        import torch

        torch.manual_seed(0)
        self.model = model.train()
        self.optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
        self.tokens = torch.randint(0, VOCABULARY, (1, setting.segment + 1))

    def __call__(self) -> None:
        self.loss().backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def loss(self) -> Any:
        raise NotImplementedError

    def cross_entropy(self, logits: Any) -> Any:
        from torch.nn import functional as F

        return F.cross_entropy(logits.flatten(0, 1), self.tokens[:, 1:].flatten())


class OurStep(Step):
    def __init__(self, setting: Setting) -> None:
        from block_recurrent.model.language_model import BlockRecurrentLM

        super().__init__(BlockRecurrentLM(our_config(setting)), setting)
        self.memory: Any = None

    def loss(self) -> Any:
        loss = self.model.loss(self.tokens[:, :-1], self.tokens[:, 1:], self.memory)
        self.memory = loss.memory.detach()
        return loss.sum / loss.count


class PeerStep(Step):
    """block-recurrent-transformer-pytorch, with its memories and states carried."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(peer_model(setting), setting)
        self.carried: dict[str, Any] = {}

    def loss(self) -> Any:
        loss, memories, states = self.model(self.tokens, return_loss=True, **self.carried)
        self.carried = {"xl_memories": memories, "states": states}
        return loss


def peer_model(setting: Setting) -> Any:
    package = import_extra("block_recurrent_transformer_pytorch", "peers")
    return package.BlockRecurrentTransformer(
        num_tokens=VOCABULARY,
        dim=WIDTH,
        depth=DEPTH,
        dim_head=HEAD_SIZE,
        heads=HEADS,
        max_seq_len=setting.segment,
        block_width=setting.window,
        num_state_vectors=setting.window,
        recurrent_layers=(RECURRENT_LAYER,),
        use_flash_attn=True,
    )


class MemorizingPeerStep(Step):
    """memorizing-transformers-pytorch: approximate search by faiss, one layer with memory."""

    def __init__(self, setting: Setting) -> None:
        package = import_extra("memorizing_transformers_pytorch", "peers")
        self.folder = tempfile.TemporaryDirectory()  # it stores its memories in files
        model = package.MemorizingTransformer(
            num_tokens=VOCABULARY,
            dim=WIDTH,
            depth=DEPTH,
            dim_head=HEAD_SIZE,
            heads=HEADS,
            memorizing_layers=9,
            knn_memories_directory=self.folder.name,
            max_knn_memories=MEMORIES,
            num_retrieved_memories=NEIGHBORS,
            xl_max_memories=setting.window,
            xl_memory_layers=tuple(range(1, DEPTH + 1)),
        )
        super().__init__(model, setting)
        self.memories = model.create_knn_memories(batch_size=1)
        self.recent: Any = None

    def loss(self) -> Any:
        logits, self.recent = self.model(self.tokens[:, :-1], knn_memories=self.memories, xl_memories=self.recent)
        return self.cross_entropy(logits)


class FullAttentionStep(Step):
    """This package's layers with attention over the whole segment."""

    def __init__(self, setting: Setting) -> None:
        from block_recurrent.bench.full_attention import FullAttentionLM

        super().__init__(FullAttentionLM(our_config(setting)), setting)

    def loss(self) -> Any:
        return self.model.loss(self.tokens[:, :-1], self.tokens[:, 1:])


class GPT2Step(Step):
    """GPT-2 of transformers, same width and depth."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(gpt2_model(setting.segment), setting)

    def loss(self) -> Any:
        return self.cross_entropy(self.model(self.tokens[:, :-1], use_cache=False).logits)


def gpt2_model(positions: int) -> Any:
    transformers = import_extra("transformers", "hf")
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=WIDTH,
        n_layer=DEPTH,
        n_head=HEADS,
        n_positions=positions,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        resid_pdrop=0.0,
    )
    return transformers.GPT2LMHeadModel(config)


def import_extra(module: str, extra: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        if error.name != module:
            raise  # it is installed, but a dependency is missing
        raise MissingExtraError(f"the comparison with {module.replace('_', '-')}", extra) from None


CONTENDERS: dict[str, Callable[[Setting], Step]] = {
    "block-recurrent": OurStep,
    "block-recurrent-transformer-pytorch": PeerStep,
    "memorizing-transformers-pytorch": MemorizingPeerStep,
    "full-attention": FullAttentionStep,
    "gpt2": GPT2Step,
}
