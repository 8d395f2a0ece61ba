"""Our side of the benchmark of tensor parallelism: the model split by the plan that is found, in the peer's loop.

Usage: torchrun --nproc-per-node N tensor_parallel.py SPEC.json OUT.json

Processes, data, loop and optimizer are the peer's; what differs is who splits the layers and moves the tensors.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from torch.distributed import PrefixStore, TCPStore

from harness.peers.plain import Plain
from orchestray.platform.comm.collective import Collective
from orchestray.trainers.parallel.tensor.apply import split_model
from orchestray.trainers.parallel.tensor.plan import find_plan


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    group = Collective.gloo(PrefixStore("ours", store), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    plain = Plain(spec)
    plain.order_as_ours(spec["steps"])
    plan = find_plan(plain.model, size=group.size)
    split_model(plain.model, plan, lambda: group, group.rank, group.size)
    optimizer = plain.optimizer(plain.model)
    before, times, losses = group.bytes_sent, [], []
    for step, loss in plain.steps(plain.model, optimizer, rank=0, num_ranks=1):
        times.append(time.time())
        losses.append(loss)
        if step == spec["steps"]:
            break
    told = {"times": times, "losses": losses, "plan": plan, "bytes": (group.bytes_sent - before) / len(times)}
    if group.rank == 0:
        Path(sys.argv[2]).write_text(json.dumps(told), encoding="utf-8")
    group.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
