"""This model's code is the Python package block-recurrent; this file only points to it."""

try:
    from block_recurrent.hub.configuration import BlockRecurrentConfig
    from block_recurrent.hub.modeling import BlockRecurrentForCausalLM
    from block_recurrent.hub.tokenization import BlockRecurrentTokenizer
except ImportError as error:
    raise ImportError(
        "this model needs the package block-recurrent, which is not installed (or too old): "
        "pip install 'block-recurrent[hf]'"
    ) from error

__all__ = ["BlockRecurrentConfig", "BlockRecurrentForCausalLM", "BlockRecurrentTokenizer"]
