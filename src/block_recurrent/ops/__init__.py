"""The kernels: each operation has a reference in plain torch, and faster backends behind the same function.

`registry` decides which backend runs; nothing outside this package knows.
"""

from block_recurrent.ops.attention import (
    StateView,
    StateWeights,
    attend,
    attend_each,
    merge_heads,
    split_heads,
    state_step,
    state_view,
    window_attention,
)
from block_recurrent.ops.dropout import dropout
from block_recurrent.ops.knn import knn_attend
from block_recurrent.ops.lanes import fan_out, on_device, slice_lanes
from block_recurrent.ops.loss import CrossEntropy, cross_entropy
from block_recurrent.ops.norm import (
    TokenHeads,
    add_dropout,
    residual_norm,
    rms_norm,
    token_heads,
    unit_heads,
    unit_length,
)
from block_recurrent.ops.registry import backend
from block_recurrent.ops.scan import Average, KeysValues, is_changed, state_scan, stated

__all__ = [
    "Average",
    "CrossEntropy",
    "KeysValues",
    "StateView",
    "StateWeights",
    "TokenHeads",
    "add_dropout",
    "attend",
    "attend_each",
    "backend",
    "cross_entropy",
    "dropout",
    "fan_out",
    "is_changed",
    "knn_attend",
    "merge_heads",
    "on_device",
    "residual_norm",
    "rms_norm",
    "slice_lanes",
    "split_heads",
    "state_scan",
    "state_step",
    "state_view",
    "stated",
    "token_heads",
    "unit_heads",
    "unit_length",
    "window_attention",
]
