"""From settings to the network of one worker: the plain model, cut, split and wrapped as the layout says."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from orchestray.platform.errors import ConfigError
from orchestray.trainers.layout.checks import parts_of_one_gradient
from orchestray.trainers.layout.pieces import Piece
from orchestray.trainers.memory import ActivationMeter, find_blocks, recompute
from orchestray.trainers.network.whole import WholeNetwork
from orchestray.trainers.replica.batch_norm import has_synchronized, synchronize
from orchestray.trainers.replica.forward import Forward
from orchestray.trainers.replica.randomness import Draw, building, seed_modules

if TYPE_CHECKING:
    from orchestray.platform.data.stream import SampleStream
    from orchestray.platform.task import Task
    from orchestray.trainers.layout.groups import Groups
    from orchestray.trainers.network.base import Network
    from orchestray.trainers.pipeline.assemble import PipelineAssembler
    from orchestray.trainers.pipeline.balance import Bounds
    from orchestray.trainers.replica.settings import ReplicaSettings
    from orchestray.trainers.tensor.base import Split

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
        """What random numbers depend on; the loop sets the step."""
        self._assembled: nn.Module | None = None
        self.meter = ActivationMeter(self._held)
        """Counts the activations of what was assembled last."""
        self.warnings: list[str] = []
        """What the user should know of the model, on rank 0."""
        self._blocks: list[str] = []
        """Names of the repeated blocks, to be computed again."""
        self.bounds: Bounds = []
        """Where the pipeline of what was assembled last is cut; empty where there is none."""
        self._pipeline: PipelineAssembler | None = None
        self._plan_pipeline()
        self._plain: nn.Module | None = self._build()

    @property
    def plain_model(self) -> nn.Module:
        """The model as one process would hold it; before it is assembled, or once more after."""
        if self._plain is None:
            self._plain = self._build()
        return self._plain

    def _plan_pipeline(self) -> None:
        if self._settings.layout.pipeline > 1:
            from orchestray.trainers.pipeline.assemble import PipelineAssembler

            self._pipeline = PipelineAssembler(self._task, self._settings, self.draw, self._device)

    def _held(self) -> list[Tensor]:
        model = self._assembled
        return [] if model is None else [*model.parameters(), *model.buffers()]

    def _build(self) -> nn.Module:
        with building(self.draw.seed):
            model = self._task.build_model()
        if self._settings.precision == "float64":
            return model.to(self._device, torch.float64)
        return model.to(self._device)

    def become_member(self, seed: int, task: Task) -> None:
        """Build the model of a member of an ensemble, whose seed and task are known once it has met the others."""
        if seed != self.draw.seed or task is not self._task:
            self.draw.seed, self._plain = seed, None
        if task is not self._task:
            self._task = task
            self._plan_pipeline()
        if self._plain is None:
            self._plain = self._build()

    def cut_at(self, bounds: Bounds) -> None:
        """Have the pipeline cut where it was decided before; with no pipeline there is nothing to cut."""
        if self._pipeline is not None:
            self._pipeline.remember(bounds)

    def assemble(self, groups: GroupsRef) -> Network:
        """This worker's network. Takes the plain model; all workers of a layout call it together.

        Args:
            groups: gives this worker's groups of the moment.
        """
        network = self._assemble(groups)
        self._assembled = network.model
        return network

    def _assemble(self, groups: GroupsRef) -> Network:
        model, self._plain = self.plain_model, None
        settings, layout = self._settings, self._settings.layout
        if settings.recompute == "blocks":
            self._blocks = find_blocks(model)
        if layout.model_size > 1 and groups().rank == 0:
            self.warnings = self._warnings(model, groups)
        # Before anything is hooked into the modules, which a trace would record.
        layers = self._pipeline.layers(model) if self._pipeline is not None else None
        self.bounds = bounds = []
        if self._pipeline is not None and layers is not None:
            self.bounds = bounds = self._pipeline.agree_on_bounds(layers, groups(), self._stream(groups))
        if settings.batch_norm == "synchronized" and settings.num_replicas > 1:
            model = synchronize(model, lambda: groups().data)
            _check_aggregation(model, settings)
        seed_modules(model, self.draw, self._device)
        forward = Forward(self._task, model, settings.precision, self._device)
        split = self._split(model, forward, groups) if layout.tensor > 1 else None
        if split is not None and groups().rank == 0:
            self.warnings = [*self.warnings, *split.warnings]
        partial = frozenset(() if split is None else split.partial)
        if self._pipeline is not None and layers is not None:
            pieces, stream = _pieces(model, split), self._stream(groups)
            return self._pipeline.assemble(layers, bounds, groups(), stream, pieces, partial, self._recompute)
        self._recompute(model)
        return WholeNetwork(
            forward,
            self.draw,
            lambda: self._stream(groups),
            rank=0 if split is None else groups().rank,
            pieces=_pieces(model, split),
            tensor_group=None if split is None else groups().tensor,
            partial=partial,
        )

    def _warnings(self, model: nn.Module, groups: GroupsRef) -> list[str]:
        """Modules for which a layout cannot promise the single process's result."""
        from orchestray.trainers.pipeline.assemble import first_micro_batch
        from orchestray.trainers.replica.determinism import (
            repeated_draws,
            repeated_warning,
            unseeded_modules,
            unseeded_warning,
        )

        forward = Forward(self._task, model, self._settings.precision, self._device)
        micro_batch = first_micro_batch(self._stream(groups))
        if micro_batch.num_samples < 2:  # batch normalisation wants two
            return []
        inputs = forward.place(micro_batch.batch)["inputs"]
        with forward.precision():
            texts = [
                unseeded_warning(model, unseeded_modules(model, inputs)),
                repeated_warning(repeated_draws(model, inputs)),
            ]
        return [text for text in texts if text]

    def _stream(self, groups: GroupsRef) -> SampleStream:
        return self._stream_of("train", groups().coordinate.data)

    def _split(self, model: nn.Module, forward: Forward, groups: GroupsRef) -> Split:
        from orchestray.trainers.pipeline.assemble import first_micro_batch
        from orchestray.trainers.tensor.assemble import split_over_workers

        # The first replica's, which has samples; and so that no replica splits in another way than the others. A member
        # of an ensemble has samples, and perhaps a model of a shape, of its own.
        stream = self._stream_of("train", groups().coordinate.data if self._settings.members else 0)
        example = forward.place(first_micro_batch(stream).batch)["inputs"]
        return split_over_workers(self._task, model, self._settings.tensor_plan, groups, example)

    def _recompute(self, model: nn.Module, num_live: int = 1) -> None:
        if self._settings.recompute != "none":
            recompute(
                model,
                self._settings.recompute,
                draw=self.draw,
                meter=self.meter,
                blocks=self._blocks,
                num_live=num_live,
            )


def _check_aggregation(model: nn.Module, settings: ReplicaSettings) -> None:
    """Refuse to choose among gradients of which each is but a part of one: only their sum is a gradient then.

    Raises:
        ConfigError: batch normalisation is over the samples of all workers, and an aggregation chooses among theirs.
    """
    kind = settings.aggregation.get("type", "mean")
    if kind != "mean" and has_synchronized(model):
        raise ConfigError(f"config: {parts_of_one_gradient(kind)}")


def _pieces(model: nn.Module, split: Split | None) -> dict[str, Piece]:
    """Of every tensor that is not whole, or is counted by another worker of the tensor group."""
    if split is None:
        return {}
    pieces = {}
    for name, tensor in model.state_dict().items():
        piece = split.pieces.get(name) or Piece.whole(name, tensor.shape, is_counted=split.rank == 0)
        pieces[name] = piece
    return pieces
