"""From settings to the network of one worker: the plain model, cut, split and wrapped as the layout says."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import nn

from orchestray.trainers.batch_norm import synchronize
from orchestray.trainers.forward import Forward
from orchestray.trainers.network.whole import WholeNetwork
from orchestray.trainers.randomness import Draw, seed_everything, seed_modules

if TYPE_CHECKING:
    from orchestray.platform.data.stream import SampleStream
    from orchestray.platform.task import Task
    from orchestray.trainers.layout.groups import Groups
    from orchestray.trainers.network.base import Network
    from orchestray.trainers.settings import ReplicaSettings

GroupsRef = Callable[[], "Groups"]


class Assembler:
    """Builds the plain model, and of it the network of a worker, as often as the gang meets."""

    def __init__(
        self,
        task: Task,
        settings: ReplicaSettings,
        stream_of: Callable[[str, int], SampleStream],
        device: torch.device,
    ) -> None:
        self._task = task
        self._settings = settings
        self._stream_of = stream_of
        self._device = device
        self.draw = Draw(settings.seed)
        """What random numbers depend on; the loop sets step and replica."""
        self._plain: nn.Module | None = self._build()

    @property
    def plain_model(self) -> nn.Module:
        """The model as one process would hold it; before it is assembled, or once more after."""
        if self._plain is None:
            self._plain = self._build()
        return self._plain

    def _build(self) -> nn.Module:
        seed_everything(self._settings.seed)
        model = self._task.build_model()
        if self._settings.precision == "float64":
            return model.to(self._device, torch.float64)
        return model.to(self._device)

    def assemble(self, groups: GroupsRef) -> Network:
        """This worker's network. Takes the plain model; all workers of a layout call it together.

        Args:
            groups: gives this worker's groups of the moment.
        """
        model, self._plain = self.plain_model, None
        settings, layout = self._settings, self._settings.layout
        if settings.batch_norm == "synchronized" and layout.data > 1:
            model = synchronize(model, lambda: groups().data)
        seed_modules(model, self.draw, self._device)
        if layout.pipeline > 1:
            from orchestray.trainers.pipeline.assemble import assemble_pipeline

            return assemble_pipeline(self._task, model, settings, groups, self.draw, self._stream_of, self._device)
        return self._whole(model, groups)

    def _whole(self, model: nn.Module, groups: GroupsRef) -> Network:
        settings = self._settings
        forward = Forward(self._task, model, settings.precision, self._device)
        if settings.layout.tensor == 1:
            self._recompute(model)
            return WholeNetwork(forward, self.draw, lambda: self._stream_of("train", groups().coordinate.data))
        from orchestray.trainers.tensor.assemble import split_over_workers

        split = split_over_workers(self._task, model, settings, groups, self._stream_of)
        self._recompute(model)
        return WholeNetwork(
            forward,
            self.draw,
            lambda: self._stream_of("train", groups().coordinate.data),
            rank=groups().rank,
            pieces=split.pieces,
            tensor_group=groups().tensor,
            partial=frozenset(split.partial),
        )

    def _recompute(self, model: nn.Module) -> None:
        if self._settings.recompute != "none":
            from orchestray.trainers.memory import recompute

            recompute(model, self._settings.recompute)
