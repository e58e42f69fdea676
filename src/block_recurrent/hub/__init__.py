"""Adapters for transformers (`modeling`, `tokenization`, `export`) and lm-evaluation-harness (`harness`).

Imported lazily; both libraries are optional extras.
"""

from block_recurrent.errors import MissingExtraError


def register() -> None:
    """Register with the Auto classes of transformers, so that `AutoModelForCausalLM.from_pretrained(folder)` works.

    `import block_recurrent` does this automatically if transformers was imported before.
    """
    try:
        from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

        from block_recurrent.hub.configuration import BlockRecurrentConfig
        from block_recurrent.hub.modeling import BlockRecurrentForCausalLM
        from block_recurrent.hub.tokenization import BlockRecurrentTokenizer
    except ImportError:
        raise MissingExtraError("registration with transformers", "hf") from None
    AutoConfig.register(BlockRecurrentConfig.model_type, BlockRecurrentConfig, exist_ok=True)
    AutoModelForCausalLM.register(BlockRecurrentConfig, BlockRecurrentForCausalLM, exist_ok=True)
    AutoTokenizer.register(BlockRecurrentConfig, slow_tokenizer_class=BlockRecurrentTokenizer, exist_ok=True)
