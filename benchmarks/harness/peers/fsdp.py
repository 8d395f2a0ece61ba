"""The peer of sharding: the same training under `torchrun` with FSDP2 (`fully_shard`) over gloo, as its users write it.

Usage: torchrun --nproc-per-node N fsdp.py SPEC.json OUT.json
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from harness.peers.plain import Plain
from orchestray.trainers.sync.zero.fsdp_units import unit_modules


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    plain = Plain(spec)
    plain.order_as_ours(spec["steps"])
    num_parameters = sum(parameter.numel() for parameter in plain.model.parameters())
    mesh = init_device_mesh("cpu", (size,))
    for module in unit_modules(plain.model):  # the same ones as ours
        fully_shard(module, mesh=mesh)
    fully_shard(plain.model, mesh=mesh)
    optimizer = plain.optimizer(plain.model)
    times, losses = [], []
    for step, loss in plain.steps(plain.model, optimizer, rank, size):
        times.append(time.time())
        losses.append(loss)
        if step == spec["steps"]:
            break
    gathered: list[list[float]] = [[] for _ in range(size)]
    dist.all_gather_object(gathered, losses)
    if rank == 0:
        mean = [sum(parts) / size for parts in zip(*gathered, strict=True)]
        found = {"times": times, "losses": mean, "parameters": num_parameters, "torch": torch.__version__}
        Path(sys.argv[2]).write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    os._exit(0)  # gloo's threads abort some regular exits


if __name__ == "__main__":
    main()
