"""A process of a divided model that is served: a stage of its pipeline, its part of every layer, or both."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from orchestray.platform.actors.gpus import own_gpu
from orchestray.platform.comm import objects
from orchestray.platform.comm.collective import Collective, PeerLostError
from orchestray.platform.data.even_split import split_evenly
from orchestray.platform.data.nested import map_tensors
from orchestray.platform.errors import ConfigError, OrchestrayError
from orchestray.platform.run.model_files import load_model_json
from orchestray.platform.task import TaskSource
from orchestray.serving.models.content import check_content
from orchestray.serving.models.errors import ModelError
from orchestray.serving.models.quantize import num_bytes
from orchestray.serving.models.served import by_name
from orchestray.serving.models.transfer import as_numpy_has_it
from orchestray.serving.sharded.partition import ServedNetwork, cut, file_names, fill, plain_model
from orchestray.trainers import tasks
from orchestray.trainers.core.forward import Forward
from orchestray.trainers.core.inputs import InputForm
from orchestray.trainers.core.own_gradients import WithoutGradients
from orchestray.trainers.core.own_saving import saved_otherwise
from orchestray.trainers.core.weights import convert, in_precision
from orchestray.trainers.layout.degrees import Layout
from orchestray.trainers.layout.groups import Groups
from orchestray.trainers.parallel.pipeline.action_log import ActionLog
from orchestray.trainers.parallel.pipeline.links import Links, Values
from orchestray.trainers.parallel.pipeline.runner import StageForward
from orchestray.trainers.parallel.pipeline.schedules.actions import Kind
from orchestray.trainers.saved.checkpoint_model import BUFFERS
from orchestray.trainers.saved.interface import saved_example

if TYPE_CHECKING:
    from orchestray.platform.task import Batch

Arrays = dict[str, "np.ndarray[Any, Any]"]

_COUNTED_SAMPLES = 8
"""Size of the batch for which the costs of layers are counted."""
_BROKEN = Values((), ())
"""Values that a stage sends if it failed to compute them, so that later stages do not wait for ever."""


class StageFailedError(OrchestrayError):
    """The error that an earlier stage failed on the batch; that stage's error has the reason."""


class ForwardWorker:
    """A worker that holds its part of a trained model, and computes its part of every batch.

    All workers get the same batches in the same order. Batches follow one another through the stages: while the last
    stage computes one, the first computes the next.

    Args:
        model_directory: the run's `model`.
        network: division of the model.
        use_gpu: True if there is a GPU for this process.
        precision: `float32` (as it was trained) or `bfloat16` (autocast).
        content: result of `content_of` for the run when the version started; empty: not checked.
    """

    def __init__(
        self,
        model_directory: str | os.PathLike[str],
        network: ServedNetwork,
        use_gpu: bool = False,
        precision: str = "float32",
        content: str = "",
    ) -> None:
        self._directory = Path(model_directory)
        self._content = content
        check_content(self._directory, content)  # otherwise layers of two models could answer together, unnoticed
        self._network = network
        self._layout = Layout(tensor=network.tensor, pipeline=network.pipeline)
        self._device = own_gpu() if use_gpu else torch.device("cpu")
        described = load_model_json(self._directory)
        if described.get("ensemble"):
            raise ConfigError(
                "The members of an ensemble are served in one process, or by replicas; strategy.network divides single "
                "models. Set its tensor and pipeline to 1."
            )
        self._task = tasks.build(TaskSource.from_json(described["task"]))
        self._precision = "float64" if described.get("precision") == "float64" else precision
        sample = saved_example(self._directory, lambda: self._task)
        self._example = map_tensors(lambda tensor: torch.stack([tensor] * _COUNTED_SAMPLES), sample)
        self._form = InputForm(self._example)
        self._without_gradients = WithoutGradients()
        self._groups: Groups | None = None
        self._links: Links | None = None
        self._part: nn.Module | None = None
        self._forward: Forward | None = None
        self._cuts: list[str] = []
        """First layer of each stage."""

    def connect(self, world: Collective | None = None) -> dict[str, Any]:
        """Connect to the other workers, and load this one's part of the model if not done yet.

        Args:
            world: group of all workers; default: the process's own group.

        Returns:
            `bytes`: size of this worker's part; `tensors`: names of its tensors.
        """
        self.abort()
        if world is None:
            world = Collective.of_this_process()
        world.waits_for_device = False  # each layer would wait; an answer is confirmed as a whole
        self._groups = Groups(self._layout, world)
        if self._forward is None:
            self._take_part()
        self._check_cuts(world)
        if self._network.pipeline > 1:
            self._links = self._link(self._groups)
        part = self._part
        assert part is not None
        return {"bytes": num_bytes(part), "tensors": sorted(part.state_dict())}

    def _take_part(self) -> None:
        place, last = self._current_groups().coordinate.pipeline, self._network.pipeline - 1
        is_split = self._network.tensor > 1
        model = plain_model(self._task, on_meta=not is_split)
        if saved_otherwise(model) or load_model_json(self._directory).get(BUFFERS):
            raise ConfigError(
                "The model saves its state in a way of its own, or has buffers that have grown in training, so it is "
                "loaded as a whole; strategy.network divides plain models. Set its tensor and pipeline to 1."
            )
        if self._precision == "float64":
            convert(model, torch.float64)
        names = file_names(model)
        example = self._example
        if self._precision == "float64":
            example = map_tensors(lambda t: t.to(in_precision(t.dtype, torch.float64)), example)
        layers, bounds = cut(self._task, model, self._network, example) if last else (None, [])
        self._cuts = [] if layers is None else [layers.names[start] for start, _ in bounds]
        if is_split:  # the whole model is held until its layers are split: the split is checked against its outputs
            fill(model, self._directory, names)
            self._split(model, example)
        part = model if layers is None else layers.stage(*bounds[place])
        if not is_split:
            fill(part, self._directory, names)
        check_content(self._directory, self._content)  # it may have been written meanwhile
        self._part = part.to(self._device).eval().requires_grad_(False)
        if layers is None:
            self._forward = Forward(self._task, part, self._precision, self._device)
        else:
            self._forward = StageForward(
                self._task,
                part,
                self._precision,
                self._device,
                form=self._form,
                is_first=place == 0,
                is_last=place == last,
            )

    def _check_cuts(self, world: Collective) -> None:
        """Refuse stages that do not follow each other: each worker cuts the model by itself."""
        cuts = objects.gather_json(world, self._cuts)
        other = next((rank for rank, one in enumerate(cuts) if one != cuts[0]), None)
        if other is not None:
            raise ModelError(
                f"The workers cut the model differently: worker 0 before {', '.join(cuts[0])}, worker {other} before "
                f"{', '.join(cuts[other])}. Give all nodes the same versions of torch and of the task's code, or name "
                "the first layers of the stages in strategy.network.split."
            )

    def _split(self, model: nn.Module, example: Any) -> None:
        """Split the layers over the tensor group, in place."""
        from orchestray.trainers.parallel.tensor.assemble import split_over_workers

        split_over_workers(self._task, model, self._network.plan, self._current_groups, example)

    def _link(self, groups: Groups) -> Links:
        ranks = groups.layout.group(groups.rank, "pipeline")
        place = groups.coordinate.pipeline
        # In the order of the pairs, the same on every worker, or two could wait for each other.
        peers = [peer for peer in (place - 1, place + 1) if 0 <= peer < len(ranks)]
        channels = {peer: groups.channel(ranks[peer], "serving") for peer in peers}
        return Links(range(len(ranks)), place, channels, self._device, ActionLog(groups.rank), groups.waiting)

    def _current_groups(self) -> Groups:
        if self._groups is None:
            raise PeerLostError("This worker has not met the others.")
        return self._groups

    # -- batches -------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def run(self, num_samples: int, inputs: Arrays | None) -> Arrays | None:
        """Compute this worker's part of a batch.

        Args:
            num_samples: size of the batch.
            inputs: arrays [samples, ...]; only for the workers of the first stage.

        Returns:
            The model's outputs by name, [samples, ...] each, from the first worker of the last stage; else None.

        Raises:
            ModelError: the model raised.
            StageFailedError: it raised in an earlier stage.
            PeerLostError: another worker is gone.
        """
        count = min(self._network.num_micro_batches, num_samples)
        found = []
        error: Exception | None = None
        for number, (start, stop) in enumerate(split_evenly(num_samples, count)):
            rows = None if inputs is None else {name: array[start:stop] for name, array in inputs.items()}
            try:
                found.append(self._micro_batch(number, rows))
            except PeerLostError:
                raise
            except Exception as raised:  # noqa: BLE001 - the user's model may raise anything
                error = error or raised
        if error is not None:
            raise error if isinstance(error, OrchestrayError) else _failure(error)
        self._current_groups().world.confirm()
        is_answering = self._current_groups().coordinate.tensor == 0
        if not self._is_last or not is_answering:
            return None
        return {name: np.concatenate([arrays[name] for arrays in found]) for name in found[0]}

    @property
    def _is_last(self) -> bool:
        return self._current_groups().coordinate.pipeline == self._network.pipeline - 1

    def _micro_batch(self, number: int, rows: Arrays | None) -> Arrays:
        """Run one micro-batch through this worker's part: one message in and one out, even after an error."""
        forward, place = self._forward, self._current_groups().coordinate.pipeline
        assert forward is not None
        given = None
        if self._links is not None and place > 0:
            given = self._links.receive(Kind.FORWARD, place, number)
        sent = _BROKEN
        try:
            if given is not None and not given.tensors:
                raise StageFailedError("A stage before this one failed on the batch.")
            batch = {}
            if rows is not None:
                named = {name: torch.from_numpy(np.array(array)) for name, array in rows.items()}
                batch = {"inputs": self._form.filled([named[name] for name in self._form.names])}
            outputs = self._without_gradients(partial(self._outputs, forward, given), batch)
            if self._is_last:
                return {name: as_numpy_has_it(tensor).cpu().numpy() for name, tensor in by_name(outputs)[0].items()}
            sent = Values(tuple(outputs), (False,) * len(outputs))
        finally:
            if self._links is not None and not self._is_last:
                self._links.send(Kind.FORWARD, place + 1, number, sent)
        return {}

    def _outputs(self, forward: Forward, given: Values | None, batch: Batch) -> Any:
        if given is not None and isinstance(forward, StageForward):
            forward.values = tuple(tensor for tensor in given.tensors if tensor is not None)
        return forward.outputs(batch)[0]

    def rest(self) -> None:
        """Do nothing: the answer tells the caller that this worker has finished its earlier calls."""

    # -- called from other threads -------------------------------------------------------------------------------------

    def abort(self) -> None:
        """Abort whatever this worker waits for from the others."""
        if self._groups is not None:
            self._groups.abort()
        if self._links is not None:
            self._links.close()

    def close(self) -> None:
        """Disconnect from the others."""
        self.abort()
        self._groups = self._links = None


def _failure(error: Exception) -> ModelError:
    failed = ModelError(f"The model raised {type(error).__name__} on this batch: {error}")
    failed.__cause__ = error
    return failed
