"""The oracle: a reference implementation, one token of one lane at a time, in float64.

It reads the same weights as `BlockRecurrentLM` and shares no code with it; where the two differ, one of them is wrong.
It keeps whole documents: the keys and values of every token read so far, by position. So each
rule of the model is a range of positions:

    a token at t attends to                 t - W .. t - 1      (before 0: zero keys and values, not masked)
    its block begins at                     b = t - t mod W
    it reads the state as it was            at b
    that state, when the block ends,
    reads the block and the one before      b - W .. b + W - 1  (before 0: as above)
    a memory of M entries holds             b - M .. b - 1      (before 0: never written)

Letters as in docs/model.md. One vector per token (D,), one row per head (H, K), one row per state (S, D).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from block_recurrent.config import ModelConfig

Weights = Mapping[str, Tensor]


@dataclass
class Document:
    """The document of one lane. Layers are counted from 1."""

    length: int = 0
    keys: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    """(layer, position) -> (H, K), after normalization."""
    values: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    states: dict[int, Tensor] = field(default_factory=dict)  # layer -> (S, D), at the start of the open block

    def copy(self) -> Document:
        return Document(self.length, dict(self.keys), dict(self.values), dict(self.states))

    def detach(self) -> Document:
        """The same values without gradient."""
        return Document(self.length, _detach(self.keys), _detach(self.values), _detach(self.states))


def _detach(tensors: dict[Any, Tensor]) -> dict[Any, Tensor]:
    return {name: x.detach() for name, x in tensors.items()}


class Oracle:
    """`logits, documents = oracle(tokens, documents, starts)`, like the model, for any number of tokens."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        """weights: the model's parameters by name. Gradients flow back to them."""
        self.config = config
        self.weights = {name: weight.double() for name, weight in weights.items()}

    def __call__(
        self, tokens: Tensor, documents: Sequence[Document] | None = None, starts: Tensor | None = None
    ) -> tuple[Tensor, list[Document]]:
        """tokens (B, N) -> logits (B, N, V), and the documents after them."""
        logits, after = [], []
        for lane in range(len(tokens)):
            begins = documents is None or (starts is not None and bool(starts[lane]))
            out, document = self.read(tokens[lane].tolist(), Document() if begins else documents[lane])  # type: ignore[index]
            logits.append(out)
            after.append(document)
        return torch.stack(logits), after

    def read(self, tokens: Iterable[int], document: Document) -> tuple[Tensor, Document]:
        """One lane: logits (N, V) after each token. Does not change the given document."""
        document, logits = document.copy(), []
        if document.length == 0:
            document.states = {n: self._layer(n)["cell.initial_state"] for n in self.config.recurrent_layers}
        for token in tokens:
            logits.append(self._read_token(token, document))
        return torch.stack(logits) if logits else torch.zeros(0, self.config.vocab_size).double(), document

    def _read_token(self, token: int, document: Document) -> Tensor:
        """One token through the stack; at the end of a block, updates every recurrent state."""
        E, L, W = self.weights["embedding.weight"], self.config.num_layers, self.config.window
        x = E[token]
        for n in range(1, L + 1):
            x = self._token_layer(n, x, document)
        document.length += 1
        if document.length % W == 0:
            document.states = {n: self._next_state(n, document) for n in self.config.recurrent_layers}
        return E @ rmsnorm(x, self.weights["final_norm.weight"]) / self.config.d_model**0.5

    def _token_layer(self, n: int, x: Tensor, document: Document) -> Tensor:
        """Vertical direction: x (D,) through layer n."""
        config, w, t = self.config, self._layer(n), document.length
        h = rmsnorm(x, w["attention_norm.weight"])
        q = unit(self._heads(w["to_queries.weight"] @ h))
        document.keys[n, t] = unit(self._heads(w["to_keys.weight"] @ h))
        document.values[n, t] = self._heads(w["to_values.weight"] @ h)

        window = range(t - config.window, t)
        keys, values = self._tokens(n, window, document)
        if n in config.memory_layers:
            near = attention(q, keys, values, w["scale"])
            g = torch.sigmoid(w["recall_mix"])[:, None]
            heads = near * (1 - g) + self._search(n, q, w["scale"], document) * g
        else:
            bias = torch.stack([w["position_bias.table"][:, bucket(t - position)] for position in window])
            heads = attention(q, keys, values, w["scale"], bias)

        if n in config.recurrent_layers or config.feedback:
            # Block feedback: a layer without its own state reads the highest recurrent layer's.
            whose = n if n in config.recurrent_layers else max(config.recurrent_layers)
            _, ks, vs = self._state_projections(whose, document.states[whose])
            qes = unit(self._heads(w["to_state_queries.weight"] @ h))
            heads = torch.cat([heads, attention(qes, ks, vs, w["state_scale"])])

        x = x + w["project.weight"] @ heads.flatten()
        hidden = torch.relu(w["mlp.hidden.weight"] @ rmsnorm(x, w["mlp_norm.weight"]))
        return x + w["mlp.output.weight"] @ hidden

    def _search(self, n: int, q: Tensor, scale: Tensor, document: Document) -> Tensor:
        """Attention of each head over its nearest entries of the memory, which has no gradient."""
        M, neighbors = self.config.memory_size, self.config.memory_neighbors
        begin = document.length - document.length % self.config.window
        written = range(max(0, begin - M), begin)
        out = []
        for head in range(self.config.num_heads):
            keys = [document.keys[n, position][head].detach() for position in written]
            values = [document.values[n, position][head].detach() for position in written]
            nearest = sorted(range(len(written)), key=lambda i: -float(q[head].detach() @ keys[i]))[:neighbors]
            nothing = [torch.zeros(self.config.head_dim).double()] * (neighbors - len(nearest))
            k = torch.stack([keys[i] for i in nearest] + nothing)[:, None]
            v = torch.stack([values[i] for i in nearest] + nothing)[:, None]
            out.append(attention(q[head : head + 1], k, v, scale[head : head + 1])[0])
        return torch.stack(out)

    def _state_projections(self, n: int, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """u (S, D), ks and vs (S, H, K) of the states c (S, D). The IDs are added after the norm."""
        w = self._layer(n)
        u = rmsnorm(c, w["cell.norm.weight"]) + w["cell.state_ids"]
        ks = torch.stack([unit(self._heads(w["cell.to_keys.weight"] @ u_s)) for u_s in u])
        vs = torch.stack([self._heads(w["cell.to_values.weight"] @ u_s) for u_s in u])
        return u, ks, vs

    def _next_state(self, n: int, document: Document) -> Tensor:
        """Horizontal direction: the states (S, D) after the block that has just ended."""
        w, c, end = self._layer(n), document.states[n], document.length
        u, ks, vs = self._state_projections(n, c)
        keys, values = self._tokens(n, range(end - 2 * self.config.window, end), document)
        after = []
        for c_s, u_s in zip(c, u, strict=True):
            qss = unit(self._heads(w["cell.to_self_queries.weight"] @ u_s))
            qse = unit(self._heads(w["cell.to_token_queries.weight"] @ u_s))
            to_states = attention(qss, ks, vs, w["cell.self_scale"])
            to_tokens = attention(qse, keys, values, w["cell.token_scale"])
            after.append(self._update(w, torch.cat([to_states, to_tokens]).flatten(), c_s))
        return torch.stack(after)

    def _update(self, w: Weights, a: Tensor, c: Tensor) -> Tensor:
        """Update one state (D,) with its attention a (2*H*K,): dual, single or skip."""
        if self.config.gate_config == "single":
            hidden = torch.relu(w["cell.update.hidden.weight"] @ a)
            return self._gate(w, "cell.update.mlp_gate", hidden, c)
        c = self._gate(w, "cell.update.attention_gate", a, c)
        if self.config.gate_config == "skip":
            return c
        hidden = torch.relu(w["cell.update.hidden.weight"] @ rmsnorm(c, w["cell.update.mlp_norm.weight"]))
        return self._gate(w, "cell.update.mlp_gate", hidden, c)

    def _gate(self, w: Weights, name: str, h: Tensor, c: Tensor) -> Tensor:
        z = w[f"{name}.candidate.map.weight"] @ h
        if self.config.has_gate_bias:
            z = z + w[f"{name}.candidate.bias"]
        if self.config.has_gate_tanh:
            z = torch.tanh(z)
        if self.config.gate == "fixed":
            g = torch.sigmoid(w[f"{name}.bias"])
            return c * g + z * (1 - g)
        i = torch.sigmoid(w[f"{name}.input.weight"] @ h + w[f"{name}.input_bias"] - 1)
        f = torch.sigmoid(w[f"{name}.forget.weight"] @ h + w[f"{name}.forget_bias"] + 1)
        return c * f + z * i

    def _tokens(self, n: int, positions: range, document: Document) -> tuple[Tensor, Tensor]:
        """Keys and values (positions, H, K) of layer n; zeros before the document's first token."""
        nothing = torch.zeros(self.config.num_heads, self.config.head_dim).double()
        keys = [document.keys[n, position] if position >= 0 else nothing for position in positions]
        values = [document.values[n, position] if position >= 0 else nothing for position in positions]
        return torch.stack(keys), torch.stack(values)

    def _heads(self, x: Tensor) -> Tensor:
        """(H*K,) -> (H, K)."""
        return x.reshape(self.config.num_heads, self.config.head_dim)

    def _layer(self, n: int) -> Weights:
        """The weights of layer n, counted from 1."""
        prefix = f"layers.{n - 1}."
        return {name.removeprefix(prefix): x for name, x in self.weights.items() if name.startswith(prefix)}


def rmsnorm(x: Tensor, scale: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-6) * scale


def unit(x: Tensor) -> Tensor:
    """Each row over its norm."""
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def attention(q: Tensor, keys: Tensor, values: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """One query (H, K) over n keys and values (n, H, K); scale (H,); bias (n, H), inside the scale. Returns (H, K)."""
    logits = (q * keys).sum(-1)
    if bias is not None:
        logits = logits + bias
    weights = torch.softmax(scale.abs() * logits, dim=0)
    return (weights[:, :, None] * values).sum(0)


def bucket(distance: int) -> int:
    """T5's bucket of a distance from 0 on: 16 exact ones, then 16 that grow by the 16th root of 8, in whole numbers."""
    if distance < 16:
        return distance
    return 16 + sum(distance**16 >= 16**16 * 8**step for step in range(1, 16))
