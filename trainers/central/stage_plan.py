"""Deciding where a network is cut for replicas in stages, before they meet: what each stage holds is what its servers
hold, and both must be told the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from orchestray.platform.errors import ConfigError
from orchestray.trainers.central.address import StagePlan
from orchestray.trainers.central.buffers import Buffers
from orchestray.trainers.central.partition import Partition, trainable
from orchestray.trainers.layout.degrees import Layout
from orchestray.trainers.layout.groups import solo_groups
from orchestray.trainers.pipeline.assemble import PipelineAssembler
from orchestray.trainers.pipeline.stage_set import StageSet
from orchestray.trainers.randomness import Draw, building

if TYPE_CHECKING:
    from orchestray.platform.data.stream import SampleStream
    from orchestray.platform.task import Task
    from orchestray.trainers.settings import ReplicaSettings


def in_stages(settings: ReplicaSettings) -> ReplicaSettings:
    """The settings of one replica's network: the stages alone, whose parameters no other replica shares."""
    return replace(
        settings,
        layout=Layout(pipeline=settings.layout.pipeline),
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
    """Cut the network as `strategy.network.split` says; where that is by measuring, in this process.

    Args:
        task: what is learned.
        settings: of the run.
        stream_of: the samples of a split as part i of n sees them.
        device: where to measure.

    Raises:
        ConfigError: it cannot be cut so, or two stages would hold the same parameter.
    """
    device, own = torch.device(device), in_stages(settings)
    draw = Draw(settings.seed)
    assembler = PipelineAssembler(task, own, draw, device)
    with building(draw.seed):
        model = task.build_model()
    model = model.to(device, torch.float64) if settings.precision == "float64" else model.to(device)
    layers = assembler.layers(model)
    bounds = assembler.agree_on_bounds(layers, solo_groups(Layout()), stream_of("train", 0, 1))
    held = [StageSet({i: layers.stage(*bounds[i]) for i in stages}) for stages in assembler.placement]
    plan = StagePlan(
        bounds=tuple((start, stop) for start, stop in bounds),
        parameters=tuple(tuple(name for name, _ in trainable(stages)) for stages in held),
        buffers=tuple(tuple(name for name, _ in stages.named_buffers()) for stages in held),
    )
    _refuse_shared(held, plan)
    return plan


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


def part_of_stage(model: nn.Module, names: Sequence[str], num_shards: int) -> tuple[Partition, Tensor]:
    """What the servers of one stage hold.

    Args:
        model: the plain one.
        names: of the stage's parameters, in its order (`StagePlan.parameters`).
        num_shards: servers of the stage.

    Returns:
        The partition, and a copy of all its values, flat.

    Raises:
        ConfigError: more servers than elements of parameters.
    """
    found = dict(model.named_parameters(remove_duplicate=False))
    parameters = [found[name] for name in names]
    partition = Partition(tuple((name, tuple(found[name].shape)) for name in names), num_shards)
    return partition, torch.cat([parameter.detach().reshape(-1) for parameter in parameters])


def buffers_of_stage(model: nn.Module, names: Sequence[str]) -> Buffers | None:
    """What the first server of a stage keeps of buffers: a copy of the plain model's; None if the stage has none.

    Args:
        model: the plain one.
        names: of the stage's buffers, in its order (`StagePlan.buffers`).
    """
    found = dict(model.named_buffers(remove_duplicate=False))
    holder = nn.Module()
    for name in names:
        holder.register_buffer(name.replace(".", "/"), found[name])
    return held_buffers(holder)


def held_buffers(model: nn.Module) -> Buffers | None:
    """A copy of the model's buffers; None if it has none."""
    held = Buffers.of(model)
    return held if held.floats.numel() or held.integers.numel() else None
