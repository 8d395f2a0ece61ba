"""The training loop of one replica: batch -> forward -> backward -> exchange -> update.

It imports no Ray: the same code runs in an actor, inside `ray.train.torch.TorchTrainer`, in a thread of a test, or
alone. What a step means is in `_step`; when to validate, save and stop is in `_duties`.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from orchestray.platform.collective import Collective, PeerLostError, SoloCollective
from orchestray.platform.run.recorder import Recorder
from orchestray.trainers import agreement
from orchestray.trainers.batch_norm import has_synchronized, sync_buffers, synchronize
from orchestray.trainers.evaluation import evaluate
from orchestray.trainers.exchange import make_exchange
from orchestray.trainers.forward import Forward, empty_pass
from orchestray.trainers.optimizers import make_optimizer
from orchestray.trainers.outcome import Outcome
from orchestray.trainers.randomness import Draw, seed_everything, seed_modules, seed_pass
from orchestray.trainers.schedules import lr_at
from orchestray.trainers.weights import load_model_tensors, model_tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from orchestray.platform.data.stream import SampleStream, Share
    from orchestray.platform.run.checkpoint import CheckpointWriter
    from orchestray.platform.task import Task
    from orchestray.trainers.settings import ReplicaSettings

_DRAIN_EVERY_STEPS = 1024


@dataclass
class Position:
    """Where a replica is, and what a checkpoint must know beside the tensors. JSON values only."""

    step: int = 0
    """Completed steps."""
    validated_step: int = 0
    validation: dict[str, float] | None = None
    """What the last validation said."""
    epoch: int = 0
    """Epoch the sums below belong to, counted from 0."""
    epoch_loss_sum: float = 0.0
    epoch_samples: int = 0
    bytes_sent: int = 0
    """Sent by all replicas in the completed steps."""
    bytes_dense: int = 0
    """What that would have been had nothing been compressed."""
    stopped_by: str | None = None
    """`until` or `time_limit_s` once that ended the run."""


class Replica:
    """One copy of the model, its optimizer, its share of the data, and the loop over them."""

    def __init__(
        self,
        task: Task,
        settings: ReplicaSettings,
        stream_of: Callable[[str, int], SampleStream],
        *,
        recorder: Recorder | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        """Build the model and everything around it; nothing here depends on the rank.

        Args:
            task: what is learned.
            settings: how, the same on every replica.
            stream_of: the samples of a split ("train" or "validation") as the given rank sees them.
            recorder: where metric lines go.
            device: where the model lives.
        """
        self.task = task
        self.settings = settings
        self.recorder = recorder or Recorder()
        self.device = torch.device(device)
        self.position = Position()
        self.stop_requested = False
        self.written_step = 0
        """Up to here the metric lines are known to be on disk; a checkpoint carries the later ones."""
        self._has_state = False
        self._stream_of = stream_of
        self._checkpoints: CheckpointWriter | None = None
        self._collective: Collective = SoloCollective()
        self._exchange = make_exchange(**settings.exchange)
        seed_everything(settings.seed)
        model = task.build_model()
        self.model: nn.Module = (
            model.to(self.device, torch.float64) if settings.precision == "float64" else model.to(self.device)
        )
        if settings.batch_norm == "synchronized" and settings.num_replicas > 1:
            self.model = synchronize(self.model, lambda: self._collective)
        self._is_synchronized = has_synchronized(self.model)
        self._draw = Draw(settings.seed)
        seed_modules(self.model, self._draw, self.device)
        self._forward = Forward(task, self.model, settings.precision, self.device)
        named = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        self._parameters = [parameter for _, parameter in named]
        self._optimizer = make_optimizer(**{key: value for key, value in settings.optimizer.items() if key != "lr"})
        self._optimizer.init(named)
        self._buffer_names = [name for name, _ in self.model.named_buffers()]
        self._buffers = list(self.model.buffers())
        self._buffers_before = [buffer.clone() for buffer in self._buffers]
        self._saved_step = 0
        self._in_step = False
        self._started_at = time.time()

    # -- meeting -----------------------------------------------------------------------------------------------------

    def connect(
        self, collective: Collective, load: Callable[[], tuple[Any, Any, Mapping[str, Any]] | None] | None = None
    ) -> int:
        """Take part in a new generation: agree with the others on the state to go on from.

        Args:
            collective: the group of this generation.
            load: reads the checkpoint to go on from (model tensors, optimizer tensors, state); called on rank 0 if no
                replica holds a state of its own; None if there is none.

        Returns:
            The completed step all replicas are at now.
        """
        self._collective = collective
        source, steps = agreement.farthest(collective, self.position.step if self._has_state else agreement.NO_STATE)
        nobody_has_state = max(steps) == agreement.NO_STATE
        if nobody_has_state and load is not None and collective.rank == 0 and (loaded := load()) is not None:
            model, optimizer, state = loaded
            self._restore(model, optimizer, state["position"])
            self._saved_step = self.position.step
        if collective.size > 1 and (nobody_has_state or min(steps) != max(steps)):
            self._adopt(source)
        if self.position.stopped_by == "time_limit_s":
            self.position.stopped_by = None  # the limit is judged again, by this attempt's clock and setting
        self._has_state = True
        self._exchange.attach(self.model, collective)
        return self.position.step

    def _adopt(self, source: int) -> None:
        mine = self._collective.rank == source
        position = agreement.share_json(self._collective, vars(self.position) if mine else None, source)
        model = agreement.share_tensors(self._collective, model_tensors(self.model) if mine else None, source)
        optimizer = agreement.share_tensors(self._collective, self._optimizer.state_tensors() if mine else None, source)
        if not mine:
            self._restore(model, optimizer, position)

    def _restore(
        self, model: Mapping[str, Tensor], optimizer: Mapping[str, Tensor], position: Mapping[str, Any]
    ) -> None:
        load_model_tensors(self.model, model)
        self._optimizer.load_state_tensors(optimizer)
        self.position = Position(**position)
        self.recorder.forget_after(self.position.step)
        self._has_state = True

    def write_checkpoints_with(self, writer: CheckpointWriter) -> None:
        """From now on this replica is the one that saves."""
        self._checkpoints = writer
        writer.prepare(model_tensors(self.model), self._optimizer.state_tensors())

    # -- the loop ----------------------------------------------------------------------------------------------------

    def run(self, started_at: float) -> Outcome:
        """Train until the budget is used, a condition is met, or a stop is asked for.

        Raises:
            PeerLostError: another replica is gone; this one holds the state of its last completed step.
            TrainingError: the loss is not a finite scalar, or the user's code failed.
        """
        self._started_at = started_at
        stream = self._stream_of("train", self._collective.rank)
        total = self.total_steps(stream)
        began_s, began_step = time.perf_counter(), self.position.step
        self.model.train()
        try:
            ended = self._run(stream, total)
        except PeerLostError:
            self._roll_back()
            raise
        if self._checkpoints is not None and self._saved_step != self.position.step:
            self._save()
        return self._outcome(ended, stream, time.perf_counter() - began_s, began_step)

    def total_steps(self, stream: SampleStream) -> int:
        if self.settings.steps is not None:
            return self.settings.steps
        return int(self.settings.epochs or 0) * stream.steps_per_epoch

    def _run(self, stream: SampleStream, total: int) -> str:
        position = self.position
        votes = self._duties(stream, total, 0, 0)
        while not votes and position.step < total:
            epoch, index = divmod(position.step, stream.steps_per_epoch)
            with stream.epoch(epoch, start_step=index) as shares:
                for share in shares:
                    stop, late = self._step(share, epoch, total)
                    votes = self._duties(stream, total, stop, late)
                    if votes or position.step >= total:
                        break
        return votes or "finished"

    def _duties(self, stream: SampleStream, total: int, stop: float, late: float) -> str | None:
        """What is due between two steps; returns why to end, if so. Every replica comes to the same answer."""
        position, settings = self.position, self.settings
        if position.stopped_by is not None:
            return position.stopped_by
        every = settings.validate_every_steps or stream.steps_per_epoch
        last = position.step >= total or late > 0
        if position.step > position.validated_step and (position.step % every == 0 or last):
            self._validate()
            until = settings.until
            if until is not None and until.reached(self._metric(until.metric)):
                position.stopped_by = "until"
        if late > 0:
            position.stopped_by = position.stopped_by or "time_limit_s"
        due = position.step % settings.checkpoint_every_steps == 0 and position.step > self._saved_step
        if self._checkpoints is not None and due:
            self._save()
        if position.stopped_by is not None:
            return position.stopped_by
        return "interrupted" if stop > 0 and position.step < total else None

    def _step(self, share: Share, epoch: int, total: int) -> tuple[float, float]:
        """One step; returns how many replicas want to stop, and how many are out of time."""
        exchange, position = self._exchange, self.position
        begun_s, sent_before, dense_before = (
            time.perf_counter(),
            self._collective.bytes_sent,
            exchange.bytes_dense_total,
        )
        step = position.step + 1
        self._draw.step, self._draw.replica = step, self._collective.rank
        if self._collective.size > 1 and self._buffers:
            torch._foreach_copy_(self._buffers_before, self._buffers)
        self._in_step = True
        lr = lr_at(self.settings.lr_schedule, self.settings.optimizer["lr"], step, total)
        exchange.before_step(step)
        loss_sum = self._backward(share, step)
        late = self.settings.time_limit_s is not None and time.time() - self._started_at > self.settings.time_limit_s
        loss, stop, out_of_time = exchange.finish([loss_sum, float(self.stop_requested), float(late)])
        if self.settings.batch_norm == "local":
            sync_buffers(
                self.model, self._collective, sum(m.num_samples for m in share.micro_batches), share.batch_samples
            )
        gradients = [parameter.grad for parameter in self._parameters]
        norm = _clip(gradients, self.settings.grad_clip) if self.settings.grad_clip else None
        if self._checkpoints is not None:
            self._checkpoints.wait_copied()
        self._optimizer.step(self._parameters, gradients, lr)
        exchange.after_step(step)
        self._complete(step, epoch, share, loss)
        line = self._line(
            step, epoch, loss=loss, lr=lr, samples_per_s=share.batch_samples / (time.perf_counter() - begun_s)
        )
        # Every replica sends the same here, so one knows what all together sent.
        sent = self._collective.bytes_sent - sent_before
        dense = sent - exchange.bytes_sent + exchange.bytes_dense_total - dense_before
        line["bytes_sent"] = sent * self._collective.size
        position.bytes_sent += sent * self._collective.size
        position.bytes_dense += dense * self._collective.size
        if norm is not None:
            line["grad_norm"] = norm
        self.recorder.record(line)
        if self._collective.rank != 0 and step % _DRAIN_EVERY_STEPS == 0:
            self.recorder.drain(0.0)  # nobody reads these: they are kept for when rank 0 is lost
        return stop, out_of_time

    def _backward(self, share: Share, step: int) -> float:
        """Forward and backward of this replica's share; returns its part of the batch's mean loss."""
        exchange, rank = self._exchange, self._collective.rank
        loss_sum = 0.0
        for number, micro_batch in enumerate(share.micro_batches, start=1):
            weight = micro_batch.num_samples / share.batch_samples
            self._draw.micro_batch = number - 1
            seed_pass(self._draw, self.device)
            loss, value = self._forward.loss(micro_batch, step=step, rank=rank)
            exchange.begin_backward(last_micro_batch=number == self._num_passes(share))
            self._forward.backward(loss * weight, step=step, rank=rank)
            loss_sum += value * weight
        for number in range(len(share.micro_batches) + 1, self._num_passes(share) + 1):
            exchange.begin_backward(last_micro_batch=number == self._num_passes(share))
            empty_pass(self._forward, self._stream_of("train", rank))
        return loss_sum

    def _num_passes(self, share: Share) -> int:
        """Forward passes of a step: batch normalisation over the replicas needs each of them in every one."""
        return share.num_micro_batches if self._is_synchronized else len(share.micro_batches)

    def _complete(self, step: int, epoch: int, share: Share, loss: float) -> None:
        position = self.position
        if epoch != position.epoch:
            position.epoch, position.epoch_loss_sum, position.epoch_samples = epoch, 0.0, 0
        position.step = step
        self._in_step = False
        position.epoch_loss_sum += loss * share.batch_samples
        position.epoch_samples += share.batch_samples

    # -- beside the steps --------------------------------------------------------------------------------------------

    def _validate(self) -> None:
        stream = self._stream_of("validation", self._collective.rank)
        with _evaluating(self.model):
            metrics = evaluate(self._forward, stream, self._collective)
        position = self.position
        position.validation, position.validated_step = metrics, position.step
        self.recorder.record(self._line(position.step, position.epoch, split="validation", **metrics))

    def _metric(self, name: str) -> float:
        from orchestray.platform.errors import ConfigError

        validation = self.position.validation or {}
        if name not in validation:
            known = ", ".join(sorted(validation)) or "none"
            raise ConfigError(f"config: train.until.metric: the task has no metric {name!r}; it has: {known}")
        return validation[name]

    def _save(self) -> None:
        assert self._checkpoints is not None
        step = self.position.step
        lines = [line for line in self.recorder.since(self.written_step) if "event" not in line]
        state = {
            "position": dict(vars(self.position)),
            "num_replicas": self._collective.size,
            "seconds": time.time() - self._started_at,
            "lines": lines,
        }
        self._checkpoints.save_async(
            step, model_tensors(self.model), self._optimizer.state_tensors(), state, buffers=self._buffer_names
        )
        self._saved_step = step

    def _roll_back(self) -> None:
        """Undo what the broken step left: the state is again that of the last completed step."""
        for parameter in self._parameters:
            parameter.grad = None
        if self._in_step and self._buffers and self._collective.size > 1:
            torch._foreach_copy_(self._buffers, self._buffers_before)
        self._in_step = False

    def _line(self, step: int, epoch: int, **values: Any) -> dict[str, Any]:
        return {"step": step, "epoch": epoch + 1, "time_s": round(time.time() - self._started_at, 6), **values}

    def _outcome(self, ended: str, stream: SampleStream, training_s: float, began_step: int) -> Outcome:
        position = self.position
        per_epoch = stream.steps_per_epoch
        mean = position.epoch_loss_sum / max(1, position.epoch_samples)
        samples = _samples_before(stream, position.step) - _samples_before(stream, began_step)
        memory = self._collective.all_gather(torch.tensor([peak_memory_bytes(self.device)]))
        return Outcome(
            ended=ended,
            step=position.step,
            epochs=round(position.step / per_epoch, 6),
            final={"train": {"loss": mean} if position.step else None, "validation": position.validation},
            bytes_sent=position.bytes_sent,
            bytes_dense=position.bytes_dense,
            samples=samples,
            training_s=training_s,
            memory=memory.flatten().tolist(),
        )


def peak_memory_bytes(device: torch.device) -> int:
    """Peak bytes of this process: what the allocator held on a GPU, the resident set otherwise."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _samples_before(stream: SampleStream, step: int) -> int:
    epochs, index = divmod(step, stream.steps_per_epoch)
    return epochs * stream.num_samples + min(index * stream.batch_size, stream.num_samples)


def _clip(gradients: list[Tensor | None], max_norm: float) -> float:
    """Scale the gradients so that their joint 2-norm is at most `max_norm`; returns the norm before."""
    present = [gradient for gradient in gradients if gradient is not None]
    norms = torch.stack(torch._foreach_norm(present))
    norm = float(torch.linalg.vector_norm(norms))
    if norm > max_norm:
        torch._foreach_mul_(present, max_norm / (norm + 1e-6))
    return norm


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train()
