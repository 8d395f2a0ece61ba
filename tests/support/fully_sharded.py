"""Models whose parameters are cut over replicas, in threads."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from orchestray.platform.comm.collective import Collective
from orchestray.trainers.sync.allreduce.allreduce import AllReduce
from orchestray.trainers.sync.zero.fully_sharded import FullySharded
from support.sharding import Training, put_together
from support.threads import run_replicas

STEPS = 5


def trained(
    model: nn.Module, size: int, optimizer: str = "adam", num_steps: int = STEPS, **options: Any
) -> tuple[dict[str, Tensor], list[Training]]:
    def replica(collective: Collective) -> tuple[Training, dict[str, Any]]:
        exchange = FullySharded(smallest_unit_bytes=0, **options)
        training = Training(copy.deepcopy(model), exchange, collective, optimizer)
        for step in range(1, num_steps + 1):
            training.step(step)
        return training, training.parts()

    found = run_replicas(size, replica)
    return put_together([parts for _, parts in found]), [training for training, _ in found]


class Stack(nn.Module):
    """Four layers whose rows divide by 6, in a list."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def one_step(exchange: FullySharded | AllReduce, model: nn.Module, passes: int = 1) -> None:
    exchange.before_step(1)
    for number in range(1, passes + 1):
        loss = model(torch.ones(2, model.layers[0].in_features)).sum()  # type: ignore[index, union-attr]
        exchange.begin_backward(number == passes)
        loss.backward()
    exchange.finish([1.0])
