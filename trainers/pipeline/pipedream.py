"""PipeDream: a pipeline that is never empty. Stages update their weights after each micro-batch, and wait for nobody.

Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training" (SOSP 2019), sections 3.2 (one forward,
one backward over a stream of micro-batches) and 3.3 (weight stashing, vertical sync). Of K stages, stage k has at most
K - k micro-batches under way. With weight stashing a micro-batch goes back through a stage by the weights it came
through it with; in the steady state these have been updated K - 1 - k times since. With vertical sync it uses the same
version on all stages, that of its entry into the first one, K - 1 updates old on each.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from orchestray.platform.errors import ConfigError
from orchestray.trainers.network.base import Usage
from orchestray.trainers.pipeline.action_log import now_s
from orchestray.trainers.pipeline.actions import Action, Kind
from orchestray.trainers.pipeline.links import Values
from orchestray.trainers.pipeline.network import PipelineNetwork
from orchestray.trainers.pipeline.runner import Job
from orchestray.trainers.pipeline.schedules import make_programs
from orchestray.trainers.pipeline.tied import add_up
from orchestray.trainers.pipeline.weight_versions import WeightVersions

if TYPE_CHECKING:
    from orchestray.platform.collective import Collective
    from orchestray.platform.data.stream import Share

UpdateStage = Callable[[Sequence[Tensor], Sequence[Tensor | None], int, int], None]
"""Called with parameters (to be changed in place), their gradients, the step and the micro-batch (in it, from 0)."""


@dataclass
class StreamStep:
    """A batch whose micro-batches have all gone through this worker's stage, both ways."""

    step: int
    num_micro_batches: int
    """Over all replicas; as many as there were updates."""
    losses: dict[int, float] = field(default_factory=dict)
    """Of each micro-batch, weighted, where this worker knows it."""
    staleness: list[int] = field(default_factory=list)
    """Of each micro-batch: updates of the stage between reading the weights and applying their gradient."""

    @property
    def loss_sum(self) -> float:
        """The share's part of the batch's mean loss, by the weights each micro-batch saw; 0 where it is not known."""
        return sum(self.losses[number] for number in sorted(self.losses))


@dataclass
class _Flight:
    """A micro-batch under way."""

    key: int
    """Its number in the stream, counted from the beginning."""
    job: Job | None
    """None: this replica has no sample of it."""
    version: int
    done: StreamStep


class PipeDreamNetwork(PipelineNetwork):
    """See `Network` and, for training, `run_segment`; `backward` goes through a batch by 1F1B, with a flush."""

    def __init__(self, *arguments: Any, vertical_sync: bool = False, **options: Any) -> None:
        """
        Args:
            arguments: as those of `PipelineNetwork`, without a program; one stage a worker.
            vertical_sync: whether a micro-batch sees the same version of the weights on all stages.
            options: as `arguments`.

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
        """Train on a stream of batches. It ends with a flush: then all stages have had all updates.

        All workers of all copies iterate over shares of the same batches, to the end. `update` is called once a
        micro-batch, in their order, with gradients of num_samples / batch_samples times the mean loss, summed over the
        replicas of the stage. Micro-batches of a batch come in while those of earlier ones are still under way; each
        step is yielded when its last update has been done here. Leaving the iteration early breaks the pipeline.

        Args:
            shares: this replica's share of each batch.
            update: the optimizer.
            first_step: the step of the first share.

        Raises:
            PeerLostError: another worker is gone. The stages have had different numbers of updates by then: go on from
                a checkpoint.
            TrainingError: the loss is not a finite scalar, or the user's code failed.
        """
        flying: deque[_Flight] = deque()
        try:
            with self._all_or_nothing():
                for step, share in enumerate(shares, start=first_step):
                    for flight in self._flights(share, step):
                        self._begin(flight)
                        flying.append(flight)
                        if len(flying) == self._num_stages - self._stage:
                            yield from self._finish(flying.popleft(), update)
                while flying:
                    yield from self._finish(flying.popleft(), update)
                self._links.settle()
        finally:
            self.versions.settle()
            self._num_begun_at_flush = self._num_begun

    def _flights(self, share: Share, step: int) -> Iterator[_Flight]:
        jobs: list[Job | None] = [*self._jobs(share, step)]
        jobs += [None] * (share.num_micro_batches - len(jobs))
        done = StreamStep(step, len(jobs))
        self._log.begin_step(step)
        for job in jobs:
            yield _Flight(self._num_begun, job, self._version_for(self._num_begun), done)

    def _version_for(self, key: int) -> int:
        if self._vertical_sync:  # what the first stage has when the micro-batch enters it
            return max(self._num_begun_at_flush, key - (self._num_stages - 1))
        return self.versions.newest

    def _begin(self, flight: _Flight) -> None:
        self._num_begun += 1
        self.versions.hold(flight.version)
        self.versions.want_from(self._version_for(self._num_begun) if self._vertical_sync else self.versions.newest + 1)
        if flight.job is None:
            return
        given = self._given(self._stage, flight.key)
        begin_s = now_s()
        self.versions.place(flight.version)
        sent, loss = self._runners[self._stage].forward(flight.key, given, flight.job)
        if self.is_reporting:
            flight.done.losses[flight.job.number] = loss * flight.job.weight
        self._done(Action(self._stage, Kind.FORWARD, flight.key), begin_s, self._stage + 1, sent)

    def _finish(self, flight: _Flight, update: UpdateStage) -> Iterator[StreamStep]:
        if flight.job is not None:
            self._go_back(flight, flight.job)
        gradients: list[Tensor | None] = [parameter.grad for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
        self._sum_up(gradients)
        begin_s = now_s()
        done = flight.done
        done.staleness.append(self.versions.newest - flight.version)
        self.versions.release(flight.version)
        number = len(done.staleness) - 1
        self.versions.advance(lambda tensors: update(tensors, gradients, done.step, number))
        self._log.count(now_s() - begin_s)
        if len(done.staleness) == done.num_micro_batches:
            yield done

    def _go_back(self, flight: _Flight, job: Job) -> None:
        runner, key = self._runners[self._stage], flight.key
        if runner.expects_gradients(key):
            runner.take_gradients(key, self._links.receive(Kind.BACKWARD, self._stage, key).tensors)
        begin_s = now_s()
        gives = runner.gives_gradients(key)
        self.versions.place(flight.version)
        gradients = runner.backward(key, job)
        sent = Values(tuple(gradients), ()) if gives else None
        self._done(Action(self._stage, Kind.BACKWARD, key), begin_s, self._stage - 1, sent)

    def _sum_up(self, gradients: list[Tensor | None]) -> None:
        """Add up, in place, a micro-batch's gradients over the replicas of this stage (and over its tensor group)."""
        everything = range(len(gradients))
        partial = [index for index in everything if self._names[index] in self._partial]
        if partial and self._tensor_group.size > 1:
            add_up(self._tensor_group, self._parameters, gradients, partial)
        if everything and self._data.size > 1:
            add_up(self._data, self._parameters, gradients, everything)

    def usage(self) -> Usage:
        """See `Usage`. Here a step has no span of its own: it is the time since the last call."""
        usage = super().usage()
        usage.busy_s = self._log.take_own()
        now, before = now_s(), self._marked_s
        self._marked_s, usage.span_s = now, now - before
        return usage
