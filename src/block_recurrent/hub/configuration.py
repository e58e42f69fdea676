"""The model's configuration as a `PretrainedConfig` of transformers, with the fields of `ModelConfig`."""

from __future__ import annotations

import dataclasses
from typing import Any

from transformers import PretrainedConfig

from block_recurrent.config import ModelConfig

MODEL_TYPE = "block-recurrent"
_FIELDS = tuple(field.name for field in dataclasses.fields(ModelConfig))


class BlockRecurrentConfig(PretrainedConfig):
    """A `ModelConfig` in a config.json. The document mark, the last id, is bos, eos and pad."""

    model_type = MODEL_TYPE
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012 (transformers wants a list)
    attribute_map = {  # noqa: RUF012
        "hidden_size": "d_model",
        "num_hidden_layers": "num_layers",
        "num_attention_heads": "num_heads",
        "intermediate_size": "mlp_dim",
    }

    def __init__(self, **values: Any) -> None:
        for theirs, ours in self.attribute_map.items():
            if theirs in values:
                values[ours] = values.pop(theirs)
        config = ModelConfig.from_dict({name: values.pop(name) for name in _FIELDS if name in values})
        for name, value in config.to_dict().items():
            setattr(self, name, value)
        mark = config.eos_token_id
        values = {"bos_token_id": mark, "eos_token_id": mark, "pad_token_id": mark} | values
        # The output table is the embedding itself, inside the model: there is nothing to tie.
        super().__init__(**values | {"tie_word_embeddings": False})

    def model_config(self) -> ModelConfig:
        """The `ModelConfig` of this configuration."""
        return ModelConfig.from_dict({name: getattr(self, name) for name in _FIELDS})

    def to_diff_dict(self) -> dict[str, Any]:
        """The contents of config.json: every field of `ModelConfig`, including those with default values."""
        return super().to_diff_dict() | self.model_config().to_dict()
