"""Pipelines as threads, beside the one process they must equal."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from orchestray.platform.comm.collective import Collective
from orchestray.platform.data.stream import MicroBatch, Share
from orchestray.trainers.core.forward import Forward
from orchestray.trainers.core.rng import RngKey, seed_modules, seed_pass
from orchestray.trainers.layout.degrees import Layout
from orchestray.trainers.layout.groups import Groups
from orchestray.trainers.parallel.pipeline.network import PipelineNetwork
from orchestray.trainers.parallel.pipeline.schedules import make_programs, placement
from support.threads import run_replicas

Gradients = dict[str, Tensor | None]
CPU = torch.device("cpu")


class Regression:
    """The squared loss; the rest of a task is not needed here."""

    def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return nn.functional.mse_loss(outputs, batch["targets"])

    def metrics(self, outputs: Tensor, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"absolute": (outputs - batch["targets"]).abs().mean()}


class Stage(nn.Sequential):
    """Children of an `nn.Sequential` under their own names."""

    def forward(self, x: Tensor) -> tuple[Tensor]:  # type: ignore[override]
        return (super().forward(x),)


def sliced(model: nn.Sequential, num_stages: int) -> dict[int, nn.Module]:
    """Cut the model into stages whose sizes differ by at most one."""
    names = [name for name, _ in model.named_children()]
    parts = np.array_split(np.array(names), num_stages)
    return {
        index: Stage(OrderedDict((str(name), model.get_submodule(str(name))) for name in part))
        for index, part in enumerate(parts)
    }


def held(stages: Sequence[nn.Module]) -> nn.Module:
    """Return what a worker holds: the children of its stages, under their own names."""
    holder = nn.Module()
    for stage in stages:
        for name, child in stage.named_children():
            holder.add_module(name, child)
    return holder


def share_of(sizes: Sequence[int], make: Callable[[int], dict[str, Tensor]], batch_samples: int | None = None) -> Share:
    """Cut a batch into micro-batches of these sizes; `make(num_samples)` gives all samples."""
    batch = make(sum(sizes))
    parts, start = [], 0
    for size in sizes:
        rows = {name: value[start : start + size] for name, value in batch.items()}
        parts.append(MicroBatch(rows, size, np.arange(start, start + size)))
        start += size
    return Share(0, batch_samples or sum(sizes), tuple(parts), len(sizes))


def points(width: int, seed: int = 0) -> Callable[[int], dict[str, Tensor]]:
    def make(num_samples: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        inputs = torch.randn(num_samples, width, generator=generator, dtype=torch.float64)
        return {"inputs": inputs, "targets": torch.randn(num_samples, width, generator=generator, dtype=torch.float64)}

    return make


def mlp(num_layers: int, width: int = 5) -> nn.Sequential:
    """Return a network of layers that take turns to be linear and curved."""
    torch.manual_seed(0)
    layers = [nn.Linear(width, width) if index % 2 == 0 else nn.Tanh() for index in range(num_layers)]
    return nn.Sequential(*layers).double()


@dataclass
class Backwards:
    """An exchange that only notes its calls."""

    told: list[bool] = field(default_factory=list)

    def begin_backward(self, last_micro_batch: bool) -> None:
        self.told.append(last_micro_batch)


def gradients_of(model: nn.Module) -> Gradients:
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


@dataclass
class Result:
    """Results of one worker, or of the one process."""

    losses: list[float]
    gradients: list[Gradients]
    buffers: dict[str, Tensor]
    metrics: dict[str, float]
    network: Any = None
    told: list[bool] = field(default_factory=list)


def one_process(model: nn.Module, shares: Sequence[Share], task: Any = None, seed: int = 0) -> Result:
    """Return the results of a lone worker: the micro-batches of each share one after the other."""
    model = copy.deepcopy(model)
    task, draw = task or Regression(), RngKey(seed)
    seed_modules(model, draw, CPU)
    forward = Forward(task, model, "float64", CPU)
    result = Result([], [], {}, {})
    for step, share in enumerate(shares, start=1):
        model.zero_grad()
        loss_sum = 0.0
        for number, micro_batch in enumerate(share.micro_batches):
            weight = micro_batch.num_samples / share.batch_samples
            draw.step, draw.micro_batch = step, number
            seed_pass(draw, CPU)
            loss, value = forward.loss(micro_batch, step=step, rank=0)
            (loss * weight).backward()
            loss_sum += value * weight
        result.losses.append(loss_sum)
        result.gradients.append(gradients_of(model))
    model.eval()
    with torch.no_grad():
        for micro_batch in shares[-1].micro_batches:
            for name, value in forward.metrics(micro_batch).items():
                result.metrics[name] = result.metrics.get(name, 0.0) + value
    result.buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    return result


def make_network(
    model: nn.Module,
    stages: dict[int, nn.Module],
    schedule: str,
    groups: Groups,
    *,
    task: Any = None,
    stages_per_worker: int = 1,
    draw: RngKey | None = None,
    kind: Callable[..., Any] = PipelineNetwork,
    **options: Any,
) -> Any:
    """Return the network of a worker of `groups` over the stages of its own copy of the model."""
    num_workers = groups.layout.pipeline
    places = placement(schedule, num_workers, stages_per_worker)
    worker = groups.coordinate.pipeline
    draw = draw or RngKey()
    seed_modules(model, draw, CPU)
    own = {index: stages[index] for index in places[worker]}
    if kind is PipelineNetwork:
        options["program"] = lambda number: make_programs(schedule, num_workers, stages_per_worker, number)[worker]
    return kind(
        task or Regression(),
        held(list(own.values())),
        own,
        placement=places,
        groups=groups,
        draw=draw,
        precision="float64",
        **options,
    )


def pipelined(
    model: nn.Sequential,
    shares: Sequence[Share],
    schedule: str,
    num_workers: int,
    stages_per_worker: int = 1,
    *,
    task: Any = None,
    seed: int = 0,
    cut: Callable[[Any, int], dict[int, nn.Module]] = sliced,
    watch: Callable[[Any, Collective], None] | None = None,
    **options: Any,
) -> list[Result]:
    """Train by a pipeline of threads; return the result of each worker."""
    copies = [copy.deepcopy(model) for _ in range(num_workers)]
    layout = Layout(pipeline=num_workers)

    def worker(collective: Collective) -> Result:
        own = copies[collective.rank]
        draw, exchange = RngKey(seed), Backwards()
        network: PipelineNetwork = make_network(
            own,
            cut(own, num_workers * stages_per_worker),
            schedule,
            Groups(layout, collective),
            task=task,
            stages_per_worker=stages_per_worker,
            draw=draw,
            **options,
        )
        if watch is not None:
            watch(network, collective)
        result = Result([], [], {}, {}, network)
        try:
            for step, share in enumerate(shares, start=1):
                network.model.zero_grad()
                draw.step = step
                result.losses.append(network.backward(share, exchange, step=step))
                result.gradients.append(gradients_of(network.model))
            network.model.eval()
            with torch.no_grad():
                result.metrics = network.evaluate(shares[-1])
            collective.barrier()
        finally:
            network.close()
        result.buffers = {name: buffer.clone() for name, buffer in network.model.named_buffers()}
        result.told = exchange.told
        return result

    return run_replicas(num_workers, worker)


def same_gradients(results: Sequence[Result], plain: Result) -> bool:
    """Return True if the workers together hold the plain model's gradients, bit for bit, after every step."""
    for step, expected in enumerate(plain.gradients):
        found = {name: grad for result in results for name, grad in result.gradients[step].items()}
        if found.keys() != expected.keys():
            return False
        for name, gradient in expected.items():
            other = found[name]
            if (gradient is None) != (other is None):
                return False
            if gradient is not None and other is not None and not torch.equal(gradient, other):
                return False
    return True
