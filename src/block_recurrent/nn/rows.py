"""Products of few rows with a matrix: most of the time of writing goes into reading weights for them."""

from __future__ import annotations

import functools
import math
import platform
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

Function = Callable[[Tensor], Tensor]
AddTo = Callable[[Tensor, Tensor], Tensor]
"""(x, y) -> x + what becomes of y."""


def times(weight: Tensor, copy: bool = False) -> Function:
    """weight (out, in) -> the function x (rows, in) -> x @ weight.T (rows, out).

    `copy`: the function may keep a copy, laid out for its products; for functions that are kept themselves.
    """
    if _one_product_is_on_one_core(weight):
        return _times_parts(weight, copy)
    return partial(torch.mm, mat2=weight.t())


def adding_times(weight: Tensor) -> AddTo:
    """weight (out, in) -> the function (x, y) -> x + y @ weight.T."""
    if _one_product_is_on_one_core(weight):
        return partial(_add_parts, _parts_of_outputs(weight))
    return partial(_add, weight.t())


def _add(across: Tensor, x: Tensor, y: Tensor) -> Tensor:
    # Of two precisions, as in autocast, the sum has the higher one.
    return torch.addmm(x, y, across) if x.dtype == y.dtype else x + torch.mm(y, across)


# Intel's library, which torch brings along, leaves a product of few rows to a single core of AMD's processors. Several
# products at once it shares out among the cores: the same product in parts is up to twice as fast.


def _one_product_is_on_one_core(weight: Tensor) -> bool:
    return weight.is_cpu and weight.dtype == torch.float32 and torch.get_num_threads() > 1 and _mkl_on_amd()


@functools.cache
def _mkl_on_amd() -> bool:
    if not torch.backends.mkl.is_available():
        return False
    try:
        with open("/proc/cpuinfo") as lines:
            return any("AuthenticAMD" in line for line in lines if line.startswith("vendor_id"))
    except OSError:
        return "AuthenticAMD" in platform.processor()


def _times_parts(weight: Tensor, copy: bool) -> Function:
    by_outputs = partial(_times_outputs, _parts_of_outputs(weight))
    out_dim, in_dim = weight.shape
    if not copy or out_dim <= in_dim:
        return by_outputs
    by_inputs = partial(_one_times_inputs, _parts_of_inputs(weight))
    return lambda x: by_inputs(x) if x.shape[0] == 1 else by_outputs(x)


def _parts_of_outputs(weight: Tensor) -> Tensor:
    """(parts, in, out / parts), a view."""
    return weight.unflatten(0, (math.gcd(len(weight), 4 * torch.get_num_threads()), -1)).transpose(1, 2)


def _parts_of_inputs(weight: Tensor) -> Tensor:
    """(parts, in / parts, out), a copy along the outputs."""
    return weight.t().contiguous().unflatten(0, (math.gcd(weight.shape[1], torch.get_num_threads()), -1))


# `x.shape` and not `len(x)`, which torch has in Python. One row comes into parts without moving anything.


def _times_outputs(parts: Tensor, x: Tensor) -> Tensor:
    return torch.bmm(x.expand(parts.shape[0], *x.shape), parts).transpose(0, 1).flatten(1)


def _one_times_inputs(parts: Tensor, x: Tensor) -> Tensor:
    return torch.bmm(x.reshape(parts.shape[0], 1, -1), parts).sum(0)


def _add_parts(parts: Tensor, x: Tensor, y: Tensor) -> Tensor:
    if x.shape[0] > 1 or x.dtype != y.dtype:
        return x + _times_outputs(parts, y)
    before = x.reshape(parts.shape[0], 1, -1)
    return torch.baddbmm(before, y.expand(parts.shape[0], 1, -1), parts).view(1, -1)
