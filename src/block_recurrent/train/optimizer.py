"""Adafactor as in optax, also for parameters sharded by FSDP2; AdamW and Muon as alternatives.

Every statistic is per parameter tensor and global: a sharded parameter gets the same update as an unsharded
one. Each process works on its local shards; sums over processes take two
small all-reduces per step, regardless of the number of parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import zeros as sharded_zeros

from block_recurrent.nn.gates import gate_biases
from block_recurrent.ops import on_device
from block_recurrent.run_config import OptimizerConfig
from block_recurrent.train.muon import Muon
from block_recurrent.train.sharding import local

SMALLEST_FACTORED = 128
DECAY_EXPONENT = 0.8
EPSILON = 1e-30
SMALLEST_SCALE = 1e-3  # A parameter of size zero still moves: updates are scaled by at least this


def make_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """The optimizer of a configuration. Call `set_rate` before every step."""
    params = [p for p in model.parameters() if p.requires_grad]
    if config.name == "adafactor":
        return Adafactor(params, lr=0.0, momentum=config.momentum)
    speeds = _speeds(model, config)
    maps = {id(p) for p in linear_maps(model)} if config.name == "muon" else set()
    groups: dict[tuple[float, float, bool], list[nn.Parameter]] = {}
    for p in params:
        # No weight decay for gate biases, scales and norms: decaying a gate's bias would change how long it remembers.
        decay = config.weight_decay if p.ndim >= 2 else 0.0
        groups.setdefault((speeds.get(id(p), 1.0), decay, id(p) in maps), []).append(p)
    described = [
        {"params": members, "speed": speed, "weight_decay": decay, "muon": by_muon}
        for (speed, decay, by_muon), members in groups.items()
    ]
    return Muon(described, lr=0.0, betas=(config.beta1, config.beta2), eps=config.epsilon)


def _speeds(model: nn.Module, config: OptimizerConfig) -> dict[int, float]:
    """Factors on the learning rate other than 1, by the id of the parameter."""
    speeds = {id(p): config.gate_rate for p in gate_biases(model)}
    for name, p in model.named_parameters():
        if name.endswith("scale"):
            speeds[id(p)] = config.scale_rate
        elif name.endswith(("embedding.weight", "state_ids")):
            speeds[id(p)] = config.embedding_rate
    return speeds


def linear_maps(model: nn.Module) -> list[Tensor]:
    """The weights of the linear maps inside the layers, which Muon updates. Embedding tables are not linear maps."""
    return [module.weight for module in model.modules() if isinstance(module, nn.Linear)]


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("speed", 1.0)


class Adafactor(torch.optim.Optimizer):
    """Factored root mean square, update clipped to RMS 1, learning rate, times RMS of the parameter, momentum."""

    def __init__(self, params: Iterable[Tensor], lr: float, momentum: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "step": 0})
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p] = _initial_state(p, group["momentum"])

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update. A parameter without a gradient is treated as having a zero gradient, as in optax.

        A closure is called first, to compute the gradients, and its loss is returned.
        """
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            group["step"] += 1
            for p in group["params"]:
                if p.grad is None:
                    p.grad = torch.zeros_like(p)
            self._update(group)
        return loss

    def _update(self, group: dict[str, Any]) -> None:
        sharding = _sharding(group["params"])
        params = [local(p) for p in group["params"]]
        grads = [local(p.grad) for p in group["params"]]
        states = [{k: local(v) for k, v in self.state[p].items()} for p in group["params"]]
        dims = [_factored_dims(p.shape) for p in group["params"]]
        new = 1 - (1 - float(group["step"]) ** -DECAY_EXPONENT)

        updates: list[Tensor] = [torch.empty(0)] * len(params)
        whole = [i for i, d in enumerate(dims) if d is None]
        for i, update in zip(
            whole, _by_rms([grads[i] for i in whole], [states[i]["v"] for i in whole], new), strict=True
        ):
            updates[i] = update
        factored = [_Factored(grads[i], states[i]["v_row"], states[i]["v_col"], *d) for i, d in enumerate(dims) if d]
        sizes = [p.shape for p, d in zip(group["params"], dims, strict=True) if d]
        factored_updates = iter(_by_factored_rms(factored, sizes, new, sharding))
        updates = [next(factored_updates) if d else u for u, d in zip(updates, dims, strict=True)]

        # RMS of update and parameter, over all pieces of a sharded tensor.
        squares = torch.stack(torch._foreach_norm(updates) + torch._foreach_norm(params)).square_()
        sharding.sum_over_processes([squares])
        counts = on_device([p.numel() for p in group["params"]], squares.device)
        update_rms, param_rms = (squares.view(2, -1) / counts).sqrt()
        scales = group["lr"] * param_rms.clamp(min=SMALLEST_SCALE) / update_rms.clamp(min=1.0)
        torch._foreach_mul_(updates, list(scales.unbind()))
        if group["momentum"]:
            momenta = [state["momentum"] for state in states]
            torch._foreach_lerp_(momenta, updates, 1 - group["momentum"])
            updates = momenta
        torch._foreach_sub_(params, updates)


def _by_rms(grads: list[Tensor], v: list[Tensor], new: float) -> list[Tensor]:
    """Gradients over the running root mean square of each entry. `new`: weight of the newest square."""
    if not grads:
        return []
    squares = torch._foreach_mul(grads, grads)
    torch._foreach_add_(squares, EPSILON)
    torch._foreach_lerp_(v, squares, new)
    updates = torch._foreach_rsqrt(v)
    torch._foreach_mul_(updates, grads)
    return list(updates)


class _Factored(NamedTuple):
    """A large matrix: gradient, running means of its squares, and the dimensions that each of these was taken over."""

    grad: Tensor
    v_row: Tensor
    v_col: Tensor
    d_col: int  # the second largest dimension: v_col is a mean over it
    d_row: int  # the largest dimension: v_row is a mean over it


def _by_factored_rms(
    matrices: list[_Factored], sizes: Sequence[torch.Size], new: float, sharding: _Sharding
) -> list[Tensor]:
    """As `_by_rms`, with the squares known only by their means over either dimension."""
    row_sums, col_sums = [], []
    for m in matrices:
        squares = m.grad.square()
        row_sums.append(squares.sum(m.d_row, keepdim=True))
        col_sums.append(squares.sum(m.d_col, keepdim=True))
    partial = [s for s, m in zip(row_sums, matrices, strict=True) if m.d_row == sharding.dim]
    partial += [s for s, m in zip(col_sums, matrices, strict=True) if m.d_col == sharding.dim]
    sharding.sum_over_processes(partial)
    updates = []
    for m, size, row_sum, col_sum in zip(matrices, sizes, row_sums, col_sums, strict=True):
        m.v_row.lerp_(row_sum / size[m.d_row] + EPSILON, new)
        m.v_col.lerp_(col_sum / size[m.d_col] + EPSILON, new)
        # The mean of all entries is the mean of either factor: use the one that is not sharded.
        mean = m.v_col.mean(m.d_row, keepdim=True) if m.d_col == sharding.dim else m.v_row.mean(m.d_col, keepdim=True)
        updates.append(m.grad * (m.v_row / mean).rsqrt_() * m.v_col.rsqrt())
    return updates


def _factored_dims(shape: torch.Size) -> tuple[int, int] | None:
    """The second largest and the largest dimension, where both are at least 128."""
    if len(shape) < 2:
        return None
    second, first = sorted(range(len(shape)), key=lambda d: shape[d])[-2:]
    return (second, first) if shape[second] >= SMALLEST_FACTORED else None


def _initial_state(p: Tensor, momentum: float) -> dict[str, Tensor]:
    state = {"momentum": torch.zeros_like(p)} if momentum else {}
    dims = _factored_dims(p.shape)
    if dims is None:
        return state | {"v": torch.zeros_like(p)}
    d_col, d_row = dims
    return state | {"v_row": _zeros_without(p, d_row), "v_col": _zeros_without(p, d_col)}


def _zeros_without(p: Tensor, dim: int) -> Tensor:
    """Zeros of the shape of p with one dimension reduced to 1; sharded as p is, or replicated if that dimension was."""
    shape = list(p.shape)
    shape[dim] = 1
    if not isinstance(p, DTensor):
        return p.new_zeros(shape)
    placements = [Replicate() if x.is_shard(dim) else x for x in p.placements]
    return sharded_zeros(shape, dtype=p.dtype, device_mesh=p.device_mesh, placements=placements)


class _Sharding(NamedTuple):
    """Along which dimension and over which process group parameters are sharded; `group` is None if they are not."""

    dim: int | None
    group: dist.ProcessGroup | None

    def sum_over_processes(self, tensors: list[Tensor]) -> None:
        """All-reduce in place, in one message."""
        if self.group is None or not tensors:
            return
        flat = torch.cat([x.flatten() for x in tensors])
        dist.all_reduce(flat, group=self.group)
        for x, total in zip(tensors, flat.split([x.numel() for x in tensors]), strict=True):
            x.copy_(total.view_as(x))


def _sharding(params: Sequence[Tensor]) -> _Sharding:
    first = params[0]
    if not isinstance(first, DTensor):
        return _Sharding(None, None)
    cut = [(i, x.dim) for i, x in enumerate(first.placements) if isinstance(x, Shard)]
    assert len(cut) == 1, "FSDP2 shards a parameter along one dimension"
    assert all(isinstance(p, DTensor) and p.placements == first.placements for p in params)
    return _Sharding(cut[0][1], first.device_mesh.get_group(cut[0][0]))
