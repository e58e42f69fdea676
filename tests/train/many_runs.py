"""Several runs in one group of processes, since starting a group takes longer than a run. Started by torchrun:

python -m torch.distributed.run --nproc-per-node 2 many_runs.py JOBS.json

JOBS.json: a list of {"config": ..., "out": ..., "error": null or a part of the expected message}. "traffic": a file for
the bytes of collectives.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import warnings
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from block_recurrent.errors import BlockRecurrentError
from block_recurrent.run_config import RunConfig
from block_recurrent.runtime import start
from block_recurrent.train.loop import train
from block_recurrent.train.optimizer import Adafactor
from block_recurrent.train.report import Reporter


def check_sharded_adafactor() -> None:
    """Shards get the update that the whole parameter would get; shapes that do not divide evenly included."""
    shapes = [(200, 130), (130, 200), (129, 128), (127, 300), (1, 5), (3,), (7, 2)]
    torch.manual_seed(3)
    whole, sharded = nn.ParameterList(), nn.ParameterList()
    for shape in shapes:
        value = torch.randn(shape)
        whole.append(nn.Parameter(value.clone()))
        sharded.append(nn.Parameter(value.clone()))
    fully_shard(sharded)
    ours, theirs = Adafactor(whole, lr=0.1), Adafactor(sharded, lr=0.1)
    for _ in range(3):
        for a, b in zip(whole, sharded, strict=True):
            a.grad = torch.randn(a.shape)
            b.grad = dist.tensor.distribute_tensor(a.grad.clone(), b.device_mesh, b.placements)
        ours.step()
        theirs.step()
    for a, b in zip(whole, sharded, strict=True):
        torch.testing.assert_close(b.full_tensor().detach(), a.detach(), rtol=1e-5, atol=1e-6)


def stop_at(step: int) -> None:
    """SIGTERM to the last process alone, when it has made this step: all must stop, and at the same step."""
    original = Reporter.metrics

    def metrics(self: Reporter, record: dict) -> None:
        original(self, record)
        if record["step"] == step and dist.get_rank() == dist.get_world_size() - 1:
            Reporter.metrics = original  # type: ignore[method-assign]
            os.kill(os.getpid(), signal.SIGTERM)

    Reporter.metrics = metrics  # type: ignore[method-assign]


class Traffic(TorchDispatchMode):
    """Bytes of gradients and weights in collectives, by operation and dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if func.namespace == "c10d" and name in ("allreduce_", "_allgather_base_", "_reduce_scatter_base_"):
            largest = max((x for x in tree_leaves(args) if isinstance(x, torch.Tensor)), key=torch.Tensor.numel)
            if largest.dtype != torch.float64:  # numbers that are told, and no gradients
                self.bytes[f"{name.strip('_')} {str(largest.dtype).removeprefix('torch.')}"] += largest.nbytes
        return func(*args, **(kwargs or {}))


def main() -> None:
    warnings.simplefilter("error", UserWarning)
    with start("cpu"):
        check_sharded_adafactor()
        for job in json.loads(Path(sys.argv[1]).read_text()):
            if job.get("stop_at"):
                stop_at(job["stop_at"])
            try:
                with Traffic() if job.get("traffic") else nullcontext() as traffic:
                    finished = train(RunConfig.from_dict(job["config"]), Path(job["out"]))
                if traffic is not None and dist.get_rank() == 0:
                    Path(job["traffic"]).write_text(json.dumps(traffic.bytes))
                assert finished == (not job.get("stop_at"))
                assert not job.get("error"), f"{job['out']} should have failed"
            except BlockRecurrentError as error:
                if not job.get("error") or job["error"] not in str(error):
                    raise


if __name__ == "__main__":
    main()
