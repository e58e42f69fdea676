"""Inference: `Engine` has a snapshot of a model's weights and decodes with it."""

from block_recurrent.inference.engine import Engine, Scored
