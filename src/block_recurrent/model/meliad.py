"""Import of weights from the authors' JAX code, meliad."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from block_recurrent.config import ModelConfig
from block_recurrent.errors import ConfigError
from block_recurrent.model.language_model import BlockRecurrentLM

_TOKEN_SIDE = {
    "tbase/_kvq/pre_attn_layernorm/scale": "attention_norm.weight",
    "tbase/_kvq/keys_layer/kernel": "to_keys.weight",
    "tbase/_kvq/values_layer/kernel": "to_values.weight",
    "tbase/_kvq/queries_layer/kernel": "to_queries.weight",
    "tbase/_kvq/queries2_layer/kernel": "to_state_queries.weight",
    "tbase/_kvq/attention_scale": "scale",
    "tbase/attention_scale2": "state_scale",
    "tbase/post_attn_mlp/output_layer/kernel": "project.weight",
    "tbase/pre_ffn_layernorm/scale": "mlp_norm.weight",
    "tbase/ffn/hidden0/kernel": "mlp.hidden.weight",
    "tbase/ffn/output_layer/kernel": "mlp.output.weight",
    "relative_positions/rel_embedding": "position_bias.table",
    "external_memory_bias": "recall_mix",
}
_STATE_SIDE = {
    "recurrent_initial_state": "cell.initial_state",
    "recurrent_tbase/_kvq/position_embeddings": "cell.state_ids",
    "recurrent_tbase/_kvq/pre_attn_layernorm/scale": "cell.norm.weight",
    "recurrent_tbase/_kvq/keys_layer/kernel": "cell.to_keys.weight",
    "recurrent_tbase/_kvq/values_layer/kernel": "cell.to_values.weight",
    "recurrent_tbase/_kvq/queries_layer/kernel": "cell.to_self_queries.weight",
    "recurrent_tbase/_kvq/queries2_layer/kernel": "cell.to_token_queries.weight",
    "recurrent_tbase/_kvq/attention_scale": "cell.self_scale",
    "recurrent_tbase/attention_scale2": "cell.token_scale",
    "recurrent_tbase/pre_ffn_layernorm/scale": "cell.update.mlp_norm.weight",
    "recurrent_tbase/ffn/hidden0/kernel": "cell.update.hidden.weight",
}
_GATE = {
    "output_layer/kernel": "candidate.map.weight",
    "output_layer/bias": "candidate.bias",
    "gate_bias": "bias",
    "input_gate/kernel": "input.weight",
    "input_gate/bias": "input_bias",
    "forget_gate/kernel": "forget.weight",
    "forget_gate/bias": "forget_bias",
}
_LAYER = (
    _TOKEN_SIDE
    | _STATE_SIDE
    | {
        f"recurrent_tbase/post_attn_mlp/{theirs}": f"cell.update.attention_gate.{ours}"
        for theirs, ours in _GATE.items()
    }
    | {f"recurrent_tbase/ffn/{theirs}": f"cell.update.mlp_gate.{ours}" for theirs, ours in _GATE.items()}
)


def meliad_names(config: ModelConfig) -> dict[str, str]:
    """The authors' name of every parameter of a model with this configuration -> the name here."""
    with torch.device("meta"):
        ours = {name for name, _ in BlockRecurrentLM(config).named_parameters()}
    names = {"embed/embedding": "embedding.weight", "final_layernorm/scale": "final_norm.weight"}
    for index in range(config.num_layers):
        names |= {f"transformer{index}/{theirs}": f"layers.{index}.{name}" for theirs, name in _LAYER.items()}
    return {theirs: name for theirs, name in names.items() if name in ours}


def from_meliad(params: Mapping[str, Any], config: ModelConfig) -> BlockRecurrentLM:
    """Create a model with the authors' weights.

    Args:
        params: the arrays of their checkpoint, of any array type, by their names; linear maps are (in, out).
        config: the configuration that the checkpoint was trained with.
    """
    names = meliad_names(config)
    missing, unexpected = sorted(names.keys() - params.keys()), sorted(params.keys() - names.keys())
    if missing or unexpected:
        raise ConfigError(
            "these weights don't match the configuration: "
            f"missing {', '.join(missing) or 'none'}; unexpected {', '.join(unexpected) or 'none'}"
        )
    model = BlockRecurrentLM(config)
    ours = dict(model.named_parameters())
    for theirs, name in names.items():
        value = to_our_layout(theirs, params[theirs])
        if value.shape != ours[name].shape:
            raise ConfigError(
                f"'{theirs}' has shape {tuple(np.shape(params[theirs]))}, which does not match {name} of shape "
                f"{tuple(ours[name].shape)}: the configuration has other dimensions than the weights"
            )
        ours[name].data.copy_(value)
    return model


def to_our_layout(name: str, value: Any) -> Tensor:
    """Convert a tensor: linear maps change from (in, out) to (out, in)."""
    tensor = value if isinstance(value, Tensor) else torch.from_numpy(np.array(value))
    return tensor.T.contiguous() if name.endswith("/kernel") else tensor
