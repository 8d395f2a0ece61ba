"""The way from the plain model to one worker's stages: find the layers, decide the cuts, split, connect."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from orchestray.platform.comm import objects
from orchestray.platform.data.nested import copied
from orchestray.trainers.core.batch_norm import needs_every_pass
from orchestray.trainers.core.forward import Forward, scalar, user_code, without_gradient
from orchestray.trainers.core.task_calls import loss_of
from orchestray.trainers.parallel.pipeline.balance import Bounds, balanced, by_names
from orchestray.trainers.parallel.pipeline.cutting import layers_of
from orchestray.trainers.parallel.pipeline.network import PipelineNetwork
from orchestray.trainers.parallel.pipeline.schedules import default_stages_per_worker, make_programs, placement
from orchestray.trainers.parallel.pipeline.simulation import live_activations
from orchestray.trainers.parallel.pipeline.stage_set import StageSet

if TYPE_CHECKING:
    from orchestray.platform.data.stream import MicroBatch, SampleStream
    from orchestray.platform.task import Task
    from orchestray.trainers.config.settings import ReplicaSettings
    from orchestray.trainers.core.network import Network
    from orchestray.trainers.core.rng import RngKey
    from orchestray.trainers.layout.groups import Groups
    from orchestray.trainers.layout.tensor_slice import TensorSlice
    from orchestray.trainers.parallel.pipeline.layers import Layers
    from orchestray.trainers.parallel.pipeline.schedules.actions import Program

_LAYERS_A_STAGE = 4
"""Number of layers a stage that are looked for, so that there is a choice of cuts."""


class PipelineAssembler:
    """A builder of a worker's part of a pipeline; it remembers the cuts for when the gang meets again."""

    def __init__(self, task: Task, settings: ReplicaSettings, draw: RngKey, device: torch.device) -> None:
        self._task = task
        self._settings = settings
        self._draw = draw
        self._device = device
        self._bounds: Bounds | None = None
        pipeline = settings.pipeline
        self._stages_per_worker = pipeline.stages_per_worker or default_stages_per_worker(pipeline.schedule)
        self._placement = placement(pipeline.schedule, settings.layout.pipeline, self._stages_per_worker)

    @property
    def num_stages(self) -> int:
        return self._settings.layout.pipeline * self._stages_per_worker

    @property
    def placement(self) -> Sequence[Sequence[int]]:
        """Stages of each worker of the pipeline."""
        return self._placement

    def remember(self, bounds: Bounds) -> None:
        """Use these bounds, which were decided before, instead of measuring."""
        self._bounds = bounds

    def layers(self, model: nn.Module, inputs: Any) -> Layers:
        """Return the model's layers, enough for the stages.

        Args:
            model: the plain model.
            inputs: inputs of a sample.

        Raises:
            ConfigError: the model cannot be cut, or has too few layers.
        """
        split = self._settings.pipeline.split
        # A module that is split over a tensor group stays one layer, or its style would not be called.
        wanted = self.num_stages * (_LAYERS_A_STAGE if self._settings.layout.tensor == 1 else 1)
        layers = layers_of(self._task, model, wanted, split if isinstance(split, list) else (), inputs=inputs)
        layers.check_count(self.num_stages)
        return layers

    def assemble(
        self,
        layers: Layers,
        bounds: Bounds,
        groups: Groups,
        stream: SampleStream,
        pieces: Mapping[str, TensorSlice],
        partial: frozenset[str],
        recompute: Callable[[nn.Module, int], None],
    ) -> Network:
        """Cut the model and connect the stages; all workers call this.

        Args:
            layers: layers of the plain model, whose modules are already split over the tensor group.
            bounds: result of `agree_on_bounds`.
            groups: this worker's groups.
            stream: this replica's training samples.
            pieces: slices of the tensors that are not whole here.
            partial: names of parameters of which each worker of the tensor group computes a part of the gradient.
            recompute: applies `train.recompute` to a stage, given how many micro-batches it holds at once.
        """
        worker = groups.coordinate.pipeline
        stages = {index: layers.stage(*bounds[index]) for index in self._placement[worker]}
        live = self._live_activations()
        for index, stage in stages.items():
            recompute(stage, live[index])
        settings = self._settings
        common: dict[str, Any] = {
            "placement": self._placement,
            "groups": groups,
            "draw": self._draw,
            "precision": settings.precision,
            "device": self._device,
            "tied": layers.tied(bounds),
            "pieces": pieces,
            "partial": partial,
            "form": layers.form,
            "one_sample": stream.one_sample if needs_every_pass(layers.model) else None,
        }
        if settings.is_streaming:
            from orchestray.trainers.parallel.pipeline.pipedream import PipeDreamNetwork

            sync = settings.pipeline.vertical_sync
            return PipeDreamNetwork(self._task, StageSet(stages), stages, vertical_sync=sync, **common)
        return PipelineNetwork(
            self._task, StageSet(stages), stages, program=lambda count: self._program(worker, count), **common
        )

    def _live_activations(self) -> tuple[int, ...]:
        """Return the most micro-batches whose activations each stage holds at once."""
        num_workers, schedule = self._settings.layout.pipeline, self._settings.pipeline.schedule
        return live_activations(
            make_programs(schedule, num_workers, self._stages_per_worker, self._settings.accumulate)
        )

    def _program(self, worker: int, num_micro_batches: int) -> Program:
        num_workers = self._settings.layout.pipeline
        schedule = self._settings.pipeline.schedule
        return make_programs(schedule, num_workers, self._stages_per_worker, num_micro_batches)[worker]

    def agree_on_bounds(self, layers: Layers, groups: Groups, stream: SampleStream) -> Bounds:
        """Return the cuts, the same on every worker: remembered, by name, of equal size, or as rank 0 measures.

        All workers call this, before anything in the model needs other workers: rank 0 measures alone.
        """
        split = self._settings.pipeline.split
        if isinstance(split, list):
            return by_names(layers.names, split, self.num_stages)
        if split == "equal":
            return balanced([1.0] * len(layers), self.num_stages, forbidden=layers.forbidden_cuts)
        # Members of an ensemble with their own task arguments have their own layers.
        group = groups.model if self._settings.has_own_tasks else groups.world
        remembered = [bounds for bounds in objects.gather_json(group, self._bounds) if bounds is not None]
        if remembered:
            bounds = remembered[0]
        else:
            # One worker measures while the others wait: they would disturb it, and times differ.
            measured = None
            if group.rank == 0:
                costs = self._costs(layers, first_micro_batch(stream))
                measured = balanced(costs, self.num_stages, forbidden=layers.forbidden_cuts)
            bounds = objects.share_json(group, measured, 0)
        self._bounds = [(int(start), int(stop)) for start, stop in bounds]
        return self._bounds

    def _costs(self, layers: Layers, micro_batch: MicroBatch) -> list[float]:
        from orchestray.trainers.parallel.pipeline.profile import profile_layers

        forward = Forward(self._task, layers.model, self._settings.precision, self._device)
        batch = forward.place(micro_batch.batch)

        def loss(outputs: Any) -> Tensor:
            found = scalar(loss_of(self._task, outputs, copied(batch)))
            if not found.requires_grad:
                raise without_gradient()
            return found

        with user_code(1, 0), forward.precision():
            costs = profile_layers(layers, batch["inputs"], loss)
        return [cost.compute_s for cost in costs]


def first_micro_batch(stream: SampleStream) -> MicroBatch:
    """Return the first micro-batch that this replica trains on."""
    with stream.epoch(0) as shares:
        return next(iter(shares)).micro_batches[0]
