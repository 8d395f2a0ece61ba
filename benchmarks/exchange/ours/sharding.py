"""Our sharded exchanges in the peers' loop: plain PyTorch, the data in memory as tensors, under `torchrun`.

Usage: torchrun --nproc-per-node N sharding.py SPEC.json OUT.json; the specification's `shard` says what is sharded.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.peers.plain import Plain
from orchestray.platform.comm.collective import Collective
from orchestray.trainers.optim.factory import make_optimizer
from orchestray.trainers.survey.zero_memory import held_bytes
from orchestray.trainers.sync.factory import make_exchange


class Weighted(nn.Module):
    """The model, with the loss weighed as in our loop: our gradients are summed, the peers' averaged."""

    def __init__(self, model: nn.Module, weight: float) -> None:
        super().__init__()
        self._model = model
        self._weight = weight

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self._model(inputs)
        outputs.register_hook(lambda gradient: gradient * self._weight)
        return outputs


class Stepper:
    """Exchange of gradients and update, where the peers have a `torch.optim` optimizer."""

    def __init__(self, spec: dict[str, Any], model: nn.Module, collective: Collective) -> None:
        arguments = dict(spec["optimizer"])
        self._lr = arguments.pop("lr")
        self.exchange = make_exchange(shard=spec["shard"])
        self.exchange.attach(model, collective)
        self._collective, self._sent_before = collective, 0
        updates = self.exchange.updates()
        self._tensors = [update.tensor for update in updates]
        self.optimizer = make_optimizer(**arguments)
        self.optimizer.init((update.name, update.tensor) for update in updates)
        self._step = 1
        self.bytes_sent = 0
        self.held: dict[str, int] = {}
        self.begin()

    def begin(self) -> None:
        self._sent_before = self._collective.own_bytes_sent
        self.exchange.before_step(self._step)
        self.exchange.begin_backward(True)

    def step(self) -> None:
        self.exchange.finish([])
        self.optimizer.step(self._tensors, self.exchange.gradients(), self._lr)
        if self._step == 1:
            self.held = held_bytes(self.exchange, self.optimizer)
        self.exchange.after_step(self._step)
        self.bytes_sent = self._collective.own_bytes_sent - self._sent_before
        self._step += 1

    def zero_grad(self) -> None:
        self.begin()


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    dist.init_process_group("gloo")
    collective = Collective(dist.distributed_c10d._get_default_group(), dist.distributed_c10d._get_default_store())
    rank, size = collective.rank, collective.size
    plain = Plain(spec)
    plain.order_as_ours(spec["steps"])
    stepper = Stepper(spec, plain.model, collective)
    times, losses = [], []
    for step, loss in plain.steps(Weighted(plain.model, 1 / size), cast(Any, stepper), rank, size):
        times.append(time.time())
        losses.append(loss)
        if step == spec["steps"]:
            break
    mean = torch.tensor(losses, dtype=torch.float64)
    collective.all_reduce(mean)
    if rank == 0:
        found = {
            "times": times,
            "losses": (mean / size).tolist(),
            "bytes_sent": stepper.bytes_sent,
            "held": stepper.held,
        }
        Path(sys.argv[2]).write_text(json.dumps(found), encoding="utf-8")
    collective.barrier()
    os._exit(0)  # gloo's threads abort some regular exits


if __name__ == "__main__":
    main()
