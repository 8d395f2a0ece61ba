"""The peer of HOGWILD: processes of torch.multiprocessing on a model in shared memory, as PyTorch's example of it.

https://github.com/pytorch/examples/tree/main/mnist_hogwild: `model.share_memory()`, a process a worker, each with an
optimizer of its own that steps on the shared parameters. Here with our model, and with the batches of our workers.

Usage: hogwild.py SPEC.json OUT.json
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch.multiprocessing as mp
from torch import nn

from harness.peers.plain import Plain


def work(rank: int, spec: dict[str, Any], model: nn.Module, ready: Any, found: Any) -> None:
    """Run one worker, and tell when each of its steps ended."""
    plain = Plain(spec)
    plain.order_as_ours(spec["steps"])
    optimizer = plain.optimizer(model)
    ready.wait()
    times, losses = [], []
    for step, loss in plain.steps(model, optimizer, rank, spec["workers"]):
        times.append(time.monotonic())
        losses.append(loss)
        if step == spec["steps"]:
            break
    found.put((times, losses))


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    context = mp.get_context("spawn")
    model = Plain(spec).model
    model.share_memory()
    ready, found = context.Barrier(spec["workers"]), context.Queue()
    workers = [context.Process(target=work, args=(rank, spec, model, ready, found)) for rank in range(spec["workers"])]
    for worker in workers:
        worker.start()
    told = [found.get() for _ in workers]
    for worker in workers:
        worker.join()
    result = {
        "times": [times for times, _ in told],
        "losses": [losses for _, losses in told],
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
    }
    Path(sys.argv[2]).write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main()
