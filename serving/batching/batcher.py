"""One queue, any number of replicas that pull whole batches from it, and a policy that decides when a batch leaves.

Which requests enter the queue, which are refused, and which leave it unanswered is decided here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from orchestray.platform.errors import ConfigError
from orchestray.serving.batching.core import Core
from orchestray.serving.batching.dispatch import Dispatch
from orchestray.serving.batching.errors import BatcherClosedError, DeadlineError, QueueFullError, fail
from orchestray.serving.batching.listener import (
    SHED_EXPIRED,
    SHED_INFEASIBLE,
    SHED_QUEUE_FULL,
    BatcherStats,
    BatchListener,
    Process,
    RunnerStats,
)
from orchestray.serving.batching.policies import Adaptive, Policy
from orchestray.serving.batching.queue import PATIENCE_S, Request
from orchestray.serving.batching.runner import RunFunction, RunnerHandle

In = TypeVar("In")
Out = TypeVar("Out")

OBJECTIVES = ("mean", "tail", "throughput")
_ROOM_ONCE_READ = 0.5
"""Fraction of the reserve for prediction errors that still applies when a request that `refusal` let through is put.

With the full reserve, changes since then would refuse many of those after they have already been read and parsed.
"""


class Batcher(Generic[In, Out]):
    """A batcher that answers single requests through functions on batches.

    It belongs to one event loop and uses only that loop's clock. Requests wait in one queue, the most urgent first (see
    `RequestQueue`). A free runner takes up to `max_batch_size` of them when the `policy` decides so.

    Args:
        policy: decides when a batch that is not full is run; default: `Adaptive`.
        max_batch_size: largest number of requests in one call of a runner.
        max_queue: largest number of requests that may wait.
        objective: what the policy optimizes: the `mean` of latency, its `tail`, or `throughput`.
        run_timeout_s: seconds after which a runner is considered hung; None: never.
        isolate: a batch whose function raises, or does not answer each request, is run again in halves until the
            requests that fail are alone, and the others are answered: up to 2 n - 1 calls for n requests. If all of
            them fail, batches are not split any more until one was answered. False: the whole batch fails, in one call.
        listener: receives the events of the batcher.
    """

    def __init__(
        self,
        *,
        policy: Policy | None = None,
        max_batch_size: int = 32,
        max_queue: int = 1024,
        objective: str = "mean",
        run_timeout_s: float | None = None,
        isolate: bool = True,
        listener: BatchListener | None = None,
    ) -> None:
        _check(max_batch_size, max_queue, objective, run_timeout_s)
        self.max_batch_size, self.max_queue = max_batch_size, max_queue
        self._core: Core[In, Out] = Core(policy or Adaptive(), max_batch_size, objective, listener or BatchListener())
        self.model = self._core.model
        self._dispatch = Dispatch(self._core, run_timeout_s, isolate=isolate)
        self._num_requests = self._num_named = 0
        self._last_reason = SHED_QUEUE_FULL
        """Reason for which `refusal` refused the last request."""
        self._num_let_through = 0
        """Requests that `refusal` let through and that have not been put yet, or never will be."""

    def describe(self) -> dict[str, Any]:
        """Return how batches are formed, as JSON values."""
        return {**self._core.policy.describe(), "max_batch_size": self.max_batch_size}

    async def submit(self, item: In, *, priority: int = 0, deadline_s: float | None = None) -> Out:
        """Return the answer for one item.

        Cancelling this takes the request out of the queue at once.

        Args:
            item: an element of the list that the batch function gets.
            priority: higher goes first.
            deadline_s: time after which the answer is useless, on the loop's clock (`loop.time() + seconds`).

        Raises:
            QueueFullError, DeadlineError, BatchFunctionError, BatcherClosedError, or what the batch function returned
                for this item.
        """
        return await self.put(item, priority=priority, deadline_s=deadline_s)

    def put(self, item: In, *, priority: int = 0, deadline_s: float | None = None) -> asyncio.Future[Out]:
        """Add a request like `submit`, but return its future; refusals are raised immediately."""
        core, loop = self._core, self._core.loop
        if core.closed:
            raise BatcherClosedError("The batcher was closed and takes no more requests.")
        now_s = loop.time()
        self._note_arrival(now_s)
        self._num_requests += 1
        request: Request[In, Out] = Request(
            item,
            loop=loop,
            number=self._num_requests,
            priority=priority,
            deadline_s=deadline_s,
            on_cancel=core.forget,
        )
        if deadline_s is not None:
            room = 1.0
            if self._num_let_through:
                self._num_let_through -= 1
                room = _ROOM_ONCE_READ
            expected_s = core.admission.expected_s(request.key, deadline_s, now_s, room=room)
            if expected_s is None:
                core.count_shed(SHED_INFEASIBLE)
                raise DeadlineError(core.admission.retry_after_s(now_s))
            request.expected_s = expected_s
        if len(core.queue) >= self.max_queue:
            self._make_room(request)
        core.queue.push(request)
        if deadline_s is not None:
            request.timer = loop.call_at(deadline_s, self._expire, request)
        self._dispatch.look_soon()
        return request

    def refusal(self, deadline_s: float | None = None, *, num_coming: int = 0) -> QueueFullError | DeadlineError | None:
        """Return what `put` would raise now for a request of priority 0; None: it would be admitted.

        A request that is refused by this is counted like one that was put and refused.

        Args:
            deadline_s: deadline, on the loop's clock.
            num_coming: requests that this has let through and that are not put yet.
        """
        core = self._core
        now_s = core.loop.time()
        if core.closed:
            return None
        error: QueueFullError | DeadlineError | None = None
        if deadline_s is not None:
            key = self._key_of_next(deadline_s)
            if core.admission.expected_s(key, deadline_s, now_s, num_coming) is None:
                self._last_reason = SHED_INFEASIBLE
                error = DeadlineError(core.admission.retry_after_s(now_s))
        if error is None and len(core.queue) >= self.max_queue and core.queue.last().key[0] <= 0:
            self._last_reason = SHED_QUEUE_FULL
            error = QueueFullError(self.max_queue, core.admission.retry_after_s(now_s))
        if error is not None:
            self.refused_again()
        elif deadline_s is not None:
            self._num_let_through = min(self._num_let_through + 1, self.max_queue)
        return error

    def refused_again(self) -> None:
        """Count one more request that was refused for the last reason of `refusal`."""
        self._core.count_shed(self._last_reason)
        self._note_arrival(self._core.loop.time())

    def queue_s(self, deadline_s: float | None = None, *, num_coming: int = 0) -> float:
        """Return the seconds that full batches need for what waits ahead of a request of priority 0.

        Batches that run already are not counted.

        Args:
            deadline_s: deadline, on the loop's clock.
            num_coming: further requests ahead of it, which are not put yet.
        """
        core = self._core
        key = self._key_of_next(core.loop.time() + PATIENCE_S if deadline_s is None else deadline_s)
        return core.admission.queue_s(key, num_coming)

    def _key_of_next(self, deadline_s: float) -> tuple[int, float, int]:
        """Return the sort key of the next request, with priority 0."""
        return (0, deadline_s, self._num_requests + 1)

    def _note_arrival(self, now_s: float) -> None:
        try:
            self._core.policy.arrived(now_s)
        except Exception as error:  # noqa: BLE001 - the user's policy
            self._core.give_up_policy(error)
        self._core.admission.arrived(now_s)

    def _make_room(self, request: Request[In, Out]) -> None:
        """Refuse the new request, or the last in the queue if that has a lower priority."""
        core = self._core
        last = core.queue.last()
        error = QueueFullError(self.max_queue, core.admission.retry_after_s(request.arrived_s))
        core.count_shed(SHED_QUEUE_FULL)
        if last.key[0] <= request.key[0]:
            raise error
        core.queue.remove(last)
        fail(last, error)

    def _expire(self, request: Request[In, Out]) -> None:
        """Fail a request whose deadline has passed: it is dropped if it waits, and too late if it runs.

        A request in a batch that its runner has not begun still waits, for the batch before it.
        """
        if request.done():
            return
        core = self._core
        waited = request.queued or (request.after is not None and not request.after.done())
        core.forget(request)
        core.count_shed(SHED_EXPIRED)
        fail(request, DeadlineError(core.admission.retry_after_s(request.deadline_s) if waited else None))

    # -- runners -------------------------------------------------------------------------------------------------------

    def add_runner(
        self,
        run: RunFunction[In, Out],
        *,
        name: str = "",
        replace: Callable[[], RunFunction[In, Out]] | None = None,
        pace_s: Callable[[], float] | None = None,
        process: Process | None = None,
    ) -> RunnerHandle[In, Out]:
        """Add a replica: `run` takes a list of items, one batch at a time, and returns an answer or exception for each.

        If `run` hangs or raises RunnerLostError, `replace` makes the function that succeeds it. Without `replace`, a
        function that hung is called again for the next batch, and a lost runner is removed.

        A runner that may be called while it runs a batch has a `pace_s` (see `RunnerHandle`). It runs batches in the
        order given, and drops those cancelled before they begin. So it stays busy even if a round of the event loop
        takes longer than a batch.

        Args:
            run: the batch function.
            name: name of the runner for listeners; default: a new one.
            replace: returns a new batch function.
            pace_s: returns the seconds that the runner needs for a full batch.
            process: the process in which the runner computes, for its statistics.
        """
        core = self._core
        now_s = core.loop.time()
        given = name or self._new_name()
        if not core.runners:
            core.admission.start.ended(now_s)
        runner = RunnerHandle(self, run, given, replace=replace, pace_s=pace_s, process=process)
        core.runners.append(runner)
        core.admission.changed()
        self._dispatch.look_soon()
        return runner

    def _new_name(self) -> str:
        """Return a name that no runner has, and that this method has not returned before."""
        taken = {runner.name for runner in (*self._core.runners, *self._core.retiring)}
        while (name := f"runner-{self._num_named}") in taken:
            self._num_named += 1
        self._num_named += 1
        return name

    def expect_start(self, seconds: float) -> None:
        """Set the expected seconds until a runner exists if there is none; later starts are measured."""
        self._core.admission.start.expect(seconds)

    @property
    def is_deserted(self) -> bool:
        """True if every runner has gone, clearly longer ago than a new one takes to start."""
        core = self._core
        return not core.runners and core.admission.start.is_overdue(core.loop.time())

    @property
    def is_starting(self) -> bool:
        """True if requests wait for a first runner, which may yet come in the time that takes."""
        return self._core.admission.start.is_awaited(self._core.loop.time())

    def retire(self, runner: RunnerHandle[In, Out]) -> None:
        """Give a runner no more batches; `RunnerHandle.remove` also waits for those that it has."""
        self._dispatch.flights.retire(runner)

    # -- end and statistics --------------------------------------------------------------------------------------------

    async def close(self, *, drain: bool = True) -> None:
        """Take no more requests; answer those that wait and run (`drain`), or fail them with BatcherClosedError."""
        core = self._core
        core.closed = True
        if drain:
            self._dispatch.look_soon()
            await core.drained.wait()
        core.abandoned = True
        for request in core.queue.pop(len(core.queue)):
            fail(request, BatcherClosedError("The batcher was closed before the request was run."))
        await self._dispatch.flights.abandon()
        core.drained.set()  # a close that does not drain ends one that does
        self._dispatch.stop_waiting()

    @property
    def stats(self) -> BatcherStats:
        """Current state of the batcher."""
        core, flights = self._core, self._dispatch.flights
        runners = (*core.runners, *core.retiring)
        return BatcherStats(
            num_queued=len(core.queue),
            num_in_flight=sum(len(flight.batch) for runner in runners for flight in runner.flights),
            num_runners=len(core.runners),
            num_answered=flights.num_answered,
            num_batches=flights.num_batches,
            num_shed=dict(core.num_shed),
            wait_s=self._dispatch.wait_s,
            a_s=core.model.a_s,
            c_s=core.model.c_s,
            start_s=core.admission.start.seconds,
            runners=tuple(RunnerStats(one.name, one.num_batches, one.num_items, one.process) for one in runners),
        )


def _check(max_batch_size: int, max_queue: int, objective: str, run_timeout_s: float | None) -> None:
    problems = []
    if max_batch_size < 1:
        problems.append(f"max_batch_size: must be >= 1, got {max_batch_size}")
    if max_queue < 1:
        problems.append(f"max_queue: must be >= 1, got {max_queue}")
    if objective not in OBJECTIVES:
        problems.append(f"objective: must be one of {', '.join(OBJECTIVES)}, got {objective!r}")
    if run_timeout_s is not None and not run_timeout_s > 0:
        problems.append(f"run_timeout_s: must be > 0 or None, got {run_timeout_s}")
    if problems:
        raise ConfigError(problems)
