"""PipeDream: a pipeline that is never empty. Stages update their weights after each micro-batch, without waiting.

Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training" (SOSP 2019), sections 3.2 (one forward,
one backward over a stream of micro-batches) and 3.3 (weight stashing, vertical sync). Stage k of K has at most K - k
micro-batches in flight.

With weight stashing, a micro-batch goes back through a stage with the weights of its forward pass. In the steady state
these have been updated K - 1 - k times since. With vertical sync it uses one version on all stages, that of its entry
into the first. This version is K - 1 updates old on each.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from orchestray.platform.errors import ConfigError
from orchestray.trainers.core.network import Usage
from orchestray.trainers.parallel.pipeline.action_log import now_s
from orchestray.trainers.parallel.pipeline.links import Values
from orchestray.trainers.parallel.pipeline.network import PipelineNetwork
from orchestray.trainers.parallel.pipeline.runner import Job
from orchestray.trainers.parallel.pipeline.schedules import make_programs
from orchestray.trainers.parallel.pipeline.schedules.actions import Action, Kind
from orchestray.trainers.parallel.pipeline.tied import add_up
from orchestray.trainers.parallel.pipeline.weight_versions import WeightVersions

if TYPE_CHECKING:
    from orchestray.platform.comm.collective import Collective
    from orchestray.platform.data.stream import Share

UpdateStage = Callable[[Sequence[Tensor], Sequence[Tensor | None], int, int], None]
"""Function of parameters (to be changed in place), their gradients, the step, and
the micro-batch's index in it, from 0.
"""


@dataclass
class StreamStep:
    """A batch whose micro-batches have all passed through this worker's stage, both ways."""

    step: int
    num_micro_batches: int
    """Number of micro-batches over all replicas, and of updates."""
    losses: dict[int, float] = field(default_factory=dict)
    """Weighted loss of each micro-batch, where this worker knows it."""
    staleness: list[int] = field(default_factory=list)
    """Number of updates between reading the weights and applying their gradient, for each micro-batch."""

    @property
    def loss_sum(self) -> float:
        """The share's part of the batch's mean loss, with the weights that each
        micro-batch used; 0 if it is not known.
        """
        return sum(self.losses[number] for number in sorted(self.losses))


@dataclass
class _InFlight:
    """A micro-batch in flight."""

    key: int
    """Index of the micro-batch in the stream, counted from the beginning."""
    job: Job | None
    """The job; None if this replica has no sample of the micro-batch."""
    version: int
    done: StreamStep


class PipeDreamNetwork(PipelineNetwork):
    """A `Network` that trains with `run_segment`; its `backward` runs a batch by 1F1B, with a flush."""

    streams = True

    def __init__(self, *arguments: Any, vertical_sync: bool = False, **options: Any) -> None:
        """
        Args:
            arguments: arguments of `PipelineNetwork`, without a program; one stage a worker.
            vertical_sync: True if a micro-batch uses the same version of the weights on all stages.
            options: keyword arguments of `PipelineNetwork`.

        Raises:
            ConfigError: a worker has several stages, or a parameter lives in several.
        """
        placement, tied = options["placement"], options.get("tied", ())
        if any(len(stages) != 1 for stages in placement):
            raise ConfigError("PipeDream has one stage a worker: set stages_per_worker to 1, or another schedule.")
        if tied:
            raise ConfigError(
                f"The parameter {tied[0].name!r} lives in several stages, and PipeDream's stages update each for "
                "itself. Choose a synchronous schedule (1f1b), or cut the model so that one stage has all its uses."
            )
        groups = options["groups"]
        num_workers, worker = len(placement), groups.coordinate.pipeline
        super().__init__(
            *arguments, program=lambda number: make_programs("pipedream", num_workers, 1, number)[worker], **options
        )
        self._stage = placement[worker][0]
        self._num_stages = num_workers
        self._vertical_sync = vertical_sync
        self._data: Collective = groups.data
        named = [(name, parameter) for name, parameter in self.model.named_parameters() if parameter.requires_grad]
        self._names = [name for name, _ in named]
        self._parameters = [parameter for _, parameter in named]
        self.versions = WeightVersions(self._parameters)
        self._num_begun = 0
        self._num_begun_at_flush = 0
        self._marked_s = now_s()

    def run_segment(self, shares: Iterable[Share], update: UpdateStage, *, first_step: int = 1) -> Iterator[StreamStep]:
        """Train on a stream of batches; it ends with a flush, after which all stages have had all updates.

        All workers of all copies iterate over shares of the same batches, to the end. `update` is called once for each
        micro-batch, in order. Its gradients are those of its part of the batch's mean loss, summed over the stage's
        replicas. Micro-batches of a batch come in while those of earlier ones are in flight. Each step is
        yielded when its last update has been done here. Leaving the iteration early breaks the pipeline.

        Args:
            shares: this replica's share of each batch.
            update: the optimizer.
            first_step: the step of the first share.

        Raises:
            PeerLostError: another worker is gone. The stages then have had different numbers of updates: resume from a
                checkpoint.
            TrainingError: the loss is not a finite scalar, or the user's code failed.
        """
        in_flight: deque[_InFlight] = deque()
        try:
            with self._all_or_nothing():
                for step, share in enumerate(shares, start=first_step):
                    for micro_batch in self._micro_batches(share, step):
                        self._begin(micro_batch)
                        in_flight.append(micro_batch)
                        if len(in_flight) == self._num_stages - self._stage:
                            yield from self._finish(in_flight.popleft(), update)
                while in_flight:
                    yield from self._finish(in_flight.popleft(), update)
                self._links.settle()
        finally:
            self.versions.settle()
            self._num_begun_at_flush = self._num_begun

    def _micro_batches(self, share: Share, step: int) -> Iterator[_InFlight]:
        jobs: list[Job | None] = [*self._jobs(share, step)]
        jobs += [None] * (share.num_micro_batches - len(jobs))
        done = StreamStep(step, len(jobs))
        self._log.begin_step(step)
        for job in jobs:
            yield _InFlight(self._num_begun, job, self._version_for(self._num_begun), done)

    def _version_for(self, key: int) -> int:
        if self._vertical_sync:  # what the first stage has when the micro-batch enters it
            return max(self._num_begun_at_flush, key - (self._num_stages - 1))
        return self.versions.newest

    def _begin(self, micro_batch: _InFlight) -> None:
        self._num_begun += 1
        self.versions.hold(micro_batch.version)
        self.versions.want_from(self._version_for(self._num_begun) if self._vertical_sync else self.versions.newest + 1)
        if micro_batch.job is None:
            return
        given = self._given(self._stage, micro_batch.key)
        begin_s = now_s()
        self.versions.place(micro_batch.version)
        sent, loss = self._runners[self._stage].forward(micro_batch.key, given, micro_batch.job)
        if self.is_reporting:
            micro_batch.done.losses[micro_batch.job.number] = loss * micro_batch.job.weight
        self._done(Action(self._stage, Kind.FORWARD, micro_batch.key), begin_s, self._stage + 1, sent)

    def _finish(self, micro_batch: _InFlight, update: UpdateStage) -> Iterator[StreamStep]:
        if micro_batch.job is not None:
            self._go_back(micro_batch, micro_batch.job)
        gradients: list[Tensor | None] = [parameter.grad for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
        self._sum_up(gradients)
        begin_s = now_s()
        done = micro_batch.done
        done.staleness.append(self.versions.newest - micro_batch.version)
        self.versions.release(micro_batch.version)
        number = len(done.staleness) - 1
        self.versions.advance(lambda tensors: update(tensors, gradients, done.step, number))
        self._log.count(now_s() - begin_s)
        if len(done.staleness) == done.num_micro_batches:
            yield done

    def _go_back(self, micro_batch: _InFlight, job: Job) -> None:
        runner, key = self._runners[self._stage], micro_batch.key
        if runner.expects_gradients(key):
            runner.take_gradients(key, self._links.receive(Kind.BACKWARD, self._stage, key).tensors)
        begin_s = now_s()
        gives = runner.gives_gradients(key)
        self.versions.place(micro_batch.version)
        gradients = runner.backward(key, job)
        sent = Values(tuple(gradients), ()) if gives else None
        self._done(Action(self._stage, Kind.BACKWARD, key), begin_s, self._stage - 1, sent)

    def _sum_up(self, gradients: list[Tensor | None]) -> None:
        """Sum a micro-batch's gradients in place over the replicas of this stage (and over its tensor group)."""
        everything = range(len(gradients))
        partial = [index for index in everything if self._names[index] in self.partial]
        if partial and self._tensor_group.size > 1:
            add_up(self._tensor_group, self._parameters, gradients, partial)
        if everything and self._data.size > 1:
            add_up(self._data, self._parameters, gradients, everything)

    def usage(self) -> Usage:
        """Return this worker's usage; the span of a step is the time since the last call."""
        usage = super().usage()
        usage.busy_s = self._log.take_own()
        now, before = now_s(), self._marked_s
        self._marked_s, usage.span_s = now, now - before
        return usage
