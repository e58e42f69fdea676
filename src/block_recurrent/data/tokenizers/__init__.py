"""Text to tokens and back: bytes, SentencePiece vocabularies, and training one."""
