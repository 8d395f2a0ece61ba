"""Two processes that train as PyTorch's own DistributedDataParallel does: `ddp_peer.py DIRECTORY TASK`.

They use the same samples as the replicas of `support.training` and the workers of a run, and leave their weights in
DIRECTORY. The second is forked once all is imported, which costs as much as the training does many times over.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.nn.parallel import DistributedDataParallel

from orchestray.trainers.core.rng import seed_everything
from orchestray.trainers.tasks import resolve
from support.training import regression, settings_for, stream_of

OPTIONS: dict[str, Any] = {
    "steps": 12,
    "batch_size": 32,
    "optimizer": {"type": "sgd", "lr": 0.1, "momentum": 0.9},
    "precision": "float64",
}


TASKS: Mapping[str, Callable[[], Any]] = {"regression": regression, "digits": resolve("digits")}


def main(directory: Path, name: str, other: int) -> NoReturn:
    """Train on this rank's half of each batch, and end the process; rank 0 has started process `other`."""
    rank = 0 if other else 1
    dist.init_process_group("gloo", init_method=(directory / "meet").as_uri(), rank=rank, world_size=2)
    task, settings = TASKS[name](), settings_for(2, **OPTIONS)
    seed_everything(settings.seed)
    model = DistributedDataParallel(task.build_model().double())
    updates = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    stream = stream_of(task, settings)("train", rank)
    left: int = OPTIONS["steps"]
    for epoch in range(-(-left // stream.steps_per_epoch)):
        with stream.epoch(epoch) as shares:
            for share in itertools.islice(shares, left):
                left -= 1
                (part,) = share.micro_batches
                updates.zero_grad()
                task.loss(model(part.batch["inputs"].double()), part.batch).backward()  # type: ignore[no-untyped-call]
                updates.step()
    save_file(dict(model.module.state_dict()), directory / f"rank-{rank}.safetensors")
    # Nothing is freed: the model's end waits, with the interpreter locked, for gloo's thread, which may want that lock.
    os._exit(os.waitstatus_to_exitcode(os.waitpid(other, 0)[1]) if other else 0)


if __name__ == "__main__":
    import torch._dynamo  # DistributedDataParallel does it late: twice, after the fork

    main(Path(sys.argv[1]), sys.argv[2], os.fork())
