"""The training loop of one replica: batch -> forward -> backward -> exchange -> update.

It imports no Ray: the same code runs in an actor, inside `ray.train.torch.TorchTrainer`, in a thread of a test, or
alone. What a step means is in `_step`; when to validate, save and stop is in `_duties`.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from orchestray.platform.collective import PeerLostError
from orchestray.platform.run.recorder import Recorder
from orchestray.trainers.consolidation.members import with_members
from orchestray.trainers.exchange.algorithmic import AlgorithmicAllReduce
from orchestray.trainers.exchange.diverging import Diverging
from orchestray.trainers.exchange.lockstep import LockStep
from orchestray.trainers.faults import FaultPlan, Faults
from orchestray.trainers.memory.process import peak_memory_bytes
from orchestray.trainers.network.usage import UsageSum
from orchestray.trainers.replica import agreement
from orchestray.trainers.replica.batch_norm import sync_buffers
from orchestray.trainers.replica.clipping import clip, clip_pieces
from orchestray.trainers.replica.evaluation import evaluate
from orchestray.trainers.replica.outcome import Outcome
from orchestray.trainers.replica.segments import MOST_STEPS, Told, run_alone, run_segment
from orchestray.trainers.replica.standing import Position, Standing
from orchestray.trainers.replica.traffic import Traffic
from orchestray.trainers.schedules import lr_at

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from orchestray.platform.collective import Collective
    from orchestray.platform.data.stream import SampleStream, Share
    from orchestray.platform.run.checkpoint import CheckpointWriter
    from orchestray.platform.task import Task
    from orchestray.trainers.checkpoint_source import Loaded
    from orchestray.trainers.exchange.base import Update
    from orchestray.trainers.network.base import Network
    from orchestray.trainers.optimizers import Optimizer
    from orchestray.trainers.pipeline.pipedream import PipeDreamNetwork
    from orchestray.trainers.replica.segments import Segment
    from orchestray.trainers.replica.settings import ReplicaSettings

_DRAIN_EVERY_STEPS = 1024


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
        task_of: Callable[[int], Task] | None = None,
    ) -> None:
        """Build the model and everything around it; nothing here depends on the rank.

        Args:
            task: what is learned.
            settings: how, the same on every replica.
            stream_of: the samples of a split ("train" or "validation") as the given replica sees them.
            recorder: where metric lines go.
            device: where the model lives.
            task_of: what a replica learns, where the members of an ensemble have arguments of their own for the task;
                default: `task`.
        """
        self.settings = settings
        self.recorder = recorder or Recorder()
        self.device = torch.device(device)
        self.stop_requested = False
        self.pause_at = settings.pause_at
        """`run` ends when this step is completed, with a validation; learning rates are those of the whole budget."""
        self.written_step = 0
        """Up to here the metric lines are known to be on disk; a checkpoint carries the later ones."""
        self._stream_of = stream_of
        self._standing = Standing(task, settings, stream_of, self.recorder, self.device, task_of)
        self._traffic = Traffic(self._standing)
        self._saves = False
        self._usage = UsageSum()
        self._staleness: Counter[int] = Counter()
        """Updates by how stale they were, where there are stale ones."""
        self._faults = Faults()
        self._started_at = time.time()

    @property
    def model(self) -> nn.Module:
        """What this worker holds of the model."""
        return self._standing.model

    @property
    def position(self) -> Position:
        """Where it is."""
        return self._standing.position

    @property
    def optimizer(self) -> Optimizer:
        """Of what this worker updates."""
        return self._standing.optimizer

    @property
    def network(self) -> Network:
        """This worker's part of the model, once it has met the others."""
        return self._standing.network

    def connect(self, world: Collective, load: Callable[[], Loaded | None] | None = None, *, attempt: int = 0) -> int:
        """Take part in a new generation: agree with the others on the state to go on from; see `Standing.connect`.

        `attempt` says which of the faults that happen once are over, see `FaultPlan.of`.
        """
        faults, seed = self.settings.faults, self.settings.seed
        self._faults = Faults(FaultPlan.of(faults, "worker", world.rank, attempt=attempt, seed=seed))
        step = self._standing.connect(world, load)
        self._usage.begin(self._standing.groups)
        self._traffic.begin()
        return step

    def become(self, model: Mapping[str, Tensor], optimizer: Mapping[str, Tensor], position: Mapping[str, Any]) -> None:
        """Take a copy of another state, of a replica that has met others already: tensors by their names in
        `model_tensors` and `Optimizer.state_tensors`, and the fields of a `Position`.

        Raises:
            CheckpointError: they do not fit.
        """
        self._standing.become(model, optimizer, position)

    def write_checkpoints_with(self, writer: CheckpointWriter) -> None:
        """From now on this replica is the one that saves."""
        self._standing.write_checkpoints_with(writer)

    def abort(self) -> None:
        """Give up whatever this replica waits for from the others, from any thread; they see at once that it left."""
        self._standing.abort()

    def close(self) -> None:
        """Let go of the others; nothing is under way any more, on any replica."""
        self._standing.close()

    def trained_model(self) -> dict[str, Tensor]:
        """The plain model's tensors, on rank 0; nothing elsewhere. Every worker calls."""
        return self._standing.trained_model()

    # -- the loop ----------------------------------------------------------------------------------------------------

    def run(self, started_at: float) -> Outcome:
        """Train until the budget is used, a condition is met, or a stop is asked for.

        Raises:
            PeerLostError: another replica is gone; this one holds the state of its last completed step.
            TrainingError: the loss is not a finite scalar, or the user's code failed.
        """
        self._started_at = started_at
        stream = self._stream_of("train", self._standing.groups.coordinate.data)
        total = self.total_steps(stream)
        self._saves = self._everybody_saves()
        began_s, began_step = time.perf_counter(), self.position.step
        self.model.train()
        try:
            ended = self._run(stream, total)
        except PeerLostError:
            self._standing.roll_back()
            raise
        if self._saves and self._standing.saved_step != self.position.step:
            self._save()
        if ended != "interrupted":
            self._standing.agree()
        self._tell_the_rest()
        return self._outcome(ended, stream, time.perf_counter() - began_s, began_step)

    def _everybody_saves(self) -> bool:
        """Whether this worker has a part in saving: rank 0 writes, and a spread-out state needs everybody."""
        if self.settings.is_replicated:
            return self._standing.checkpoints is not None
        return any(agreement.gather_json(self._standing.world, self._standing.checkpoints is not None))

    def total_steps(self, stream: SampleStream) -> int:
        if self.settings.steps is not None:
            return self.settings.steps
        return int(self.settings.epochs or 0) * stream.steps_per_epoch

    def _end(self, total: int) -> int:
        """The step after which `run` ends."""
        return total if self.pause_at is None else min(total, self.pause_at)

    def _run(self, stream: SampleStream, total: int) -> str:
        position, end = self.position, self._end(total)
        votes = self._duties(stream, total, 0, 0)
        while not votes and position.step < end:
            epoch, index = divmod(position.step, stream.steps_per_epoch)
            with stream.epoch(epoch, start_step=index) as prepared:
                shares = self._usage.count(prepared)
                while not votes and position.step < min(end, (epoch + 1) * stream.steps_per_epoch):
                    with self._usage.training(self._standing.groups.waiting):
                        if self.settings.in_segments:
                            stop, late = self._segment(shares, epoch, stream, total)
                        else:
                            stop, late = self._step(next(shares), epoch, total)
                    votes = self._duties(stream, total, stop, late)
        return votes or "finished"

    def _segment(self, shares: Iterator[Share], epoch: int, stream: SampleStream, total: int) -> tuple[float, float]:
        """Steps up to the next duty, without a pause between them; returns as `_step`."""
        position, settings = self.position, self.settings
        ends = [position.step + MOST_STEPS, self._end(total), (epoch + 1) * stream.steps_per_epoch]
        for every in (settings.checkpoint_every_steps, settings.validate_every_steps):
            ends += [(position.step // every + 1) * every] if every is not None else []
        self._standing.assembler.draw.replica = settings.share_of(self._standing.groups.coordinate.data)
        began_s = time.time()
        if self._standing.checkpoints is not None:
            self._standing.checkpoints.wait_copied()
        with self._standing.assembler.meter.step(position.step + 1):
            saved_before = self._traffic.saved_bytes
            segment = self._train_segment(
                shares,
                min(ends) - position.step,
                total,
                lambda: Told(
                    stop=self.stop_requested,
                    late=self._is_late(),
                    sent_bytes=self._traffic.tell(),
                    saved_bytes=self._traffic.saved_bytes - saved_before,
                ),
            )
        for done in segment.steps:
            self._standing.complete_step(done.step, epoch, done.batch_samples, done.loss)
            line = self._line(done.step, epoch, loss=done.loss, lr=self._lr(done.step, total))
            line["time_s"] = round(done.done_at_s - self._started_at, 6)
            line["samples_per_s"] = done.batch_samples / max(done.done_at_s - began_s, 1e-9)
            if settings.is_streaming:
                line["staleness"] = max(done.staleness, default=0)
            line |= done.told
            line["bytes_sent"] = segment.bytes_sent // len(segment.steps)
            began_s = done.done_at_s
            self._staleness.update(done.staleness)
            self.recorder.record(line)
        position.bytes_sent += segment.bytes_sent
        position.bytes_dense += segment.bytes_sent + segment.bytes_saved
        self._usage.add(self._standing.network.usage(), {}, position.step)
        return segment.stop, segment.late

    def _train_segment(self, shares: Iterator[Share], num_steps: int, total: int, tell: Callable[[], Told]) -> Segment:
        standing, step = self._standing, self.position.step + 1
        exchange = standing.exchange
        if isinstance(exchange, Diverging):
            return run_alone(
                standing.network,
                exchange,
                standing.optimizer,
                self._own_settings,
                standing.groups,
                standing.assembler.draw,
                shares,
                first_step=step,
                num_steps=num_steps,
                total_steps=total,
                tell=tell,
                faults=self._faults,
            )
        return run_segment(
            cast("PipeDreamNetwork", standing.network),
            standing.optimizer,
            self.settings,
            standing.world,
            shares,
            first_step=step,
            num_steps=num_steps,
            total_steps=total,
            tell=tell,
        )

    def _tell_the_rest(self) -> None:
        """Count what diverging replicas have sent since the last segment, to agree on a model to validate or keep."""
        if self.settings.diverges:
            sent = torch.tensor(float(self._traffic.tell()), dtype=torch.float64)
            self._standing.world.all_reduce(sent)
            self.position.bytes_sent += int(sent)
            self.position.bytes_dense += int(sent)

    def _is_late(self) -> bool:
        limit_s = self.settings.time_limit_s
        return limit_s is not None and time.time() - self._started_at > limit_s

    def _lr(self, step: int, total: int) -> float:
        own = self._own_settings
        return lr_at(own.lr_schedule, own.optimizer["lr"], step, total)

    @property
    def _own_settings(self) -> ReplicaSettings:
        """The run's, or those of the member of an ensemble that is trained here."""
        settings = self.settings
        return settings.of_member(self._standing.groups.coordinate.data) if settings.members else settings

    def _duties(self, stream: SampleStream, total: int, stop: float, late: float) -> str | None:
        """What is due between two steps; returns why to end, if so. Every replica comes to the same answer."""
        position, settings = self.position, self.settings
        if position.stopped_by is not None:
            return position.stopped_by
        every = settings.validate_every_steps or stream.steps_per_epoch
        last = position.step >= self._end(total) or late > 0
        if position.step > position.validated_step and (position.step % every == 0 or last):
            self._validate()
            until = settings.until
            validation = {key: value for key, value in (position.validation or {}).items() if key != "members"}
            if until is not None and until.reached(validation):
                position.stopped_by = "until"
        if late > 0:
            position.stopped_by = position.stopped_by or "time_limit_s"
        due = position.step % settings.checkpoint_every_steps == 0 and position.step > self._standing.saved_step
        if self._saves and due:
            self._save()
        if position.stopped_by is not None:
            return position.stopped_by
        return "interrupted" if stop > 0 and position.step < total else None

    def _step(self, share: Share, epoch: int, total: int) -> tuple[float, float]:
        """One step; returns how many replicas want to stop, and how many are out of time."""
        exchange, network, position = self._standing.exchange, self._standing.network, self.position
        begun_s = time.perf_counter()
        sent_before, dense_before = self._standing.groups.bytes_sent, exchange.bytes_dense_total
        step = position.step + 1
        self._standing.assembler.draw.step, self._standing.assembler.draw.replica = (
            step,
            self._standing.groups.coordinate.data,
        )
        self._standing.begin_step()
        lr = self._lr(step, total)
        exchange.before_step(step)
        with self._standing.assembler.meter.step(step), self._faults.during(step, network.model):
            loss_sum = network.backward(share, exchange, step=step)
        if isinstance(exchange, LockStep):
            exchange.weigh(sum(m.num_samples for m in share.micro_batches) / share.batch_samples)
        asked = [loss_sum, float(self.stop_requested), float(self._is_late())]
        loss, stop, out_of_time, others_bytes = self._agree(asked)
        if self.settings.batch_norm == "local":
            sync_buffers(
                network.model,
                self._standing.groups.data,
                sum(m.num_samples for m in share.micro_batches),
                share.batch_samples,
            )
        updates, gradients = exchange.updates(), exchange.gradients()
        network.combine(updates, gradients)
        norm = self._clip(updates, gradients)
        if self._standing.checkpoints is not None:
            self._standing.checkpoints.wait_copied()
        self._standing.optimizer.step([update.tensor for update in updates], gradients, lr)
        exchange.after_step(step)
        self._standing.complete_step(step, epoch, share.batch_samples, loss)
        line = self._line(
            step, epoch, loss=loss, lr=lr, samples_per_s=share.batch_samples / (time.perf_counter() - begun_s)
        )
        sent = self._standing.groups.bytes_sent - sent_before
        dense = sent - exchange.bytes_sent + exchange.bytes_dense_total - dense_before
        # Replicas of a whole model all send the same, or know what the others send, so one tells for all; others tell.
        whole = self.settings.layout.model_size == 1
        beyond = exchange.bytes_beyond if isinstance(exchange, AlgorithmicAllReduce) else 0
        line["bytes_sent"] = sent * self._standing.world.size + beyond if whole else others_bytes
        position.bytes_sent += line["bytes_sent"]
        position.bytes_dense += dense * self._standing.world.size + beyond if whole else others_bytes
        if norm is not None:
            line["grad_norm"] = norm
        line |= self._standing.optimizer.told()
        if isinstance(exchange, LockStep):
            line |= exchange.report()
        self._usage.add(network.usage(), line, step)
        self.recorder.record(line)
        if self._standing.world.rank != 0 and step % _DRAIN_EVERY_STEPS == 0:
            self.recorder.drain(0.0)  # nobody reads these: they are kept for when rank 0 is lost
        return stop, out_of_time

    def _agree(self, values: list[float]) -> tuple[float, float, float, int]:
        """Finish the exchange; loss, wishes to stop and lateness of all workers, and the bytes they sent since last."""
        if self.settings.layout.model_size == 1:
            loss, stop, late = self._standing.exchange.finish(values)
            return loss, stop, late, 0
        self._standing.exchange.finish([])
        told = torch.tensor([*values, float(self._traffic.tell())], dtype=torch.float64)
        self._standing.world.all_reduce(told)
        loss, stop, late, sent_by_all = told.tolist()
        return loss, stop, late, int(sent_by_all)

    def _clip(self, updates: Sequence[Update], gradients: Sequence[Tensor | None]) -> float | None:
        """Scale the gradients so that their joint 2-norm is at most `grad_clip`; returns the norm before."""
        limit = self.settings.grad_clip
        if limit is None:
            return None
        if self.settings.is_replicated:
            return clip(gradients, limit)
        return clip_pieces(updates, gradients, limit, self._standing.world)

    # -- beside the steps --------------------------------------------------------------------------------------------

    def validate(self) -> None:
        """Validate the model as it is, also where none is due; every worker calls."""
        self._validate()

    def _validate(self) -> None:
        standing = self._standing
        stream = self._stream_of("validation", self._standing.groups.coordinate.data)
        # An answer of all members of an ensemble is no part of their training.
        counting = self._traffic.uncounted() if self.settings.num_members else contextlib.nullcontext()
        with _evaluating(self.model), standing.consensus(), counting:
            metrics = evaluate(standing.network, standing.exchange, stream, standing.world, standing.reporting_rank)
        position = self.position
        told = with_members(metrics)
        position.validation, position.validated_step = told, position.step
        self.recorder.record(self._line(position.step, position.epoch, split="validation", **told))

    def _save(self) -> None:
        lines = [line for line in self.recorder.since(self.written_step) if "event" not in line]
        with self._traffic.uncounted():  # saving is no part of the training, as in lock step
            self._standing.save({"seconds": time.time() - self._started_at, "lines": lines})

    def _line(self, step: int, epoch: int, **values: Any) -> dict[str, Any]:
        return {"step": step, "epoch": epoch + 1, "time_s": round(time.time() - self._started_at, 6), **values}

    def _outcome(self, ended: str, stream: SampleStream, training_s: float, began_step: int) -> Outcome:
        position = self.position
        per_epoch = stream.steps_per_epoch
        mean = position.epoch_loss_sum / max(1, position.epoch_samples)
        samples = _samples_before(stream, position.step) - _samples_before(stream, began_step)
        memory = self._standing.world.all_gather(torch.tensor([peak_memory_bytes(self.device)]))
        usage = agreement.gather_json(
            self._standing.world,
            {**self._usage.told(), "peak_activation_bytes": self._standing.assembler.meter.peak_bytes},
        )
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
            usage=usage,
            staleness=dict(self._staleness),
            told=_section("exchange", self._standing.exchange.told()),
        )


def _section(name: str, told: dict[str, Any]) -> dict[str, Any]:
    return {name: told} if told else {}


def _samples_before(stream: SampleStream, step: int) -> int:
    epochs, index = divmod(step, stream.steps_per_epoch)
    return epochs * stream.num_samples + min(index * stream.batch_size, stream.num_samples)


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train()
