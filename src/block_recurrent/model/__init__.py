"""The model: from tokens and a memory to logits and the next memory. Start at `language_model.py`."""
