"""The kernels: each operation with a signature, a reference in plain torch, and faster backends behind the same name.

`registry` decides which backend runs; nothing outside of this room knows.
"""

from block_recurrent.ops.attention import attend, merge_heads, split_heads, window_attention
from block_recurrent.ops.dropout import dropout
from block_recurrent.ops.knn import knn_attend
from block_recurrent.ops.loss import CrossEntropy, cross_entropy
from block_recurrent.ops.norm import rms_norm, unit_heads, unit_length
from block_recurrent.ops.registry import backend

__all__ = [
    "CrossEntropy",
    "attend",
    "backend",
    "cross_entropy",
    "dropout",
    "knn_attend",
    "merge_heads",
    "rms_norm",
    "split_heads",
    "unit_heads",
    "unit_length",
    "window_attention",
]
