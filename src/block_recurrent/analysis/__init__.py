"""Analysis of the memory: token-by-token comparisons, ablations, inspection of the state, and reports."""
