"""Other people's libraries: transformers (`modeling`, `tokenization`, `export`) and lm-evaluation-harness (`harness`).

Nothing here is imported before it is asked for; both libraries are optional extras.
"""

from block_recurrent.errors import MissingExtraError


def register() -> None:
    """Make the Auto classes of transformers know ours: `AutoModelForCausalLM.from_pretrained(folder)` then works.

    `import block_recurrent` does it by itself where transformers was imported before.
    """
    try:
        from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

        from block_recurrent.hub.configuration import BlockRecurrentConfig
        from block_recurrent.hub.modeling import BlockRecurrentForCausalLM
        from block_recurrent.hub.tokenization import BlockRecurrentTokenizer
    except ImportError:
        raise MissingExtraError("transformers with our models", "hf") from None
    AutoConfig.register(BlockRecurrentConfig.model_type, BlockRecurrentConfig, exist_ok=True)
    AutoModelForCausalLM.register(BlockRecurrentConfig, BlockRecurrentForCausalLM, exist_ok=True)
    AutoTokenizer.register(BlockRecurrentConfig, slow_tokenizer_class=BlockRecurrentTokenizer, exist_ok=True)
