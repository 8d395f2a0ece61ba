"""One stage of a pipeline at work: forward and backward of a micro-batch, and what is kept in between."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from orchestray.platform.data.nested import tensors_in
from orchestray.trainers.core.batch_norm import not_counted
from orchestray.trainers.core.forward import Forward, evaluation_code, refuse_hidden, user_code
from orchestray.trainers.core.inputs import ONE_TENSOR, InputForm, inputs_of
from orchestray.trainers.core.own_gradients import WithoutGradients
from orchestray.trainers.core.rng import seed_pass
from orchestray.trainers.parallel.pipeline.links import Values
from orchestray.trainers.parallel.pipeline.split_backward import SplitBackward

if TYPE_CHECKING:
    from orchestray.platform.data.stream import MicroBatch
    from orchestray.platform.task import Batch, Task
    from orchestray.trainers.core.rng import RngKey

Gradients = Sequence[Tensor | None]


class Job(NamedTuple):
    """A micro-batch with the weight of its loss."""

    batch: Batch
    micro_batch: MicroBatch | None
    """The micro-batch; None for a sample that does not count: batch normalisation needs every replica."""
    weight: float
    step: int
    number: int
    """Index of the micro-batch in its batch, from 0; random numbers depend on it."""


class StageForward(Forward):
    """A `Forward` that calls one stage instead of the whole model, with the whole
    model's precision, loss and errors.
    """

    def __init__(
        self,
        task: Task,
        stage: nn.Module,
        precision: str,
        device: torch.device,
        *,
        form: InputForm = ONE_TENSOR,
        is_first: bool,
        is_last: bool,
    ) -> None:
        super().__init__(task, stage, precision, device)
        self._form = form
        self.is_first = is_first
        self.is_last = is_last
        self.values: tuple[Tensor, ...] = ()
        """Values from the previous stage."""

    def outputs(self, batch: Batch) -> tuple[Any, Batch]:
        """Return the stage's values (the model's outputs on the last stage), and the part of the batch it uses."""
        placed: Batch = {}
        if self.is_first or (self.is_last and batch):  # a model that is served has inputs alone
            placed = self.place(batch if self.is_last else {"inputs": inputs_of(batch)})
        values, self.values = self.values, ()
        if self.is_first:
            values = self._form.tensors(placed["inputs"])
        with self.precision():
            results = self.model(*values)
        return (results[0] if self.is_last else results), placed


@dataclass(slots=True)
class _Pass:
    """The state kept of a micro-batch between its forward and its backward pass."""

    leaves: list[Tensor | None]
    """Inputs of the stage; None where no gradient is wanted."""
    roots: list[tuple[int, GradientEdge]] = field(default_factory=list)
    """Index and place in the graph of each output whose gradient will come; the tensors themselves may be freed."""
    gradients: list[Tensor] = field(default_factory=list)
    """Gradients of the roots; on the last stage known from the beginning."""
    split: SplitBackward | None = None
    """State between the halves of a backward pass."""


class StageRunner:
    """A runner of one stage, which keeps its live micro-batches.

    Args:
        index: the stage's number in the pipeline.
        forward: calls the stage.
        draw: key that random numbers depend on; set before each pass.
        rank: this worker's rank, for messages.
        meets_in_passes: True if a stage, perhaps another one, needs every replica in every pass.
    """

    def __init__(
        self, index: int, forward: StageForward, draw: RngKey, rank: int, *, meets_in_passes: bool = False
    ) -> None:
        self.index = index
        self.is_first = forward.is_first
        self.is_last = forward.is_last
        self._forward = forward
        self._draw = draw
        self._rank = rank
        self._meets_in_passes = meets_in_passes
        # Metrics may take gradients where the loss takes none.
        self._without_gradients = {loss_only: WithoutGradients(forward.model) for loss_only in (False, True)}
        self._live: dict[int, _Pass] = {}
        self._peak_live = 0

    @property
    def num_live(self) -> int:
        """Number of micro-batches whose activations are held."""
        return len(self._live)

    @property
    def peak_live(self) -> int:
        """Most micro-batches held at once."""
        return self._peak_live

    def run_report(self) -> dict[str, int]:
        """Return the number of this `stage`, its `parameters`, and `most_held`: micro-batches that it held at once."""
        num_parameters = sum(parameter.numel() for parameter in self._forward.model.parameters())
        return {"stage": self.index, "parameters": num_parameters, "most_held": self._peak_live}

    def forward(self, key: int, given: Values | None, job: Job) -> tuple[Values, float]:
        """Run a training forward pass.

        Args:
            key: identifies the micro-batch until its backward pass is done.
            given: values from the previous stage; None for the first stage.
            job: the micro-batch.

        Returns:
            The values for the next stage, and the loss (0 except on the last stage).

        Raises:
            TrainingError: the loss is not a finite scalar, or the user's code failed.
        """
        self._seed(job)
        seed_pass(self._draw, self._forward.device)
        kept = _Pass([] if given is None else self._enter(given))
        value = 0.0
        sent = Values((), ())
        if self.is_last:
            with user_code(job.step, self._rank), self._counting(job):
                loss, value = self._loss(job)
            if loss is not None:
                kept.roots = [(0, get_gradient_edge(loss))]
                kept.gradients = [torch.full_like(loss, float(job.micro_batch is not None))]
        else:
            with user_code(job.step, self._rank), self._counting(job):
                outputs, _ = self._forward.outputs(job.batch)
            sent = Values(tuple(outputs), tuple(bool(tensor.requires_grad) for tensor in outputs))
            kept.roots = [(number, get_gradient_edge(t)) for number, t in enumerate(outputs) if t.requires_grad]
        self._live[key] = kept
        self._peak_live = max(self._peak_live, len(self._live))
        return sent, value

    def evaluate(
        self, given: Values | None, micro_batch: MicroBatch, *, loss_only: bool = False
    ) -> tuple[Values, dict[str, Any]]:
        """Run a forward pass without a backward pass; return the values for the
        next stage, and on the last stage the loss and, unless `loss_only`, the metrics.
        """

        def run(batch: Batch) -> tuple[Values, dict[str, Any]]:
            self._forward.values = () if given is None else _all_there(given)
            if self.is_last:
                part = replace(micro_batch, batch=batch)
                return Values((), ()), self._forward.metrics(part, step=self._draw.step, loss_only=loss_only)
            outputs, _ = self._forward.outputs(batch)
            return Values(tuple(outputs), (False,) * len(outputs)), {}

        with evaluation_code(self._draw.step, self._rank, loss_only=loss_only):
            return self._without_gradients[loss_only](run, micro_batch.batch)

    def expects_gradients(self, key: int) -> bool:
        """Return True if the next stage will send gradients of what it got."""
        return not self.is_last and bool(self._live[key].roots)

    def gives_gradients(self, key: int) -> bool:
        """Return True if the previous stage waits for gradients of what it sent."""
        return any(leaf is not None for leaf in self._live[key].leaves)

    def take_gradients(self, key: int, gradients: Gradients) -> None:
        """Store the next stage's gradients: one for each value it got, or None."""
        kept = self._live[key]
        there = [(root, gradients[root[0]]) for root in kept.roots]
        kept.roots = [root for root, gradient in there if gradient is not None]
        kept.gradients = [gradient for _, gradient in there if gradient is not None]

    def backward(self, key: int, job: Job) -> Gradients:
        """Run the whole backward pass: add to the parameters' `.grad`, and return the gradients of the inputs."""
        self._seed(job)
        kept = self._live.pop(key)
        if kept.roots:
            with user_code(job.step, self._rank), self._counting(job):
                torch.autograd.backward([edge for _, edge in kept.roots], kept.gradients)
        return [None if leaf is None else leaf.grad for leaf in kept.leaves]

    def backward_input(self, key: int, job: Job) -> Gradients:
        """Run the first half of a backward pass, and return the gradients of the inputs."""
        kept = self._live[key]
        leaves = [leaf for leaf in kept.leaves if leaf is not None]
        if not kept.roots or not leaves:  # no stage waits for an input's gradient: the second half does all
            return [None] * len(kept.leaves)
        self._seed(job)
        with user_code(job.step, self._rank), self._counting(job):
            kept.split = SplitBackward([edge for _, edge in kept.roots], kept.gradients, leaves)
            found = iter(kept.split.input_gradients())
        kept.roots, kept.gradients = [], []
        return [None if leaf is None else next(found) for leaf in kept.leaves]

    def backward_weight(self, key: int, job: Job) -> None:
        """Run the second half of a backward pass: add to the parameters' `.grad`."""
        if self._live[key].split is None:
            self.backward(key, job)
            return
        self._seed(job)
        split = self._live.pop(key).split
        assert split is not None
        with user_code(job.step, self._rank), self._counting(job):
            split.accumulate()

    def forget(self) -> None:
        """Drop what a failed step has left."""
        self._live.clear()

    def _seed(self, job: Job) -> None:
        # The backward pass may draw too: recomputed activations must be the same.
        self._draw.step = job.step
        self._draw.micro_batch = job.number

    def _counting(self, job: Job) -> AbstractContextManager[None]:
        return contextlib.nullcontext() if job.micro_batch is not None else not_counted(self._forward.model)

    def _enter(self, given: Values) -> list[Tensor | None]:
        """Turn received values into the stage's inputs, and return their leaves."""
        leaves: list[Tensor | None] = []
        values: list[Tensor] = []
        for tensor, needs_gradient in zip(_all_there(given), given.needs_gradient, strict=True):
            leaf = tensor.detach().requires_grad_() if needs_gradient else None
            leaves.append(leaf)
            values.append(tensor if leaf is None else _Enter.apply(leaf))  # type: ignore[no-untyped-call]
        self._forward.values = tuple(values)
        return leaves

    def _loss(self, job: Job) -> tuple[Tensor | None, float]:
        """Return the weighted loss to go back from, and the loss as a number."""
        if job.micro_batch is not None and job.weight:
            loss, value = self._forward.loss(job.micro_batch, step=job.step, rank=self._rank)
            return loss * job.weight, value
        outputs, batch = self._forward.outputs(job.batch)
        if job.micro_batch is not None:
            if self._meets_in_passes:
                refuse_hidden(outputs)
            return _without_effect(outputs), 0.0
        with self._forward.precision():
            loss = self._forward.loss_of(outputs, batch, step=job.step)
        return loss if loss.requires_grad else None, 0.0


class _Enter(torch.autograd.Function):
    """An identity whose result is not a leaf, so that a layer that works in place (ReLU) may be a stage's first."""

    @staticmethod
    def forward(_ctx: Any, leaf: Tensor) -> Tensor:
        return leaf.detach()

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def _all_there(given: Values) -> tuple[Tensor, ...]:
    return tuple(tensor for tensor in given.tensors if tensor is not None)


def _without_effect(outputs: Any) -> Tensor | None:
    """Return a scalar to go back from through a pass without a loss: all gradients that come from it are 0."""
    leaves = [leaf for leaf in tensors_in(outputs) if leaf.requires_grad]
    return torch.stack([leaf.sum() for leaf in leaves]).sum() * 0.0 if leaves else None
