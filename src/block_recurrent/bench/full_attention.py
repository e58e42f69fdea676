"""A dense causal transformer of this package's layers, as a baseline for window and state."""

from __future__ import annotations

import math

from torch import Tensor, nn
from torch.nn import functional as F

from block_recurrent.config import ModelConfig
from block_recurrent.nn.linear import MLP, linear, normal
from block_recurrent.nn.norm import RMSNorm
from block_recurrent.ops import cross_entropy, merge_heads, split_heads, unit_length


class FullAttentionLM(nn.Module):
    """Attention of every token to all tokens before it: no window, no position bias, no memory."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embedding = normal(config.vocab_size, config.d_model, deviation=1.0)
        self.layers = nn.ModuleList(FullAttentionLayer(config) for _ in range(config.num_layers))
        self.final_norm = RMSNorm(config.d_model)

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy, with the same chunked loss."""
        x = F.embedding(tokens, self.embedding)
        for layer in self.layers:
            x = layer(x)
        hidden = self.final_norm(x).flatten(0, 1) / math.sqrt(x.shape[-1])
        everywhere = targets.flatten() >= 0
        return cross_entropy(hidden, self.embedding, targets.flatten(), everywhere).total / targets.numel()


class FullAttentionLayer(nn.Module):
    """A token layer with SDPA's causal attention in place of the window."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        D, HK = config.d_model, config.num_heads * config.head_dim
        self.num_heads = config.num_heads
        self.attention_norm = RMSNorm(D)
        self.to_keys, self.to_values, self.to_queries = (linear(D, HK) for _ in range(3))
        self.project = linear(HK, D)
        self.mlp_norm = RMSNorm(D)
        self.mlp = MLP(D, config.mlp_dim)

    def forward(self, x: Tensor) -> Tensor:
        h = self.attention_norm(x)
        k, v, q = (split_heads(map(h), self.num_heads) for map in (self.to_keys, self.to_values, self.to_queries))
        attention = F.scaled_dot_product_attention(unit_length(q), unit_length(k), v, is_causal=True, scale=1.0)
        x = x + self.project(merge_heads(attention))
        return x + self.mlp(self.mlp_norm(x))
