"""Other people's libraries: transformers (`modeling`, `tokenization`, `export`) and lm-evaluation-harness (`harness`).

Nothing here is imported before it is asked for; both libraries are optional extras.
"""
