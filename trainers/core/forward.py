"""Calls of the user's code: model, loss and metrics of a micro-batch, with errors that name the step and the worker."""

from __future__ import annotations

import contextlib
import functools
import operator
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from orchestray.platform.comm.collective import PeerLostError
from orchestray.platform.data.nested import map_tensors, tensors_in
from orchestray.platform.errors import OrchestrayError, TrainingError
from orchestray.platform.task import asked_by
from orchestray.trainers.core.batch_norm import has_synchronized, normalised_alone, not_counted
from orchestray.trainers.core.inputs import call, inputs_of
from orchestray.trainers.core.loss_parameters import refuse_own_parameters
from orchestray.trainers.core.out_of_memory import ADVICE, is_out_of_memory
from orchestray.trainers.core.own_gradients import Noting, WithoutGradients, makes_parameter
from orchestray.trainers.core.task_calls import Gather, alone, loss_of, measure, weighted
from orchestray.trainers.core.unread import UnreadLosses
from orchestray.trainers.core.weights import in_precision

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from orchestray.platform.data.stream import MicroBatch, SampleStream
    from orchestray.platform.task import Batch, Task

_SHOWN_IDS = 10
_SPLIT = str(Path(__file__).parents[1] / "parallel" / "tensor")
"""Folder of the split layers."""


class Forward:
    """Calls a task's model and loss in one precision on one device."""

    def __init__(self, task: Task, model: nn.Module, precision: str, device: torch.device) -> None:
        self.task = task
        self.model = model
        self.device = device
        self.gather: Gather = alone
        """Joins the tensors of all replicas, for losses between samples."""
        self._asks = bool(asked_by(task))
        # From pinned memory the copy runs beside the device's work.
        self._placed: Callable[[Tensor], Tensor] = operator.methodcaller("to", device, non_blocking=True)
        if precision == "float64":
            self._placed = lambda tensor: tensor.to(
                device, in_precision(tensor.dtype, torch.float64), non_blocking=True
            )
        self.precision: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
        """Returns the context in which model and loss are called."""
        if precision == "bfloat16":
            self.precision = functools.partial(torch.autocast, device.type, dtype=torch.bfloat16)
        self._frozen = [
            (f"{name}.{each}".removeprefix("."), module, each)
            for name, module in model.named_modules()
            for each, parameter in module._parameters.items()
            if parameter is not None and not parameter.requires_grad
        ]
        """Parameters that are not trained, by name, module and name there: tensors may be replaced, modules are not."""
        self._built: dict[str, nn.Parameter] = {}
        """The parameters as they are before the first pass, until a pass backward has shown that it left them."""
        self._kinds: list[str] = []
        """Kinds of numbers in the first outputs."""
        self.without_gradients = WithoutGradients(model)
        self.unread = UnreadLosses(_not_finite)
        """Losses of `unread_loss`."""

    def outputs(self, batch: Batch) -> tuple[Any, Batch]:
        """Return the model's outputs, and the batch on the model's device and in the run's precision."""
        batch = self.place(batch)
        if not self._kinds:
            self._built = dict(self.model.named_parameters())
        with self.precision():
            outputs = call(self.model, batch["inputs"])
        if not self._kinds:
            self._kinds = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors_in(outputs)})
        return outputs, batch

    def run_report(self) -> dict[str, Any]:
        """Return `outputs`, the kinds of numbers in the model's first outputs; empty before them.

        `batch_norms` is how many batches of this worker its batch normalisations have seen, by class, if there are any.
        """
        if not self._kinds:
            return {}
        norms = normalised_alone(self.model)
        return {"outputs": self._kinds, "batch_norms": norms} if norms else {"outputs": self._kinds}

    def place(self, batch: Batch) -> Batch:
        """Return the batch on the model's device and in the run's precision.

        Raises:
            TrainingError: it is not a dictionary with `inputs`.
        """
        inputs_of(batch)
        return {
            name: self._placed(value) if isinstance(value, Tensor) else map_tensors(self._placed, value)
            for name, value in batch.items()
        }

    def loss_of(self, outputs: Any, batch: Batch, *, step: int) -> Any:
        """Return what the task's `loss` returns, given the step and the gathering function if it asks for them."""
        if not self._asks:
            return self.task.loss(outputs, batch)
        return loss_of(self.task, outputs, batch, step=step, gather=self.gather)

    def loss(self, micro_batch: MicroBatch, *, step: int, rank: int) -> tuple[Tensor, float]:
        """Return the mean loss over a micro-batch, as a tensor to differentiate and as a number.

        Raises:
            TrainingError: the loss is not a finite scalar.
        """
        outputs, batch = self.outputs(micro_batch.batch)
        with self.precision():
            loss = scalar(self.loss_of(outputs, batch, step=step))
        value = float(loss.item())
        if not -float("inf") < value < float("inf"):
            raise TrainingError(_not_finite(value, micro_batch, step, rank))
        return loss, value

    def unread_loss(self, micro_batch: MicroBatch, *, step: int, rank: int) -> tuple[Tensor, Tensor]:
        """Return the mean loss over a micro-batch like `loss`, but leave the number on the device, in double precision.

        Where it turns out not to be finite, `unread` has the error.

        Raises:
            TrainingError: the loss is not a scalar.
        """
        outputs, batch = self.outputs(micro_batch.batch)
        with self.precision():
            loss = scalar(self.loss_of(outputs, batch, step=step))
        return loss, self.unread.keep(loss, micro_batch, step, rank)

    def backward(self, loss: Tensor, weight: float = 1.0) -> None:
        """Add the gradient of `weight` times the loss to every `.grad`.

        Raises:
            TrainingError: the loss has no gradient; or a parameter has one, which no optimizer would use: it was frozen
                at the start, made by the pass, or is the task's.
        """
        if not loss.requires_grad:
            raise without_gradient()
        if weight == 1.0:  # an explicit gradient makes torch import sympy, 0.2 s
            loss.backward()  # type: ignore[no-untyped-call]
        else:
            # The weight is the initial gradient: multiplying the loss would add two operations.
            start = torch.scalar_tensor(weight, dtype=loss.dtype, device=loss.device)
            loss.backward(start)  # type: ignore[no-untyped-call]
        for name, module, each in self._frozen:
            if (parameter := module._parameters.get(each)) is not None and parameter.grad is not None:
                raise thawed(name)
        if self._built:
            refuse_others(self._built, self.model)
            refuse_own_parameters(self.task, self.model)
            self._built = {}

    def metrics(self, micro_batch: MicroBatch, *, step: int = 1, loss_only: bool = False) -> dict[str, Any]:
        """Return the loss and the task's metrics of a micro-batch, in a form that `task_calls.add` adds up.

        Args:
            micro_batch: the micro-batch.
            step: number of the step.
            loss_only: leave out the task's metrics.
        """
        outputs, batch = self.outputs(micro_batch.batch)
        size, weight = micro_batch.num_samples, micro_batch.weight
        with self.precision():
            loss = scalar(self.loss_of(outputs, batch, step=step))
            if loss_only:
                return {"loss": weighted("loss", loss, weight)}
            return measure(self.task, outputs, batch, loss=loss, num_samples=size, weight=weight)


def scalar(loss: Any) -> Tensor:
    """Return what a task's `loss` returned, which may be anything, as a tensor of no dimension.

    Raises:
        TrainingError: it is not a tensor of one number.
    """
    if not isinstance(loss, Tensor) or loss.numel() != 1 or loss.is_complex():
        got = f"a {type(loss).__name__}"
        if isinstance(loss, Tensor):
            got = f"a tensor of {loss.dtype}" if loss.is_complex() else f"a tensor of shape {tuple(loss.shape)}"
        raise TrainingError(
            f"The task's loss must be a scalar tensor, the mean over the samples; loss() returned {got}. "
            "Reduce it, for example with .mean()."
        )
    return loss.reshape(()) if loss.dim() else loss


def without_gradient() -> TrainingError:
    """Return the error of a loss that no parameter has a part in."""
    return TrainingError(
        "The task's loss does not depend on a parameter that is trained, so it has no gradient. Have the model train "
        "some, and compute the loss from its outputs by operations that have gradients: not from .detach(), .item(), "
        "argmax or numpy, and not under torch.no_grad()."
    )


def thawed(name: str) -> TrainingError:
    """Return the error of a parameter that was frozen at the start, and has a gradient, which no optimizer uses."""
    return TrainingError(
        f"The parameter {name!r} was frozen when the training began, and is trained now, which would not move it. Have "
        "build_model return it with requires_grad, and detach in the forward pass what is not to be trained yet."
    )


def refuse_others(built: Mapping[str, nn.Parameter], model: nn.Module) -> None:
    """Refuse a model whose forward pass has made parameters, which no optimizer knows.

    Raises:
        TrainingError: a parameter that has a gradient is not among those that were built.
    """
    # ZeRO-3 puts whole parameters and their shards in each other's place.
    is_sharded = any(hasattr(module, "unshard") for module in model.modules())
    for name, parameter in model.named_parameters():
        is_known = name in built if is_sharded else built.get(name) is parameter
        if parameter.grad is not None and not is_known:
            raise makes_parameter(name)


def empty_pass(forward: Forward, sample: Batch, *, step: int) -> None:
    """Run a pass that counts nowhere: batch normalisation over the replicas needs those without samples as well.

    The model and the loss see a sample of the data, as a batch without any is more than many of them can take.

    Args:
        forward: calls the model.
        sample: a batch of one sample.
        step: number of the step.
    """
    with not_counted(forward.model):
        outputs, batch = forward.outputs(sample)
        with Noting() as noting, forward.precision():
            loss = forward.loss_of(outputs, batch, step=step)
        if loss.requires_grad:
            _go_back_without_effect([loss], [*tensors_in(outputs), *noting.taken])


def pass_without_loss(forward: Forward, batch: Batch, *, step: int) -> None:
    """Run a forward and backward pass of samples whose loss has weight 0: the gradients that come from it are 0.

    Where batch normalisation spans the replicas, the loss takes the gradients that it takes on the others as well.

    Args:
        forward: calls the model.
        batch: the samples.
        step: number of the step.
    """
    outputs, placed = forward.outputs(batch)
    roots, stops = [leaf for leaf in tensors_in(outputs) if leaf.requires_grad], []
    if has_synchronized(forward.model):
        refuse_hidden(outputs)
        loss, taken = _loss_without_samples(forward, outputs, placed, step)
        stops = [*roots, *taken]
        roots += [] if loss is None else [loss]
    if roots:
        _go_back_without_effect(roots, stops)


def _go_back_without_effect(roots: Sequence[Tensor], stops: Sequence[Tensor]) -> None:
    """Go back with gradients of 0 from `roots`, and from `stops` as well, whatever arrives there: 0 x NaN is NaN."""
    hooks = [tensor.register_hook(torch.zeros_like) for tensor in stops if tensor.requires_grad]  # type: ignore[no-untyped-call]
    try:
        torch.autograd.backward(roots, [torch.zeros_like(root) for root in roots])
    finally:
        for hook in hooks:
            hook.remove()


def _loss_without_samples(
    forward: Forward, outputs: Any, batch: Batch, step: int
) -> tuple[Tensor | None, Sequence[Tensor]]:
    """Return the loss of samples of weight 0, if it can be computed, and the gradients that it has taken."""
    with Noting() as noting, forward.precision():
        try:
            loss = forward.loss_of(outputs, batch, step=step)
        except (OrchestrayError, PeerLostError):
            raise
        except Exception:  # noqa: BLE001 - a loss need not be able to do without samples that count
            return None, noting.taken
    return loss if isinstance(loss, Tensor) and loss.requires_grad else None, noting.taken


def refuse_hidden(outputs: Any) -> None:
    """Refuse outputs in which no tensor is seen, where a backward pass has to begin at them.

    Raises:
        TrainingError: there is none.
    """
    if not tensors_in(outputs):
        raise TrainingError(
            f"Samples have weight 0 by the task's weight(batch), and the model's outputs, a {type(outputs).__name__}, "
            "hide their tensors, from which batch normalisation over the workers has to go back. Have the model return "
            "them in a tuple, a list or a dict, or set train.batch_norm to local."
        )


def passing(forward: Forward, stream: SampleStream) -> None:
    """Run a forward pass of one sample, which counts nowhere but in what the pass itself does to the model's buffers.

    Args:
        forward: calls the model.
        stream: samples of this replica.
    """
    with not_counted(forward.model):
        forward.without_gradients(forward.outputs, stream.one_sample())


class user_code:  # noqa: N801 - used as a function; a generator-based context manager costs several times as much
    """A context that turns an exception of the user's code into a TrainingError with its file and line."""

    __slots__ = ("_of", "_rank", "_step", "_trains")

    def __init__(self, step: int, rank: int, of: str = "The model or its loss", *, trains: bool = True) -> None:
        self._step, self._rank, self._of, self._trains = step, rank, of, trains

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if not isinstance(error, Exception | SystemExit):
            return
        if isinstance(error, OrchestrayError | PeerLostError | MemoryError):
            return
        frames = traceback.extract_tb(error.__traceback__)
        known = [each for each in frames if "site-packages" not in each.filename or each.filename.startswith(_SPLIT)]
        user = [each for each in known if not each.filename.startswith(_SPLIT)]
        advice = _advice(error, trains=self._trains)
        if not advice and known and known[-1].filename.startswith(_SPLIT):
            advice = (
                ". Layers are split over workers by what the model does with the first batch. If it goes another way "
                "with this one, set strategy.network.tensor to 1."
            )
        frame = user[-1] if user else frames[-1]
        raise TrainingError(
            f"{self._of} failed at step {self._step} on worker {self._rank}: {type(error).__name__}: "
            f"{error} ({frame.filename}, line {frame.lineno}){advice}"
        ) from error


def evaluation_code(step: int, rank: int, *, loss_only: bool) -> user_code:
    """Return the context of a pass that evaluates: it calls the task's metrics as well, unless `loss_only`."""
    of = "The model or its loss" if loss_only else "The model, its loss or a metric"
    return user_code(step, rank, of, trains=False)


def _advice(error: BaseException, *, trains: bool) -> str:
    if "does not have a deterministic implementation" in str(error):
        return ". train.deterministic: true allows no such operation: replace it in the model, or set it to false."
    if is_out_of_memory(error):
        return f". {ADVICE}"
    if "Double" in str(error) and "Float" in str(error):
        return (
            ". Numbers of a table are often float64, and a model's are float32: have to_batch return them as float32 "
            "(.float()), or set train.precision to float64."
        )
    if "Expected more than 1 value per channel" not in str(error):
        return ""
    if not trains:
        return (
            ". The model normalises by the batch in evaluation, too, as a batch normalisation has no running "
            "statistics, and cannot do so with one sample: take track_running_stats=False out of it, or choose "
            "train.batch_size so that each worker has more samples of the last batch of the validation data."
        )
    return (
        ". Batch normalisation cannot learn from one sample: set train.drop_last to true, or choose train.batch_size "
        "so that the last batch of an epoch has more."
    )


def _not_finite(value: float, micro_batch: MicroBatch, step: int, rank: int) -> str:
    ids = micro_batch.sample_ids.tolist()
    bad = [sample for sample, row in zip(ids, _finite_rows(micro_batch), strict=True) if not row]
    text = f"The loss became {value} at step {step} on worker {rank}, in the batch of samples {_listed(ids)}. "
    if any(tensor.dim() and not tensor.shape[0] for tensor in tensors_in(micro_batch.batch)):
        return text + (
            "to_batch has left all of them out: leave out in dataset('train') what is not to be trained on, as samples "
            "are counted, and shared among workers, by its rows."
        )
    if bad:
        return text + f"The data itself holds NaN or infinity in sample(s) {_listed(bad)}: clean or drop them."
    return text + "The data is finite: lower the learning rate, warm it up, or set train.grad_clip."


def _finite_rows(micro_batch: MicroBatch) -> list[bool]:
    finite = torch.ones(micro_batch.num_samples, dtype=torch.bool)
    for value in tensors_in(micro_batch.batch):
        if (
            (value.is_floating_point() or value.is_complex())
            and value.dim()
            and value.shape[0] == micro_batch.num_samples
        ):
            finite &= torch.isfinite(value.reshape(micro_batch.num_samples, -1)).all(dim=1)
    return [bool(row) for row in finite.tolist()]


def _listed(ids: list[int]) -> str:
    shown = ", ".join(str(sample) for sample in ids[:_SHOWN_IDS])
    return shown if len(ids) <= _SHOWN_IDS else f"{shown} and {len(ids) - _SHOWN_IDS} more"
