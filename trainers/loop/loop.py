"""The training loop of one replica: a share arrives, forward and backward, the scheme, the update, what is due.

It imports no Ray: the same code runs in an actor, in `ray.train.torch.TorchTrainer`, in a thread of a test, or alone.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from orchestray.platform.comm import objects
from orchestray.platform.comm.collective import PeerLostError
from orchestray.platform.data.retries import READS
from orchestray.platform.errors import TrainingError
from orchestray.trainers.config.goals import refuse_without_validation
from orchestray.trainers.core.arithmetic import arithmetic_here
from orchestray.trainers.core.outcome import Outcome
from orchestray.trainers.core.parts import parts_of, reports_of
from orchestray.trainers.core.process_memory import peak_memory_bytes
from orchestray.trainers.core.unread import read_together
from orchestray.trainers.few_bits.layers import bounds_of
from orchestray.trainers.loop.batch_loss import check_gather, checked, has_weight, is_to_be_checked, weighed
from orchestray.trainers.loop.due import Due
from orchestray.trainers.loop.growing_batches import grow, plan_of
from orchestray.trainers.loop.noise_watch import NoiseWatch
from orchestray.trainers.loop.solving import Solving
from orchestray.trainers.loop.step_log import Agreed, Step
from orchestray.trainers.optim.schedules import lr_at
from orchestray.trainers.saved.initial_weights import initial_summary
from orchestray.trainers.solvers.solver_optimizer import SolverOptimizer

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from orchestray.platform.data.batch_plan import Part
    from orchestray.platform.data.order import Indices
    from orchestray.platform.data.stream import Share
    from orchestray.trainers.loop.replica import Replica
    from orchestray.trainers.parallel.pipeline.pipedream import PipeDreamNetwork

_APART = 3
"""Place, among the numbers that a step sums along with its gradients, of the one that says that buffers differ."""
MOST_STEPS = 16
"""Largest number of steps between two agreements of the workers, and so the longest delay of a stop request."""


def steps_to_agreement(step: int, last: int, every: Iterable[int | None]) -> int:
    """Return the number of steps that workers make from `step` on before they agree, where they need not wait.

    Args:
        step: number of steps that are done.
        last: step after which they agree at the latest.
        every: numbers of steps after whose multiples something is due.
    """
    return min(step + MOST_STEPS, last, *((step // each + 1) * each for each in every if each is not None)) - step


class Loop:
    """A loop over the steps of one attempt. All workers run it, and agree on when it ends."""

    def __init__(self, replica: Replica, started_at: float) -> None:
        """
        Args:
            replica: replica to train, which is connected.
            started_at: wall-clock time of the run's start, in seconds.
        """
        self._replica = replica
        self._log = replica.log
        self._log.started_at = started_at
        self._started_at = started_at
        self._settings = settings = replica.settings
        index = replica.groups.coordinate.data
        self._own = settings.of_member(index) if settings.members else settings
        """The run's settings, or those of the ensemble member that is trained here."""
        self._network = replica.network
        self._updates = replica.exchange.updates()
        self._tensors = [update.tensor for update in self._updates]
        bounds = bounds_of(self._network.model)
        self._clipped = [(each.tensor.detach(), bounds[each.name]) for each in self._updates if each.name in bounds]
        """Weights that are clipped after each update, with their largest magnitude."""
        self._stream = replica.stream("train")
        self._plan = plan_of(settings, self._stream, replica.position)
        replica.exchange.samples_after = self._samples_after
        self._noise = NoiseWatch(replica) if settings.noise_scale is not None else None
        self._total = replica.total_steps(self._stream)
        self._solving: Solving | None = None
        if isinstance(replica.optimizer, SolverOptimizer):
            self._solving = Solving(replica, replica.optimizer, self._stream)
        self._lr_at = partial(lr_at, self._own.lr_schedule, self._own.lr, total_steps=self._total)
        self._lr_at(self._total)  # a schedule that ends before the run does is refused here
        if goals := settings.validation_goals:  # only then, as reading the validation data early takes time
            refuse_without_validation(goals, replica.stream("validation").num_samples)
        self._has_weight = has_weight(replica.task)
        self._end = self._total if replica.pause_at is None else min(self._total, replica.pause_at)
        self._due = Due(replica, self._total, self._end)
        for split in ("train", "validation"):
            check_gather(replica, replica.stream(split), split)
        in_step = not (replica.exchange.diverges or self._network.streams)
        self._agrees_at_once = in_step and settings.layout.model_size == 1
        """True if each step's sums over all workers come with the gradients."""

    def _samples_after(self, steps: int) -> int:
        """Return the samples of all replicas in the first steps, by the plan of the batches as far as it has grown."""
        return self._plan.samples_before(steps)

    def run(self) -> Outcome:
        """Train until the budget is used, a condition is met, or a stop is requested.

        Raises:
            PeerLostError: another replica is gone; this one holds the state of its last completed step.
            TrainingError: the loss is not a finite scalar, or the user's code failed.
        """
        replica = self._replica
        began_s, began_step = time.perf_counter(), replica.position.step
        try:
            ended = self._train()
        except PeerLostError:
            replica.roll_back()
            raise
        finally:
            if self._noise is not None:
                self._noise.close()
        self._log.settle(replica.position)
        self._due.save_the_end()
        if ended != "interrupted":
            replica.exchange.agree()
        if replica.exchange.diverges:
            self._count_remaining_bytes()
        return self._outcome(ended, time.perf_counter() - began_s, began_step)

    # -- steps ---------------------------------------------------------------------------------------------------------

    def _train(self) -> str:
        replica, noise = self._replica, self._noise
        position = replica.position
        is_to_check = is_to_be_checked(replica.task, self._settings) and not position.has_checked_loss
        ended = self._due.after(Agreed([]), self._plan)
        while ended is None and position.step < self._end:
            part = self._plan.part_at(position.step)
            stream = self._stream.resized(part.batch_size, part.first)
            index = position.step - part.start_step
            with stream.epoch(part.epoch, start_step=index, cuts_first=is_to_check) as prepared:
                shares: Iterator[Share] = prepared
                if is_to_check:
                    shares, is_to_check, position.has_checked_loss = checked(replica, shares), False, True
                shares = self._log.usage.awaited(shares)
                while ended is None and position.step < min(self._end, part.end_step):
                    with self._log.training():
                        agreed = self._until_agreed(shares, part)
                    if noise is not None and grow(self._settings, position, noise.scale, part.batch_size):
                        self._plan = plan_of(self._settings, self._stream, position)
                        part = replace(part, end_step=position.step)
                    ended = self._due.after(agreed, self._plan)
        return ended or "finished"

    def _until_agreed(self, shares: Iterator[Share], part: Part) -> Agreed:
        """Train until all workers agree on what they did: after one step, or after several where they need not wait."""
        replica, epoch = self._replica, part.epoch
        first = replica.position.step + 1
        replica.buffers.begin()
        if self._network.streams:
            steps = self._stream_steps(islice(shares, self._num_steps(part)), epoch, first)
        elif replica.exchange.diverges:
            taken = islice(shares, self._num_steps(part))
            steps = [self._step(share, epoch, number) for number, share in enumerate(taken, start=first)]
        else:
            steps = [self._step(next(shares), epoch, first)]
        agreed = self._agree(steps)
        if not self._settings.is_replicated:  # a replicated state has been confirmed before it was changed
            replica.world.confirm()
        self._log.complete(steps, agreed, self._network, replica.position)
        replica.buffers.end()
        return agreed

    def _num_steps(self, part: Part) -> int:
        """Return the number of steps until something is due, at most `MOST_STEPS`."""
        every = (self._settings.checkpoint_every_steps, self._settings.validate_every_steps)
        return steps_to_agreement(self._replica.position.step, min(self._end, part.end_step), every)

    def _step(self, share: Share, epoch: int, number: int) -> Step:
        """Make one step."""
        if self._has_weight:
            share = weighed(self._replica, share, step=number)
        step = Step(number, epoch, self._lr_at(number), share.batch_samples, time.time())
        step.num_samples, step.num_passes = share.num_samples, len(share.micro_batches)
        for micro_batch in share.micro_batches:
            step.sample_ids.append(micro_batch.sample_ids)
        self._replica.draw.step = number
        if self._solving is not None:
            self._solving.take(share, step, self._votes())
            return step
        gradients = self._gradients(share, step)
        if self._settings.batch_schedule is not None:
            step.metrics["batch_samples"] = share.batch_samples
        self._update(gradients, step)
        step.done_s = time.time()
        return step

    def _gradients(self, share: Share, step: Step) -> list[Tensor | None]:
        """Compute the gradients of a share, and return those that the scheme makes of all replicas'."""
        replica, exchange, network, noise = self._replica, self._replica.exchange, self._network, self._noise
        exchange.before_step(step.number)
        replica.optimizer.begin_step(step.number, share.num_samples, share.batch_samples)
        with replica.passes(step.number):
            step.loss = network.backward(share, noise.watched(exchange) if noise else exchange, step=step.number)
        exchange.fraction = share.weight / share.batch_weight
        extras: list[float | Tensor] = []
        if self._agrees_at_once:
            norms = noise.sums(share) if noise else ()
            # Where no other replica needs the loss, it may wait on the device.
            sent = step.loss if replica.world.size > 1 else 0.0
            extras = [sent, *self._votes(), replica.buffers.apart(is_updated=False), *norms]
        if replica.buffers.averages_statistics:
            statistics = replica.buffers.start_statistics(share.num_samples, share.batch_samples)
            step.sums = exchange.finish(extras)
            statistics.wait()
        else:
            step.sums = exchange.finish(extras)
        if isinstance(step.loss, Tensor) and step.sums:
            self._refuse(step, step.sums[0])
        if step.sums and step.sums[_APART]:
            replica.buffers.agree(share.num_samples, share.batch_samples)
        gradients = exchange.gradients()
        if network.combines:
            network.combine(self._updates, gradients)
        if noise is not None:
            step.metrics |= noise.add(step.sums[-2:], gradients, share.batch_samples)
        return gradients

    def _update(self, gradients: list[Tensor | None], step: Step) -> None:
        """Move the weights by the gradients."""
        replica, exchange = self._replica, self._replica.exchange
        if self._own.grad_clip is not None:
            step.metrics["grad_norm"] = replica.clip(self._updates, gradients, self._own.grad_clip)
        if replica.checkpoints is not None:
            replica.checkpoints.wait_copied()
        replica.optimizer.step(self._tensors, gradients, step.lr)
        for tensor, bound in self._clipped:
            tensor.clamp_(-bound, bound)
        if replica.average is not None:
            replica.average.add(step.number)
        if exchange.diverges:
            replica.buffers.keep_memory()
        exchange.after_step(step.number)
        if self._noise is not None:
            self._noise.keep()
        step.metrics |= replica.optimizer.step_metrics() | exchange.step_metrics

    def _stream_steps(self, shares: Iterator[Share], epoch: int, first: int) -> list[Step]:
        """Make several steps by PipeDream's schedule, whose stages update while later micro-batches are in flight.

        It is a loop of its own, as a batch's forward pass begins before the update of the batch before it.
        """
        replica = self._replica
        samples: list[tuple[int, int, int, list[Indices]]] = []

        def taken() -> Iterator[Share]:
            for step, share in enumerate(shares, start=first):
                ids = [micro_batch.sample_ids for micro_batch in share.micro_batches]
                samples.append((share.num_samples, share.batch_samples, len(ids), ids))
                yield weighed(replica, share, step=step) if self._has_weight else share

        def update(parameters: Sequence[Tensor], gradients: Sequence[Tensor | None], number: int, _: int) -> None:
            replica.optimizer.step(parameters, gradients, self._lr_at(number))

        replica.draw.step = first
        if replica.checkpoints is not None:
            replica.checkpoints.wait_copied()
        steps, began_s = [], time.time()
        with replica.meter.step(first):
            for done in cast("PipeDreamNetwork", self._network).run_segment(taken(), update, first_step=first):
                lr = self._lr_at(done.step)
                step = Step(done.step, epoch, lr, 0, began_s, loss=done.loss_sum, done_s=time.time())
                step.staleness = done.staleness
                steps.append(step)
        own = torch.full((len(steps), self._settings.accumulate + 1), -1.0, dtype=torch.float64)
        for row, step in zip(own, steps, strict=True):
            stale = step.staleness or []
            row[: len(stale)] = torch.tensor(stale)
            row[-1] = step.done_s
        reports = replica.world.all_gather(own).tolist()
        for index, step in enumerate(steps):
            step.num_samples, step.batch_samples, step.num_passes, step.sample_ids = samples[index]
            step.staleness = [int(value) for report in reports for value in report[index][:-1] if value >= 0]
            step.done_s = max(report[index][-1] for report in reports)
            step.began_s, began_s = began_s, step.done_s
        return steps

    def _votes(self) -> tuple[float, float]:
        """Return 1 if this worker is to stop, and 1 if the time limit has passed on it; else 0."""
        limit_s = self._settings.time_limit_s
        is_late = limit_s is not None and time.time() - self._started_at > limit_s
        return float(self._replica.stop_requested), float(is_late)

    def _agree(self, steps: Sequence[Step]) -> Agreed:
        """Sum what the workers report on steps that they have completed."""
        replica, log = self._replica, self._log
        if self._agrees_at_once:
            loss: float | Tensor
            loss, stop, late = steps[-1].sums[:_APART]
            if replica.world.size == 1:
                loss = steps[-1].loss
            return Agreed([loss], stop, late, *log.bytes_of_all(replica.world.size))
        saved = [log.saved_bytes()] if self._settings.compression.get("type", "none") != "none" else []
        apart = [] if replica.exchange.diverges else [replica.buffers.apart()]
        own_losses = read_together([step.loss for step in steps])
        own = [*self._votes(), log.unreported_bytes(), *apart, *saved, *own_losses]
        sums = torch.tensor(own, dtype=torch.float64)
        replica.world.all_reduce(sums)
        stop, late, sent, *rest = sums.tolist()
        if apart:
            self._agree_on_buffers(rest.pop(0), steps)
        saved_by_all, losses = (rest[0], rest[1:]) if saved else (0.0, rest)
        for step, loss_of_all in zip(steps, losses, strict=True):
            self._refuse(step, loss_of_all)
        copies = 1 if replica.exchange.shares_batch else replica.groups.data.size
        return Agreed([loss / copies for loss in losses], stop, late, int(sent), int(sent + saved_by_all))

    def _refuse(self, step: Step, loss_of_all: float) -> None:
        """Refuse the loss of a step that is read only now, if its sum over all workers is not finite.

        The worker whose loss it is raises the error. It leaves, and no other one may complete the step.

        Raises:
            TrainingError: this worker's loss is not finite.
            PeerLostError: that of another one.
        """
        if math.isfinite(loss_of_all):
            return
        rank, loss = self._replica.world.rank, float(step.loss)
        self._network.refuse_losses(step.number)
        if not math.isfinite(loss):  # of several steps without an agreement, the batches of the last ones are kept
            raise TrainingError(
                f"The loss became {loss} at step {step.number} on worker {rank}. Look for NaN and infinity in the "
                "data, lower the learning rate, warm it up, or set train.grad_clip."
            )
        self._replica.world.barrier()

    def _agree_on_buffers(self, apart: float, steps: Sequence[Step]) -> None:
        """Make the replicas' buffers equal after some steps, if the sum over all workers says that they differ."""
        replica = self._replica
        samples = sum(step.num_samples for step in steps), sum(step.batch_samples for step in steps)
        if self._network.streams and replica.buffers.averages_statistics:
            replica.buffers.start_statistics(*samples).wait()
        if apart:
            replica.buffers.agree(*samples)

    def _count_remaining_bytes(self) -> None:
        """Count the bytes that diverging replicas sent since they last agreed.

        They come from agreeing on a model to validate or to keep.
        """
        sent = torch.tensor(float(self._log.unreported_bytes()), dtype=torch.float64)
        self._replica.world.all_reduce(sent)
        self._replica.position.bytes_sent += int(sent)
        self._replica.position.bytes_dense += int(sent)

    def _outcome(self, ended: str, training_s: float, began_step: int) -> Outcome:
        replica, position, plan = self._replica, self._replica.position, self._plan
        mean = position.epoch_loss_sum / max(1, position.epoch_samples)
        memory = replica.world.all_gather(torch.tensor([peak_memory_bytes(replica.device)]))
        usage = {
            **self._log.usage.summary(),
            "peak_activation_bytes": replica.meter.peak_bytes,
            "read_retries": READS.num_retries,
            "parts": parts_of(replica),
            "reports": reports_of(replica),
            "arithmetic": arithmetic_here(),
            "initial": initial_summary(replica.task),
        }
        summary = replica.exchange.summary()
        return Outcome(
            ended=ended,
            step=position.step,
            epochs=round(plan.epochs_before(position.step), 6),
            final={"train": {"loss": mean} if position.step else None, "validation": position.validation},
            bytes_sent=position.bytes_sent,
            bytes_dense=position.bytes_dense,
            samples=plan.samples_before(position.step) - plan.samples_before(began_step),
            training_s=training_s,
            memory=memory.flatten().tolist(),
            usage=objects.gather_json(replica.world, usage),
            staleness=dict(self._log.staleness),
            summary={**({"exchange": summary} if summary else {}), **position.summary()},
        )
