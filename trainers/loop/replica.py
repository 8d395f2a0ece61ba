"""The training loop of one replica: batch -> forward -> backward -> exchange -> update.

It imports no Ray: the same code runs in an actor, in `ray.train.torch.TorchTrainer`, in a thread of a test, or alone.
`_step` is one step; `_duties` decides when to validate, save and stop.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from orchestray.platform.comm import objects
from orchestray.platform.comm.collective import PeerLostError
from orchestray.platform.run.recorder import Recorder
from orchestray.trainers.core.batch_norm import sync_buffers
from orchestray.trainers.core.faults import FaultPlan, Faults
from orchestray.trainers.core.members import with_members
from orchestray.trainers.core.outcome import Outcome
from orchestray.trainers.core.process_memory import peak_memory_bytes
from orchestray.trainers.loop.evaluation import evaluate
from orchestray.trainers.loop.local_steps import MOST_STEPS, SegmentReport, run_local_segment, run_segment
from orchestray.trainers.loop.replica_state import Position, ReplicaState
from orchestray.trainers.loop.traffic import Traffic
from orchestray.trainers.optim.clipping import clip, clip_pieces
from orchestray.trainers.optim.schedules import lr_at
from orchestray.trainers.parallel.usage import UsageSum
from orchestray.trainers.sync.allreduce.explicit_allreduce import AlgorithmicAllReduce
from orchestray.trainers.sync.common.combined_gradients import CombinedGradients
from orchestray.trainers.sync.common.local_updates import LocalUpdates

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from orchestray.platform.comm.collective import Collective
    from orchestray.platform.data.stream import SampleStream, Share
    from orchestray.platform.run.checkpoint import CheckpointWriter
    from orchestray.platform.task import Task
    from orchestray.trainers.config.settings import ReplicaSettings
    from orchestray.trainers.core.exchange import OptimizedTensor
    from orchestray.trainers.core.network import Network
    from orchestray.trainers.loop.checkpoint_source import Loaded
    from orchestray.trainers.loop.local_steps import Segment
    from orchestray.trainers.optim.optimizers import Optimizer
    from orchestray.trainers.parallel.pipeline.pipedream import PipeDreamNetwork

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
        """Build the model and all other parts; nothing here depends on the rank.

        Args:
            task: the task to train.
            settings: settings of the run, the same on every replica.
            stream_of: returns the samples of a split ("train" or "validation") for the given replica.
            recorder: receives the metric lines.
            device: device of the model.
            task_of: returns a replica's task, if the members of an ensemble have different arguments; default: `task`.
        """
        self.settings = settings
        self.recorder = recorder or Recorder()
        self.device = torch.device(device)
        self.stop_requested = False
        self.pause_at = settings.pause_at
        """Step after which `run` ends, with a validation; learning rates are those of the whole budget."""
        self.written_step = 0
        """Last step whose metric lines are known to be on disk; a checkpoint contains the later lines."""
        self._stream_of = stream_of
        self._state = ReplicaState(task, settings, stream_of, self.recorder, self.device, task_of)
        self._traffic = Traffic(self._state)
        self._saves = False
        self._usage = UsageSum()
        self._staleness: Counter[int] = Counter()
        """Number of updates by their staleness; empty for a synchronous scheme."""
        self._faults = Faults()
        self._started_at = time.time()

    @property
    def model(self) -> nn.Module:
        """The part of the model on this worker."""
        return self._state.model

    @property
    def position(self) -> Position:
        """Position in the run."""
        return self._state.position

    @property
    def optimizer(self) -> Optimizer:
        """Optimizer of the tensors that this worker updates."""
        return self._state.optimizer

    @property
    def network(self) -> Network:
        """This worker's part of the model, available after `connect`."""
        return self._state.network

    def connect(self, world: Collective, load: Callable[[], Loaded | None] | None = None, *, attempt: int = 0) -> int:
        """Join a new generation, and agree with the other replicas on the state to resume from.

        Args:
            world: all workers of the generation.
            load: finds the checkpoint; same as in `ReplicaState.connect`.
            attempt: number of the attempt, which decides which one-time faults are over; same as in `FaultPlan.of`.

        Returns:
            The last completed step, the same on all replicas.
        """
        faults, seed = self.settings.faults, self.settings.seed
        self._faults = Faults(FaultPlan.of(faults, "worker", world.rank, attempt=attempt, seed=seed))
        step = self._state.connect(world, load)
        self._usage.begin(self._state.groups)
        self._traffic.begin()
        return step

    def become(self, model: Mapping[str, Tensor], optimizer: Mapping[str, Tensor], position: Mapping[str, Any]) -> None:
        """Copy the state of another replica that is already connected.

        Args:
            model: tensors by their names in `model_tensors`.
            optimizer: tensors by their names in `Optimizer.state_tensors`.
            position: fields of a `Position`.

        Raises:
            CheckpointError: the tensors do not fit.
        """
        self._state.become(model, optimizer, position)

    def write_checkpoints_with(self, writer: CheckpointWriter) -> None:
        """Make this replica the one that writes checkpoints."""
        self._state.write_checkpoints_with(writer)

    def abort(self) -> None:
        """Abort every operation in which this replica waits for other replicas, which notice at once.

        May be called from any thread.
        """
        self._state.abort()

    def close(self) -> None:
        """Disconnect from the other replicas; no operation may be in progress on any replica."""
        self._state.close()

    def trained_model(self) -> dict[str, Tensor]:
        """Return the plain model's tensors on rank 0, an empty mapping elsewhere. Every worker calls."""
        return self._state.trained_model()

    # -- the loop ----------------------------------------------------------------------------------------------------

    def run(self, started_at: float) -> Outcome:
        """Train until the budget is used, a condition is met, or a stop is requested.

        Args:
            started_at: wall-clock time of the run's start, in seconds.

        Raises:
            PeerLostError: another replica is gone; this one holds the state of its last completed step.
            TrainingError: the loss is not a finite scalar, or the user's code failed.
        """
        self._started_at = started_at
        stream = self._stream_of("train", self._state.groups.coordinate.data)
        total = self.total_steps(stream)
        self._saves = self._takes_part_in_saving()
        began_s, began_step = time.perf_counter(), self.position.step
        self.model.train()
        try:
            ended = self._run(stream, total)
        except PeerLostError:
            self._state.roll_back()
            raise
        if self._saves and self._state.saved_step != self.position.step:
            self._save()
        if ended != "interrupted":
            self._state.agree()
        self._count_remaining_bytes()
        return self._outcome(ended, stream, time.perf_counter() - began_s, began_step)

    def _takes_part_in_saving(self) -> bool:
        """Return True if this worker takes part in saving.

        Rank 0 writes; if the state is sharded, every worker takes part.
        """
        if self.settings.is_replicated:
            return self._state.checkpoints is not None
        return any(objects.gather_json(self._state.world, self._state.checkpoints is not None))

    def total_steps(self, stream: SampleStream) -> int:
        if self.settings.steps is not None:
            return self.settings.steps
        return int(self.settings.epochs or 0) * stream.steps_per_epoch

    def _end(self, total: int) -> int:
        """Return the step after which `run` ends."""
        return total if self.pause_at is None else min(total, self.pause_at)

    def _run(self, stream: SampleStream, total: int) -> str:
        position, end = self.position, self._end(total)
        votes = self._duties(stream, total, 0, 0)
        while not votes and position.step < end:
            epoch, index = divmod(position.step, stream.steps_per_epoch)
            with stream.epoch(epoch, start_step=index) as prepared:
                shares = self._usage.count(prepared)
                while not votes and position.step < min(end, (epoch + 1) * stream.steps_per_epoch):
                    with self._usage.training(self._state.groups.waiting):
                        if self.settings.in_segments:
                            stop, late = self._segment(shares, epoch, stream, total)
                        else:
                            stop, late = self._step(next(shares), epoch, total)
                    votes = self._duties(stream, total, stop, late)
        return votes or "finished"

    def _segment(self, shares: Iterator[Share], epoch: int, stream: SampleStream, total: int) -> tuple[float, float]:
        """Run the steps up to the next duty without a pause, and return the same as `_step`."""
        position, settings = self.position, self.settings
        ends = [position.step + MOST_STEPS, self._end(total), (epoch + 1) * stream.steps_per_epoch]
        for every in (settings.checkpoint_every_steps, settings.validate_every_steps):
            ends += [(position.step // every + 1) * every] if every is not None else []
        self._state.assembler.draw.replica = settings.share_of(self._state.groups.coordinate.data)
        began_s = time.time()
        if self._state.checkpoints is not None:
            self._state.checkpoints.wait_copied()
        with self._state.assembler.meter.step(position.step + 1):
            saved_before = self._traffic.saved_bytes
            segment = self._train_segment(
                shares,
                min(ends) - position.step,
                total,
                lambda: SegmentReport(
                    stop=self.stop_requested,
                    late=self._is_late(),
                    sent_bytes=self._traffic.report(),
                    saved_bytes=self._traffic.saved_bytes - saved_before,
                ),
            )
        for done in segment.steps:
            self._state.complete_step(done.step, epoch, done.batch_samples, done.loss)
            line = self._line(done.step, epoch, loss=done.loss, lr=self._lr(done.step, total))
            line["time_s"] = round(done.done_at_s - self._started_at, 6)
            line["samples_per_s"] = done.batch_samples / max(done.done_at_s - began_s, 1e-9)
            if settings.is_streaming:
                line["staleness"] = max(done.staleness, default=0)
            line |= done.metrics
            line["bytes_sent"] = segment.bytes_sent // len(segment.steps)
            began_s = done.done_at_s
            self._staleness.update(done.staleness)
            self.recorder.record(line)
        position.bytes_sent += segment.bytes_sent
        position.bytes_dense += segment.bytes_sent + segment.bytes_saved
        self._usage.add(self._state.network.usage(), {}, position.step)
        return segment.stop, segment.late

    def _train_segment(
        self, shares: Iterator[Share], num_steps: int, total: int, report: Callable[[], SegmentReport]
    ) -> Segment:
        state, step = self._state, self.position.step + 1
        exchange = state.exchange
        if isinstance(exchange, LocalUpdates):
            return run_local_segment(
                state.network,
                exchange,
                state.optimizer,
                self._own_settings,
                state.groups,
                state.assembler.draw,
                shares,
                first_step=step,
                num_steps=num_steps,
                total_steps=total,
                report=report,
                faults=self._faults,
            )
        return run_segment(
            cast("PipeDreamNetwork", state.network),
            state.optimizer,
            self.settings,
            state.world,
            shares,
            first_step=step,
            num_steps=num_steps,
            total_steps=total,
            report=report,
        )

    def _count_remaining_bytes(self) -> None:
        """Count the bytes that diverging replicas sent since the last segment.

        They come from agreeing on a model to validate or to keep.
        """
        if self.settings.diverges:
            sent = torch.tensor(float(self._traffic.report()), dtype=torch.float64)
            self._state.world.all_reduce(sent)
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
        """The run's settings, or those of the ensemble member that is trained here."""
        settings = self.settings
        return settings.of_member(self._state.groups.coordinate.data) if settings.members else settings

    def _duties(self, stream: SampleStream, total: int, stop: float, late: float) -> str | None:
        """Validate and save if due between two steps, and return the reason to end, or None.

        Every replica returns the same.
        """
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
        due = position.step % settings.checkpoint_every_steps == 0 and position.step > self._state.saved_step
        if self._saves and due:
            self._save()
        if position.stopped_by is not None:
            return position.stopped_by
        return "interrupted" if stop > 0 and position.step < total else None

    def _step(self, share: Share, epoch: int, total: int) -> tuple[float, float]:
        """Run one step, and return how many replicas want to stop and how many have passed the time limit."""
        exchange, network, position = self._state.exchange, self._state.network, self.position
        begun_s = time.perf_counter()
        sent_before, dense_before = self._state.groups.bytes_sent, exchange.bytes_dense_total
        step = position.step + 1
        self._state.assembler.draw.step, self._state.assembler.draw.replica = (
            step,
            self._state.groups.coordinate.data,
        )
        self._state.begin_step()
        lr = self._lr(step, total)
        exchange.before_step(step)
        with self._state.assembler.meter.step(step), self._faults.during(step, network.model):
            loss_sum = network.backward(share, exchange, step=step)
        if isinstance(exchange, CombinedGradients):
            exchange.weigh(sum(m.num_samples for m in share.micro_batches) / share.batch_samples)
        asked = [loss_sum, float(self.stop_requested), float(self._is_late())]
        loss, stop, out_of_time, others_bytes = self._agree(asked)
        if self.settings.batch_norm == "local":
            sync_buffers(
                network.model,
                self._state.groups.data,
                sum(m.num_samples for m in share.micro_batches),
                share.batch_samples,
            )
        updates, gradients = exchange.updates(), exchange.gradients()
        network.combine(updates, gradients)
        norm = self._clip(updates, gradients)
        if self._state.checkpoints is not None:
            self._state.checkpoints.wait_copied()
        self._state.optimizer.step([update.tensor for update in updates], gradients, lr)
        exchange.after_step(step)
        self._state.complete_step(step, epoch, share.batch_samples, loss)
        line = self._line(
            step, epoch, loss=loss, lr=lr, samples_per_s=share.batch_samples / (time.perf_counter() - begun_s)
        )
        sent = self._state.groups.bytes_sent - sent_before
        dense = sent - exchange.bytes_sent + exchange.bytes_dense_total - dense_before
        # Replicas of a whole model send equally many bytes, or know each other's numbers. Others add them up.
        whole = self.settings.layout.model_size == 1
        beyond = exchange.bytes_beyond if isinstance(exchange, AlgorithmicAllReduce) else 0
        line["bytes_sent"] = sent * self._state.world.size + beyond if whole else others_bytes
        position.bytes_sent += line["bytes_sent"]
        position.bytes_dense += dense * self._state.world.size + beyond if whole else others_bytes
        if norm is not None:
            line["grad_norm"] = norm
        line |= self._state.optimizer.step_metrics()
        if isinstance(exchange, CombinedGradients):
            line |= exchange.step_metrics()
        self._usage.add(network.usage(), line, step)
        self.recorder.record(line)
        if self._state.world.rank != 0 and step % _DRAIN_EVERY_STEPS == 0:
            self.recorder.drain(0.0)  # the lines stay in the recorder's history, in case rank 0 is lost
        return stop, out_of_time

    def _agree(self, values: list[float]) -> tuple[float, float, float, int]:
        """Finish the exchange, and return sums over all workers.

        Returns:
            The loss, the number of stop requests, the number of workers past the time limit, and the bytes sent since
            the last call.
        """
        if self.settings.layout.model_size == 1:
            loss, stop, late = self._state.exchange.finish(values)
            return loss, stop, late, 0
        self._state.exchange.finish([])
        sums = torch.tensor([*values, float(self._traffic.report())], dtype=torch.float64)
        self._state.world.all_reduce(sums)
        loss, stop, late, sent_by_all = sums.tolist()
        return loss, stop, late, int(sent_by_all)

    def _clip(self, updates: Sequence[OptimizedTensor], gradients: Sequence[Tensor | None]) -> float | None:
        """Scale the gradients so that their joint 2-norm is at most `grad_clip`, and return the norm before."""
        limit = self.settings.grad_clip
        if limit is None:
            return None
        if self.settings.is_replicated:
            return clip(gradients, limit)
        return clip_pieces(updates, gradients, limit, self._state.world)

    # -- between the steps ---------------------------------------------------------------------------------------------

    def validate(self) -> None:
        """Validate the current model even if no validation is due. Every worker calls."""
        self._validate()

    def _validate(self) -> None:
        state = self._state
        stream = self._stream_of("validation", self._state.groups.coordinate.data)
        # Validating the ensemble as a whole is not part of its members' training.
        counting = self._traffic.uncounted() if self.settings.num_members else contextlib.nullcontext()
        with _evaluating(self.model), state.consensus(), counting:
            metrics = evaluate(state.network, state.exchange, stream, state.world, state.reporting_rank)
        position = self.position
        values = with_members(metrics)
        position.validation, position.validated_step = values, position.step
        self.recorder.record(self._line(position.step, position.epoch, split="validation", **values))

    def _save(self) -> None:
        lines = [line for line in self.recorder.since(self.written_step) if "event" not in line]
        with self._traffic.uncounted():  # saving is not part of the training, same as for synchronous schemes
            self._state.save({"seconds": time.time() - self._started_at, "lines": lines})

    def _line(self, step: int, epoch: int, **values: Any) -> dict[str, Any]:
        return {"step": step, "epoch": epoch + 1, "time_s": round(time.time() - self._started_at, 6), **values}

    def _outcome(self, ended: str, stream: SampleStream, training_s: float, began_step: int) -> Outcome:
        position = self.position
        per_epoch = stream.steps_per_epoch
        mean = position.epoch_loss_sum / max(1, position.epoch_samples)
        samples = _samples_before(stream, position.step) - _samples_before(stream, began_step)
        memory = self._state.world.all_gather(torch.tensor([peak_memory_bytes(self.device)]))
        usage = objects.gather_json(
            self._state.world,
            {**self._usage.summary(), "peak_activation_bytes": self._state.assembler.meter.peak_bytes},
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
            summary=_section("exchange", self._state.exchange.summary()),
        )


def _section(name: str, entries: dict[str, Any]) -> dict[str, Any]:
    return {name: entries} if entries else {}


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
