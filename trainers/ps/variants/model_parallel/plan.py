"""The decision where a network is cut for replicas in stages, before they meet.

The servers of a stage hold what the stage holds, so both must be given the same cut.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from orchestray.platform.comm.flat_tensors import flatten
from orchestray.platform.comm.thread_group import run_members
from orchestray.platform.errors import ConfigError
from orchestray.trainers.core.inputs import inputs_of
from orchestray.trainers.core.plain_model import build_model
from orchestray.trainers.core.rng import RngKey, building
from orchestray.trainers.layout.degrees import Layout
from orchestray.trainers.layout.groups import Groups, solo_groups
from orchestray.trainers.parallel.assemble import Assembler
from orchestray.trainers.parallel.pipeline.assemble import PipelineAssembler
from orchestray.trainers.parallel.pipeline.stage_set import StageSet
from orchestray.trainers.ps.protocol.address import StagePlan
from orchestray.trainers.ps.protocol.buffers import Buffers
from orchestray.trainers.ps.protocol.partition import Partition, Unit, trainable
from orchestray.trainers.ps.protocol.settings import CentralSettings
from orchestray.trainers.ps.variants.model_parallel.parts import (
    cut_module,
    cut_tensor,
    held_ranges,
    owned_names,
    owners_of_whole,
)

if TYPE_CHECKING:
    from orchestray.platform.comm.collective import Collective
    from orchestray.platform.data.stream import SampleStream
    from orchestray.platform.task import Task
    from orchestray.trainers.config.settings import ReplicaSettings
    from orchestray.trainers.layout.tensor_slice import Ranges
    from orchestray.trainers.parallel.pipeline.balance import Bounds


def in_stages(settings: ReplicaSettings) -> ReplicaSettings:
    """Return the settings of one replica's network: its own workers alone, whose parameters no other replica shares."""
    return replace(
        settings,
        layout=Layout(tensor=settings.layout.tensor, pipeline=settings.layout.pipeline),
        exchange={"type": "allreduce"},
        batch_norm="local",
        compression={},
    )


def plan_stages(
    task: Task,
    settings: ReplicaSettings,
    stream_of: Callable[[str, int, int], SampleStream],
    device: torch.device | str = "cpu",
) -> StagePlan:
    """Cut the network as given by `strategy.network.split`; a cut by measuring is measured in this process.

    Args:
        task: task to learn.
        settings: settings of the run.
        stream_of: returns the samples of a split as part i of n sees them.
        device: device on which to measure.

    Raises:
        ConfigError: it cannot be cut like this, or two stages would hold the same parameter.
    """
    device, own = torch.device(device), in_stages(settings)
    if own.layout.tensor > 1:
        return _plan_split(task, own, stream_of, device, CentralSettings.of(settings))
    draw = RngKey(settings.seed)
    assembler = PipelineAssembler(task, own, draw, device)
    with building(draw.seed):
        model = build_model(task)
    model = model.to(device, torch.float64) if settings.precision == "float64" else model.to(device)
    stream = stream_of("train", 0, 1)
    layers = assembler.layers(model, inputs_of(stream.one_sample()))
    bounds = assembler.agree_on_bounds(layers, solo_groups(Layout()), stream)
    held = [StageSet({i: layers.stage(*bounds[i]) for i in stages}) for stages in assembler.placement]
    plan = StagePlan(
        bounds=tuple((start, stop) for start, stop in bounds),
        parameters=tuple(tuple(name for name, _ in trainable(stages)) for stages in held),
        buffers=tuple(tuple(name for name, _ in stages.named_buffers()) for stages in held),
    )
    _refuse_shared(held, plan)
    return plan


def _plan_split(
    task: Task,
    own: ReplicaSettings,
    stream_of: Callable[[str, int, int], SampleStream],
    device: torch.device,
    central: CentralSettings,
) -> StagePlan:
    """Plan layers that are split over a tensor group: a replica is assembled once, with its workers as threads."""
    assemblers = [Assembler(task, own, lambda split, _: stream_of(split, 0, 1), device) for _ in range(own.layout.size)]

    def hold(world: Collective) -> tuple[Bounds, list[str], list[str], dict[str, tuple[Ranges, ...]]]:
        groups, assembler = Groups(own.layout, world), assemblers[world.rank]
        network = assembler.assemble(lambda: groups)
        try:
            buffers = [name for name, _ in network.model.named_buffers()]
            world.barrier()  # no worker leaves while another still opens its channels
            owners, cut = owners_of_whole(network, groups.tensor, central.unit)
            if cut and central.factors != "never":
                raise ConfigError(
                    "config: strategy.exchange.factors: the optimizer has to see whole parameters, and the workers of "
                    f"a tensor group have inputs and errors of parts, as of {next(iter(cut))!r}; set it to never"
                )
            ranges = {name: held for name, held in held_ranges(network).items() if name not in owners}
            return assembler.bounds, owned_names(network, owners, groups.tensor.rank), buffers, ranges
        finally:
            network.close()

    bounds, names, buffers, ranges = zip(*run_members(own.layout.size, hold), strict=True)
    if empty := [worker for worker, held in enumerate(names) if not held]:
        raise ConfigError(
            f"strategy.network: worker {empty[0]} of a replica has nothing of its own to train, and its servers would "
            "have nothing to hold; use fewer workers, or say with strategy.network.split where to cut"
        )
    return StagePlan(
        bounds=tuple(bounds[0]),
        parameters=tuple(tuple(held) for held in names),
        buffers=tuple(tuple(held) for held in buffers),
        ranges=tuple(ranges),
    )


def _refuse_shared(held: list[StageSet], plan: StagePlan) -> None:
    holders = Counter(id(parameter) for stages in held for _, parameter in trainable(stages))
    for stages, names in zip(held, plan.parameters, strict=True):
        if not names:
            raise ConfigError(
                "strategy.network.pipeline: a stage has nothing to train, and its servers would have nothing to hold; "
                "use fewer stages, or say with strategy.network.split where to cut"
            )
        for name, parameter in trainable(stages):
            if holders[id(parameter)] > 1:
                raise ConfigError(
                    f"strategy.network.split: {name!r} is tied and would be held by two stages, each with its own "
                    "servers; cut the network so that one stage holds it"
                )


def part_of_stage(
    model: nn.Module,
    names: Sequence[str],
    num_shards: int,
    ranges: Mapping[str, tuple[Ranges, ...]] | None = None,
    unit: Unit = "element",
) -> tuple[Partition, Tensor]:
    """Return the partition and the values for the servers of one worker of a replica.

    Args:
        model: the plain model.
        names: names of the worker's parameters, in its order (`StagePlan.parameters`).
        num_shards: number of servers of the worker.
        ranges: part of each tensor that it holds (`StagePlan.ranges`); not listed: all.
        unit: what its servers have to hold whole.

    Returns:
        The partition, and a copy of all its values, flat.

    Raises:
        ConfigError: more servers than units, or elements of parameters.
    """
    found = dict(model.named_parameters(remove_duplicate=False))
    held = [cut_tensor(found[name].detach(), name, ranges or {}) for name in names]
    partition = Partition(tuple((name, tuple(t.shape)) for name, t in zip(names, held, strict=True)), num_shards, unit)
    return partition, flatten(held)


def buffers_of_stage(
    model: nn.Module, names: tuple[str, ...], ranges: Mapping[str, tuple[Ranges, ...]] | None = None
) -> Buffers | None:
    """Return the buffers that the first server of a worker keeps: a copy of the plain model's; None if it has none.

    Args:
        model: the plain model.
        names: names of the worker's buffers, in its order (`StagePlan.buffers`).
        ranges: part of each tensor that it holds (`StagePlan.ranges`); not listed: all.
    """
    return held_buffers(cut_module(model, names, ranges or {}))


def held_buffers(model: nn.Module) -> Buffers | None:
    """Return a copy of the model's buffers; None if it has none."""
    held = Buffers.of(model)
    return held if held.floats.numel() or held.integers.numel() else None
