"""From the plain model to one worker's stages: find the layers, decide the cuts, split, connect."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from orchestray.trainers.pipeline.balance import Bounds, balanced, by_names
from orchestray.trainers.pipeline.cutting import layers_of
from orchestray.trainers.pipeline.network import PipelineNetwork
from orchestray.trainers.pipeline.schedules import default_stages_per_worker, make_programs, placement
from orchestray.trainers.pipeline.simulation import live_activations
from orchestray.trainers.pipeline.stage_set import StageSet
from orchestray.trainers.replica import agreement
from orchestray.trainers.replica.forward import Forward

if TYPE_CHECKING:
    from orchestray.platform.data.stream import MicroBatch, SampleStream
    from orchestray.platform.task import Task
    from orchestray.trainers.layout.groups import Groups
    from orchestray.trainers.layout.pieces import Piece
    from orchestray.trainers.network.base import Network
    from orchestray.trainers.pipeline.actions import Program
    from orchestray.trainers.pipeline.layers import Layers
    from orchestray.trainers.replica.randomness import Draw
    from orchestray.trainers.replica.settings import ReplicaSettings

_LAYERS_A_STAGE = 4
"""So many layers a stage are looked for, to have a choice of where to cut."""


class PipelineAssembler:
    """Builds a worker's part of a pipeline; remembers where it was cut, for when the gang meets again."""

    def __init__(self, task: Task, settings: ReplicaSettings, draw: Draw, device: torch.device) -> None:
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
        """The stages of each worker of the pipeline."""
        return self._placement

    def remember(self, bounds: Bounds) -> None:
        """Cut here, as somebody else has decided, in place of measuring."""
        self._bounds = bounds

    def layers(self, model: nn.Module) -> Layers:
        """The model's layers, enough for the stages.

        Raises:
            ConfigError: the model cannot be cut, or has too few layers.
        """
        split = self._settings.pipeline.split
        # What is split over a tensor group stays one layer, or its style would not be called.
        wanted = self.num_stages * (_LAYERS_A_STAGE if self._settings.layout.tensor == 1 else 1)
        layers = layers_of(self._task, model, wanted, split if isinstance(split, list) else ())
        layers.check_count(self.num_stages)
        return layers

    def assemble(
        self,
        layers: Layers,
        bounds: Bounds,
        groups: Groups,
        stream: SampleStream,
        pieces: Mapping[str, Piece],
        partial: frozenset[str],
        recompute: Callable[[nn.Module, int], None],
    ) -> Network:
        """Cut and connect; all workers call.

        Args:
            layers: of the plain model, its modules split over the tensor group already.
            bounds: of `agree_on_bounds`.
            groups: of this worker.
            stream: this replica's training samples.
            pieces: of the tensors that are not whole here.
            partial: parameters of whose gradient each worker of the tensor group computes a part.
            recompute: applies `train.recompute` to a stage, told how many micro-batches it holds at once.
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
            "empty_batch": stream.empty_batch,
        }
        if settings.is_streaming:
            from orchestray.trainers.pipeline.pipedream import PipeDreamNetwork

            sync = settings.pipeline.vertical_sync
            return PipeDreamNetwork(self._task, StageSet(stages), stages, vertical_sync=sync, **common)
        return PipelineNetwork(
            self._task, StageSet(stages), stages, program=lambda count: self._program(worker, count), **common
        )

    def _live_activations(self) -> tuple[int, ...]:
        """Micro-batches whose activations each stage holds at once, at most."""
        num_workers, schedule = self._settings.layout.pipeline, self._settings.pipeline.schedule
        return live_activations(
            make_programs(schedule, num_workers, self._stages_per_worker, self._settings.accumulate)
        )

    def _program(self, worker: int, num_micro_batches: int) -> Program:
        num_workers = self._settings.layout.pipeline
        schedule = self._settings.pipeline.schedule
        return make_programs(schedule, num_workers, self._stages_per_worker, num_micro_batches)[worker]

    def agree_on_bounds(self, layers: Layers, groups: Groups, stream: SampleStream) -> Bounds:
        """Where to cut, the same on every worker: as before, as named, as counted, or as rank 0 measures.

        All workers call, before anything in the model needs other workers: one measures alone.
        """
        split = self._settings.pipeline.split
        if isinstance(split, list):
            return by_names(layers.names, split, self.num_stages)
        if split == "equal":
            return balanced([1.0] * len(layers), self.num_stages, forbidden=layers.forbidden_cuts)
        # Members of an ensemble with arguments of their own have layers of their own.
        group = groups.model if self._settings.has_own_tasks else groups.world
        remembered = [bounds for bounds in agreement.gather_json(group, self._bounds) if bounds is not None]
        if remembered:
            bounds = remembered[0]
        else:
            # One worker measures while the others wait: they would disturb it, and times differ.
            measured = None
            if group.rank == 0:
                costs = self._costs(layers, first_micro_batch(stream))
                measured = balanced(costs, self.num_stages, forbidden=layers.forbidden_cuts)
            bounds = agreement.share_json(group, measured, 0)
        self._bounds = [(int(start), int(stop)) for start, stop in bounds]
        return self._bounds

    def _costs(self, layers: Layers, micro_batch: MicroBatch) -> list[float]:
        from orchestray.trainers.pipeline.profile import profile_layers

        forward = Forward(self._task, layers.model, self._settings.precision, self._device)
        batch = forward.place(micro_batch.batch)
        with forward.precision():
            costs = profile_layers(layers, batch["inputs"], lambda outputs: self._task.loss(outputs, batch))
        return [cost.compute_s for cost in costs]


def first_micro_batch(stream: SampleStream) -> MicroBatch:
    """The first that this replica trains on."""
    with stream.epoch(0) as shares:
        return next(iter(shares)).micro_batches[0]
