"""The peer of the step time: the same training under `torchrun` with `DistributedDataParallel` over gloo.

Usage: torchrun --nproc-per-node N ddp.py SPEC.json OUT.json
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from harness.peers.plain import Plain


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    plain = Plain(spec)
    plain.order_as_ours(spec["steps"])
    model = DistributedDataParallel(plain.model, gradient_as_bucket_view=True)
    optimizer = plain.optimizer(model)
    times, losses = [], []
    for step, loss in plain.steps(model, optimizer, rank, size):
        times.append(time.time())
        losses.append(loss)
        if step == spec["steps"]:
            break
    gathered: list[list[float]] = [[] for _ in range(size)]
    dist.all_gather_object(gathered, losses)
    if rank == 0:
        mean = [sum(parts) / size for parts in zip(*gathered, strict=True)]
        found = {
            "times": times,
            "losses": mean,
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
        }
        Path(sys.argv[2]).write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    os._exit(0)  # gloo's threads abort some regular exits


if __name__ == "__main__":
    main()
