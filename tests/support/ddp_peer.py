"""One of two processes that train as PyTorch's own DistributedDataParallel does: `ddp_peer.py DIRECTORY RANK`.

It uses the same samples as the replicas of `support.training`, and leaves its weights in DIRECTORY.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.nn.parallel import DistributedDataParallel

OPTIONS: dict[str, Any] = {
    "steps": 12,
    "batch_size": 32,
    "optimizer": {"type": "sgd", "lr": 0.1, "momentum": 0.9},
    "precision": "float64",
}


def main(directory: Path, rank: int) -> None:
    """Train on this rank's half of each batch."""
    from orchestray.trainers.replica.randomness import seed_everything
    from support.training import regression, settings_for, stream_of

    dist.init_process_group("gloo", init_method=(directory / "meet").as_uri(), rank=rank, world_size=2)
    task, settings = regression(), settings_for(2, **OPTIONS)
    seed_everything(settings.seed)
    model = DistributedDataParallel(task.build_model().double())
    updates = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    stream = stream_of(task, settings)("train", rank)
    for epoch in range(OPTIONS["steps"] // stream.steps_per_epoch):
        with stream.epoch(epoch) as shares:
            for share in shares:
                (part,) = share.micro_batches
                updates.zero_grad()
                task.loss(model(part.batch["inputs"]), part.batch).backward()  # type: ignore[no-untyped-call]
                updates.step()
    save_file(dict(model.module.state_dict()), directory / f"rank-{rank}.safetensors")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
