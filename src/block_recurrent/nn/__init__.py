"""Building blocks that know numbers and tensors, not configurations."""
