"""The way from settings to one worker's network: the plain model, cut, split and wrapped as the layout says."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from orchestray.platform.errors import ConfigError
from orchestray.platform.task import asked_by
from orchestray.trainers.core.batch_norm import (
    aggregation_conflict,
    has_synchronized,
    synchronize,
    without_torchs_group,
)
from orchestray.trainers.core.buffer_kinds import Kind, kinds_of, transient
from orchestray.trainers.core.forward import Forward, user_code
from orchestray.trainers.core.gathering import Gathering
from orchestray.trainers.core.inputs import inputs_of
from orchestray.trainers.core.modes import begin_training
from orchestray.trainers.core.own_gradients import mark, own_gradients
from orchestray.trainers.core.plain_model import build_model
from orchestray.trainers.core.rng import RngKey, building, generators_put_back, seed_modules
from orchestray.trainers.core.weights import convert
from orchestray.trainers.layout.tensor_slice import TensorSlice
from orchestray.trainers.parallel.recompute import ActivationMeter, find_blocks, recompute
from orchestray.trainers.parallel.same_loss import loss_of_whole, refuse_another_loss
from orchestray.trainers.parallel.whole_model import WholeNetwork

if TYPE_CHECKING:
    from orchestray.platform.data.stream import MicroBatch, SampleStream
    from orchestray.platform.task import Task
    from orchestray.trainers.config.settings import ReplicaSettings
    from orchestray.trainers.core.network import Network
    from orchestray.trainers.layout.groups import Groups
    from orchestray.trainers.parallel.pipeline.assemble import PipelineAssembler
    from orchestray.trainers.parallel.pipeline.balance import Bounds
    from orchestray.trainers.parallel.tensor.base import Split

GroupsRef = Callable[[], "Groups"]


class Assembler:
    """A builder of the plain model, and from it of a worker's network, once for each generation of the gang."""

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
        self.draw = RngKey(settings.seed)
        """Key that random numbers depend on; the loop sets its step."""
        self._assembled: nn.Module | None = None
        self.meter = ActivationMeter(self._held)
        """Meter of the activations of the model that was assembled last."""
        self.warnings: list[str] = []
        """Warnings about the model for the user; filled on rank 0 only."""
        self._blocks: list[str] = []
        """Names of the repeated blocks that are to be recomputed."""
        self.bounds: Bounds = []
        """Layers of each pipeline stage of what was assembled last, as (start, stop); empty without a pipeline."""
        self.built: dict[str, Kind] = {}
        """Buffers of the plain model as it was built."""
        self._is_compared = False
        """True once a cut model was not refused for its loss; a survivor does not compare it again."""
        self._pipeline: PipelineAssembler | None = None
        self._plan_pipeline()
        self._plain: nn.Module | None = self._build()

    @property
    def plain_model(self) -> nn.Module:
        """The model as one process would hold it; built again if it has been assembled."""
        if self._plain is None:
            self._plain = self._build()
        return self._plain

    def _plan_pipeline(self) -> None:
        if self._settings.layout.pipeline > 1:
            from orchestray.trainers.parallel.pipeline.assemble import PipelineAssembler

            self._pipeline = PipelineAssembler(self._task, self._settings, self.draw, self._device)

    def _held(self) -> list[Tensor]:
        model = self._assembled
        return [] if model is None else [*model.parameters(), *model.buffers()]

    def _build(self) -> nn.Module:
        model = self._built_with(self.draw.seed)
        self.built = kinds_of(model)
        return model

    def _built_with(self, seed: int) -> nn.Module:
        with building(seed):
            model = build_model(self._task)
        if self._settings.precision == "float64":
            convert(model, torch.float64)
        return begin_training(without_torchs_group(model.to(self._device)))

    def build_another(self) -> nn.Module:
        """Return another plain model with other random values; the generators are as before."""
        with generators_put_back():
            return self._built_with(self.draw.seed + 1)

    def become_member(self, seed: int, task: Task) -> None:
        """Build the model of a member of an ensemble; its seed and task are known once it has met the other members."""
        if seed != self.draw.seed or task is not self._task:
            self.draw.seed, self._plain = seed, None
        if task is not self._task:
            self._task = task
            self._plan_pipeline()
        if self._plain is None:
            self._plain = self._build()

    def cut_at(self, bounds: Bounds) -> None:
        """Make the pipeline cut at these bounds, which were decided before; do nothing without a pipeline."""
        if self._pipeline is not None:
            self._pipeline.remember(bounds)

    def assemble(self, groups: GroupsRef) -> Network:
        """Return this worker's network, built from the plain model; all workers of a layout call this together.

        Args:
            groups: returns this worker's current groups.
        """
        if self._settings.layout.model_size == 1:
            network = self._assemble(groups)
        else:
            micro_batch, precision = self._example(groups), self._settings.precision
            loss = None
            if not self._is_compared:
                forward = Forward(self._task, self.plain_model, precision, self._device)
                loss = loss_of_whole(forward, micro_batch, self._stream(groups).one_sample())
            network = self._assemble(groups)
            self.draw.step = 1  # no loss is asked for a step before the first
            refuse_another_loss(loss, network, micro_batch, groups().model, precision=precision)
            self._is_compared = True
        self._assembled = network.model
        return network

    def _assemble(self, groups: GroupsRef) -> Network:
        model, self._plain = self.plain_model, None
        settings, layout = self._settings, self._settings.layout
        if settings.recompute != "none":
            self._blocks = find_blocks(model)
        if layout.model_size > 1 and groups().rank == 0:
            self.warnings = self._warnings(model, groups)
        if layout.model_size > 1 or settings.exchange.get("shard") == "parameters":
            self._look_for_own_gradients(model, groups)
        # Before anything is hooked into the modules: a trace would record the hooks.
        layers = None
        if self._pipeline is not None:
            layers = self._pipeline.layers(model, inputs_of(self._stream(groups).one_sample()))
        self.bounds = bounds = []
        if self._pipeline is not None and layers is not None:
            self.bounds = bounds = self._pipeline.agree_on_bounds(layers, groups(), self._stream(groups))
        if settings.batch_norm == "synchronized" and settings.num_replicas > 1:
            model = synchronize(model, lambda: groups().data)
        _check_aggregation(self._task, model, settings)
        seed_modules(model, self.draw, self._device)
        forward = Forward(self._task, model, settings.precision, self._device)
        if "gather" in asked_by(self._task):
            forward.gather = Gathering(lambda: groups().data)
        split = self._split(model, forward, groups) if layout.tensor > 1 else None
        if split is not None and groups().rank == 0:
            self.warnings = [*self.warnings, *split.warnings]
        partial = frozenset(() if split is None else split.partial)
        if self._pipeline is not None and layers is not None:
            pieces, stream = _pieces(model, split), self._stream(groups)
            return self._pipeline.assemble(layers, bounds, groups(), stream, pieces, partial, self._recompute)
        self._recompute(model, inputs=lambda: inputs_of(self._stream_of("train", 0).one_sample()))
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
        """Return warnings on modules for which a layout cannot promise the result of a single process."""
        from orchestray.trainers.core.unseeded_rng import (
            repeated_draws,
            repeated_warning,
            unseeded_modules,
            unseeded_warning,
        )
        from orchestray.trainers.parallel.pipeline.assemble import first_micro_batch

        forward = Forward(self._task, model, self._settings.precision, self._device)
        micro_batch = first_micro_batch(self._stream(groups))
        if micro_batch.num_samples < 2:  # batch normalisation needs two
            return []
        inputs = forward.place(micro_batch.batch)["inputs"]
        with user_code(1, groups().rank), forward.precision():
            texts = [
                unseeded_warning(model, unseeded_modules(model, inputs)),
                repeated_warning(repeated_draws(model, inputs)),
            ]
        return [text for text in texts if text]

    def _look_for_own_gradients(self, model: nn.Module, groups: GroupsRef) -> None:
        """Prepare the model for gradients that it takes itself, or refuse a layout in which it cannot.

        Raises:
            ConfigError: the gradients would need what other workers hold.
        """
        settings = self._settings
        forward = Forward(self._task, model, settings.precision, self._device)
        found = own_gradients(forward, self._example(groups).batch)
        # Scalars are neither sharded nor split, but only one stage of a pipeline has them.
        if "parameters" in found or ("scalars" in found and settings.layout.pipeline > 1):
            raise ConfigError(_of_whole_parameters(settings))
        is_whole = settings.exchange.get("shard") != "parameters"
        if "writes" in found and not (is_whole and (not settings.is_streaming or settings.layout.data == 1)):
            key, other = ("network.schedule", "1f1b") if is_whole else ("exchange.shard", "gradients")
            raise ConfigError(
                f"config: strategy.{key}: the model's forward pass changes a parameter that is not trained, which the "
                f"replicas would not agree on; make it a buffer, or set this to {other}"
            )
        if "returned" in found and settings.exchange.get("shard") == "parameters":
            raise ConfigError(
                "config: strategy.exchange.shard: the model returns a parameter, whose memory is given back by then; "
                "return a copy of it (.clone()), or set it to gradients"
            )
        told = {"forward": "the model's forward", "loss": "the task's loss"}
        what = " and ".join(told[name] for name in sorted(found & told.keys()))
        if what and settings.layout.tensor > 1:
            raise ConfigError(
                f"config: strategy.network.tensor: {what} takes gradients itself, and those through split layers can "
                "be taken once only; set it to 1, and use strategy.network.data"
            )
        if "loss" in found and settings.layout.pipeline > 1:
            raise ConfigError(
                "config: strategy.network.pipeline: the task's loss takes gradients itself, and they would end at the "
                "cuts; set it to 1, or take them inside one module of the model"
            )
        if "loss" in found and settings.exchange.get("shard") == "parameters":
            raise ConfigError(
                "config: strategy.exchange.shard: the task's loss takes gradients itself, and the model has then given "
                "its parameters back; take them in the model's forward, or set it to gradients"
            )
        if "forward" in found and settings.layout.model_size == 1:
            mark(model)
            warning = (
                "The model takes gradients in its forward pass, so each worker gathers all parameters at once for a "
                "pass, and saves memory only between passes; strategy.exchange.shard: gradients is faster."
            )
            self.warnings = [*self.warnings, warning] if groups().rank == 0 else []

    def _example(self, groups: GroupsRef) -> MicroBatch:
        """Return a micro-batch, the same on every worker that splits the same model."""
        from orchestray.trainers.parallel.pipeline.assemble import first_micro_batch

        # The first replica's stream surely has samples, and one stream makes all replicas split alike. A member of an
        # ensemble has its own samples, and perhaps a model of its own shape.
        stream = self._stream_of("train", groups().coordinate.data if self._settings.members else 0)
        return first_micro_batch(stream)

    def _stream(self, groups: GroupsRef) -> SampleStream:
        return self._stream_of("train", groups().coordinate.data)

    def _split(self, model: nn.Module, forward: Forward, groups: GroupsRef) -> Split:
        from orchestray.trainers.parallel.tensor.assemble import split_over_workers

        example = forward.place(self._example(groups).batch)["inputs"]
        kind, precision = self._settings.tensor_plan, forward.precision
        return split_over_workers(self._task, model, kind, groups, example, precision)

    def _recompute(self, model: nn.Module, num_live: int = 1, inputs: Callable[[], Any] | None = None) -> None:
        if self._settings.recompute != "none":
            recompute(
                model,
                self._settings.recompute,
                draw=self.draw,
                meter=self.meter,
                blocks=self._blocks,
                num_live=num_live,
                inputs=inputs,
            )


def _of_whole_parameters(settings: ReplicaSettings) -> str:
    """Return why a loss that uses the model's parameters is refused."""
    if settings.layout.model_size == 1:
        key, advice = "strategy.exchange.shard", "set it to gradients"
    else:
        key = "strategy.network.pipeline" if settings.layout.pipeline > 1 else "strategy.network.tensor"
        advice = "set it to 1, and use strategy.network.data"
    return (
        f"config: {key}: the task's loss uses parameters of the model itself, as a penalty does, and a worker has only "
        f"a part of them; {advice}, or penalise them by train.optimizer.weight_decay"
    )


def _check_aggregation(task: Task, model: nn.Module, settings: ReplicaSettings) -> None:
    """Raise if an aggregation would choose among partial gradients: only their sum is a gradient.

    Raises:
        ConfigError: batch normalisation or the loss spans all workers, and the aggregation chooses among their
            gradients.
    """
    kind = settings.aggregation.get("type", "mean")
    if kind != "mean" and has_synchronized(model):
        raise ConfigError(f"config: {aggregation_conflict(kind)}")
    if kind != "mean" and "gather" in asked_by(task):
        raise ConfigError(
            f"config: strategy.aggregation: {kind} chooses among the workers' gradients, which a loss that gathers "
            "their outputs makes parts of one; use type: mean, or a loss without gather"
        )


def _pieces(model: nn.Module, split: Split | None) -> dict[str, TensorSlice]:
    """Return the slice of every parameter and buffer, by name; empty without a split."""
    if split is None:
        return {}
    pieces = {}
    for name, tensor in {**model.state_dict(), **transient(model)}.items():
        piece = split.pieces.get(name) or TensorSlice.whole(name, tensor.shape, is_counted=split.rank == 0)
        pieces[name] = piece
    return pieces
