"""The peer of the storm: `DistributedDataParallel` with a checkpoint every some steps. It trains for ever.

Usage: torchrun --nproc-per-node N --max-restarts M torchrun_storm.py SPEC.json. Each worker appends a line a step to
`<storage>/steps-<rank>.jsonl`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from harness.peers.plain import Plain


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    # torchrun's workers meet again in the same store, where they would find the addresses of the dead.
    met_at = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    store = dist.PrefixStore(f"attempt-{os.environ['TORCHELASTIC_RESTART_COUNT']}", met_at)
    dist.init_process_group("gloo", store=store, rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
    rank, size = dist.get_rank(), dist.get_world_size()
    plain = Plain(spec)
    storage = Path(spec["storage"])
    saved, first_step = storage / "state.pt", 1
    optimizer = plain.optimizer(plain.model)
    if saved.exists():
        state = torch.load(saved)
        plain.model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first_step = state["step"] + 1
    model = DistributedDataParallel(plain.model)
    with (storage / f"steps-{rank}.jsonl").open("a", encoding="utf-8", buffering=1) as file:
        for step, _ in plain.steps(model, optimizer, rank, size, first_step):
            if step == first_step:  # meeting takes longer than a step may
                dist.distributed_c10d._get_default_group().set_timeout(timedelta(seconds=spec["hang_timeout_s"]))
            file.write(json.dumps({"step": step, "at": time.time(), "pid": os.getpid()}) + "\n")
            if rank == 0 and step % spec["checkpoint_every_steps"] == 0:
                aside = saved.with_suffix(".new")
                torch.save(
                    {"model": plain.model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, aside
                )
                aside.replace(saved)


if __name__ == "__main__":
    main()
