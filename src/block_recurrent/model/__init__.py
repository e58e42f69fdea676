"""The model, which maps tokens and a memory to logits and the next memory. Start with `language_model.py`."""
