"""The dtype of products under autocast, also on the device `meta`, for which torch has no autocast."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

_PRODUCTS = {
    *(F.linear, torch.matmul, torch.mm, torch.bmm, torch.addmm, torch.baddbmm, torch.einsum),
    *(Tensor.matmul, Tensor.__matmul__, Tensor.__rmatmul__, Tensor.mm, Tensor.bmm, F.scaled_dot_product_attention),
}
_on_meta: list[torch.dtype] = []


def product_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which a product of x would be computed now."""
    if x.is_meta:
        return _on_meta[-1] if _on_meta and x.dtype == torch.float32 else x.dtype
    device = x.device.type
    lower = torch.is_autocast_enabled(device) and x.dtype == torch.float32
    return torch.get_autocast_dtype(device) if lower else x.dtype


class MetaAutocast(TorchFunctionMode):
    """`torch.autocast` for meta tensors, which represent those of a GPU: products in a lower precision.

    Casts of parameters are kept until the end, as autocast keeps them.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self._casts: dict[Tensor, Tensor] = {}

    def __enter__(self) -> MetaAutocast:
        _on_meta.append(self.dtype)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        _on_meta.pop()
        super().__exit__(*error)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _PRODUCTS and "out" not in kwargs and self.dtype != torch.float32:
            args, kwargs = tree_map(self._cast, (args, kwargs))
        if func is F.scaled_dot_product_attention:  # as on a GPU; on meta, torch would use the plain steps
            rate, scale = kwargs["dropout_p"], kwargs["scale"]
            return torch.ops.aten._scaled_dot_product_flash_attention(*args, rate, False, False, scale=scale)[0]
        return func(*args, **kwargs)

    def _cast(self, x: Any) -> Any:
        if not isinstance(x, Tensor) or x.dtype != torch.float32:
            return x
        if not (x.is_leaf and x.requires_grad):
            return x.to(self.dtype)
        if x not in self._casts:
            self._casts[x] = x.to(self.dtype)
        return self._casts[x]
