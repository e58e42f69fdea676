"""Reading and writing: sessions that carry a memory, sampling, beam search, memory files, int8 weights."""
