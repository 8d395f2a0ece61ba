"""One of two processes that train a sharded model: `sharding_process.py DIRECTORY RANK`.

It leaves in DIRECTORY how far its weights are from those of one process.
"""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist


def main(directory: Path, rank: int) -> None:
    """Train as a worker does: in the default group of torch.distributed."""
    from orchestray.platform.comm.collective import Collective
    from orchestray.trainers.sync.zero.fully_sharded import FullySharded
    from support.sharding import Training, awkward, trained_alone

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=(directory / "meet").as_uri(), rank=rank, world_size=2)
    store = dist.distributed_c10d._get_default_store()
    collective = Collective(dist.distributed_c10d._get_default_group(), store)
    model = awkward()
    training = Training(copy.deepcopy(model), FullySharded(smallest_unit_bytes=0), collective, "adam")
    for step in range(1, 6):
        training.step(step)
    expected, _ = trained_alone(model, "adam")
    apart = [(tensor - piece.take(expected[name])).abs() for name, (piece, tensor) in training.parts().items()]
    found = max(float(difference.max()) for difference in apart if difference.numel())
    (directory / f"rank-{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    collective.barrier()
    collective.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
