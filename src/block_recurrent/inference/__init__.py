"""Running a trained model: `Engine` holds a snapshot of its weights and decodes from it."""

from block_recurrent.inference.engine import Engine, Scored
