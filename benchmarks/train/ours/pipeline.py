"""Our side of the pipeline benchmark: the network of a pipeline's worker, in the loop that trains it.

Usage: torchrun --nproc-per-node N pipeline.py SPEC.json OUT.json

Processes, data, cuts and optimizer are the peer's; what differs is who runs the stages and moves the tensors.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed import PrefixStore, TCPStore

from harness.peers.pipelining import Batches, cut_up, stage_of
from orchestray.platform.comm import objects
from orchestray.platform.comm.collective import Collective
from orchestray.platform.data.stream import MicroBatch, Share
from orchestray.trainers.core.rng import RngKey
from orchestray.trainers.layout.degrees import Layout
from orchestray.trainers.layout.groups import Groups
from orchestray.trainers.optim.factory import make_optimizer
from orchestray.trainers.optim.optimizers import Optimizer
from orchestray.trainers.parallel.pipeline.network import PipelineNetwork
from orchestray.trainers.parallel.pipeline.pipedream import PipeDreamNetwork
from orchestray.trainers.parallel.pipeline.schedules import make_programs, placement
from orchestray.trainers.sync.factory import make_exchange


class Stage(nn.Sequential):
    """A stage of a pipeline: children of an `nn.Sequential`."""

    def forward(self, x: Tensor) -> tuple[Tensor]:  # type: ignore[override]
        return (super().forward(x),)


class OneTask:
    """A task that has a loss alone."""

    def __init__(self, batches: Batches) -> None:
        self._batches = batches

    def loss(self, outputs: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        return self._batches.loss(outputs, batch["targets"])


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    world = _meet()
    groups = Groups(Layout(pipeline=world.size), world)
    plain = Batches(spec)
    stage = Stage(OrderedDict(stage_of(plain.model, spec["cuts"], world.rank)))
    rule = make_optimizer(**spec["optimizer"])
    rule.init([(name, parameter) for name, parameter in stage.named_parameters()])
    train = _stream if spec["schedule"] == "pipedream" else _steps
    times, losses = [], []
    for loss in train(spec, plain, stage, rule, groups):
        times.append(time.time())
        losses.append(loss)
    told = objects.gather_json(world, losses)
    if world.rank == 0:
        Path(sys.argv[2]).write_text(json.dumps({"times": times, "losses": told[-1]}), encoding="utf-8")
    world.barrier()
    os._exit(0)


def _meet() -> Collective:
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    return Collective.gloo(PrefixStore("ours", store), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))


def _shares(spec: Mapping[str, Any], plain: Batches) -> Iterator[Share]:
    number, size = spec["micro_batches"], spec["batch_size"]
    for step, batch in enumerate(plain.batches(spec["steps"])):
        parts = [(part, len(part["targets"])) for part in cut_up(batch, number)]
        made = tuple(MicroBatch(part, count, np.arange(count)) for part, count in parts)
        yield Share(step, size, made, number)


def _steps(
    spec: Mapping[str, Any], plain: Batches, stage: nn.Module, rule: Optimizer, groups: Groups
) -> Iterator[float]:
    rank, size = groups.rank, groups.layout.size
    exchange = make_exchange(type="allreduce")
    network = PipelineNetwork(
        OneTask(plain),  # type: ignore[arg-type]
        stage,
        {rank: stage},
        placement=placement(spec["schedule"], size, 1),
        program=lambda number: make_programs(spec["schedule"], size, 1, number)[rank],
        groups=groups,
        draw=RngKey(),
    )
    exchange.attach(stage, groups.data, network.pieces)
    updates = [update.tensor for update in exchange.updates()]
    for step, share in enumerate(_shares(spec, plain), start=1):
        exchange.before_step(step)
        loss = network.backward(share, exchange, step=step)
        exchange.finish([])
        gradients = exchange.gradients()
        network.combine(exchange.updates(), gradients)
        rule.step(updates, gradients, spec["optimizer"]["lr"])
        exchange.after_step(step)
        network.usage()
        yield loss


def _stream(
    spec: Mapping[str, Any], plain: Batches, stage: nn.Module, rule: Optimizer, groups: Groups
) -> Iterator[float]:
    network = PipeDreamNetwork(
        OneTask(plain),
        stage,
        {groups.rank: stage},
        placement=placement("pipedream", groups.layout.size, 1),
        groups=groups,
        draw=RngKey(),
    )

    def update(parameters: Any, gradients: Any, _step: int, _micro_batch: int) -> None:
        rule.step(parameters, gradients, spec["optimizer"]["lr"])

    for done in network.run_segment(_shares(spec, plain), update):
        yield done.loss_sum


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
