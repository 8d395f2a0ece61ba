"""The memory and traffic of workers of a layout with a pipeline, counted while they make a few steps.

The stages of one replica are real, as threads of this process. They compute in each other's way, so nothing is timed.
The other replicas are imagined.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from orchestray.platform.comm.dry import Call, FirstMembers
from orchestray.platform.comm.thread_group import run_members
from orchestray.trainers.config.settings import PipelineSettings
from orchestray.trainers.loop.loop import MOST_STEPS
from orchestray.trainers.planning.agreements import agreed_bytes
from orchestray.trainers.planning.dry_run import WatchedHost, axis_of_group, held_bytes, settings_to_measure
from orchestray.trainers.planning.found import CountedRun, CountedStep, CountedWorker
from orchestray.trainers.planning.run_length import RunLength

if TYPE_CHECKING:
    from collections.abc import Sequence

    from orchestray.platform.comm.collective import Collective
    from orchestray.trainers.config.settings import ReplicaSettings
    from orchestray.trainers.loop.replica import Replica

_IN_ONE_PASS = ("naive", "gpipe", "1f1b", "interleaved_1f1b")
"""Schedules that go back through a stage once, so that batch normalisation asks the other replicas once."""
_WARM_UP = 2
"""Agreements before the steps that count."""


def count(settings: ReplicaSettings) -> CountedRun:
    """Count what workers hold and send, but for what they agree by.

    Args:
        settings: settings of the run.

    Raises:
        OrchestrayError: the config does not fit the task, the model cannot be cut, or the task's code failed.
    """
    every, settings = settings_to_measure(settings)
    period = int(settings.exchange["every"]) if every > 1 and settings.exchange["every"] != "end" else 1
    cadence = MOST_STEPS if settings.is_streaming else 1  # nothing is saved, but workers agree so often
    settings = replace(settings, checkpoint_every_steps=cadence)
    # One after the other: models that are built at the same time would share torch's random numbers.
    hosts = [WatchedHost(settings) for _ in range(settings.layout.model_size)]

    def work(stage: Collective) -> CountedWorker:
        calls: list[Call] = []
        world = FirstMembers(stage, settings.layout.size, calls) if settings.layout.data > 1 else stage
        replica = hosts[stage.rank].replica
        try:
            replica.connect(world)
            stage.barrier()  # threads share torch's generator: none may draw before all are connected
            last = _WARM_UP + period
            counts = _Counts(replica, calls, last)
            replica.run(time.time())
            return CountedWorker(*held_bytes(replica), tuple(counts.steps[_WARM_UP:last]))  # it made one more
        finally:
            world.close()

    return CountedRun(every, settings.layout.data, tuple(run_members(len(hosts), work)))


def countable(settings: ReplicaSettings, begins: Sequence[str]) -> tuple[ReplicaSettings, bool]:
    """Return settings whose count of what replicas and all workers send is that of others, and True if all of it is.

    Many pipelines differ only in what they send between stages, which is known without running them.

    Args:
        settings: settings of the others.
        begins: names of the layers that begin their stages after the first.
    """
    layout, pipeline = settings.layout, settings.pipeline
    is_alone = layout.data * layout.tensor == 1
    is_whole = layout.tensor == 1 and settings.exchange.get("shard", "none") == "none"
    if is_alone or (is_whole and pipeline.schedule in _IN_ONE_PASS):
        number = min(settings.accumulate, layout.pipeline) if is_alone else settings.accumulate
        return replace(settings, pipeline=PipelineSettings(split="equal"), accumulate=number, recompute="none"), False
    return replace(settings, pipeline=replace(pipeline, split=[*begins] or pipeline.split)), True


class _Counts:
    """A counter of the traffic of a worker in each step, which ends its run.

    Counts are means, where it agrees with the others after several steps.
    """

    def __init__(self, replica: Replica, calls: list[Call], num: int) -> None:
        self.steps: list[CountedStep] = []
        self._replica, self._calls, self._num = replica, calls, num
        self._complete, replica.log.complete = replica.log.complete, self._completed  # type: ignore[method-assign, assignment]
        self._before = self._sent()
        calls.clear()

    def _completed(self, steps: Sequence[Any], *others: Any) -> None:
        sent, calls = self._sent(), [*self._calls]
        self._calls.clear()
        made = len(steps)
        num_bytes = {axis: (sent[axis] - self._before[axis]) / made for axis in sent}
        settings = self._replica.settings
        num_bytes["world"] -= agreed_bytes(settings, RunLength(0, made, settings.batch_size)) / settings.layout.size
        # Both directions are used at once: a receive is counted with the send beside it.
        among_replicas = [call for call in calls if axis_of_group(call.group) == "data" and call.kind != "receive"]
        operations = tuple((call.kind, call.size, call.num_bytes) for call in among_replicas)
        self.steps.append(CountedStep(made, num_bytes, self._replica.exchange.bytes_beyond, operations))
        self._before = sent
        self._replica.stop_requested = len(self.steps) >= self._num
        self._complete(steps, *others)

    def _sent(self) -> Counter[str]:
        """Return the bytes that this worker has sent in its groups, by their axis."""
        sent = Counter[str]()
        for path, num_bytes in self._replica.world.bytes_by_group.items():
            sent[axis_of_group(path)] += num_bytes
        groups = self._replica.groups
        sent["pipeline"] += groups.bytes_sent - groups.world.bytes_sent  # between stages
        return sent
