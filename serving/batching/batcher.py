"""One queue, any number of replicas that pull whole batches from it, and a policy that says when a batch leaves."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from orchestray.platform.errors import ConfigError
from orchestray.serving.batching.admission import Admission
from orchestray.serving.batching.errors import (
    BatcherClosedError,
    DeadlineError,
    QueueFullError,
    RunnerLostError,
    RunTimeoutError,
)
from orchestray.serving.batching.listener import (
    SHED_EXPIRED,
    SHED_INFEASIBLE,
    SHED_QUEUE_FULL,
    BatcherStats,
    BatchListener,
)
from orchestray.serving.batching.loans import Loans
from orchestray.serving.batching.outcomes import as_failure, fail
from orchestray.serving.batching.policies import Adaptive, Opportunity, Policy
from orchestray.serving.batching.policies.guarded import Guarded
from orchestray.serving.batching.queue import Request, RequestQueue
from orchestray.serving.batching.runner import Lender, RunFunction, RunnerHandle, call
from orchestray.serving.batching.service_time import ServiceTimeModel

In = TypeVar("In")
Out = TypeVar("Out")

OBJECTIVES = ("mean", "tail", "throughput")
_MOST_LOSSES = 2


class Batcher(Generic[In, Out]):
    """Answers single requests through functions on batches.

    Lives on one event loop, whose clock is the only one it knows. Requests wait in one queue, the most urgent first
    (see `RequestQueue`); a free runner takes up to `max_batch_size` of them, when the `policy` says so.

    Args:
        policy: when a batch that is not full is run; default: `Adaptive`.
        max_batch_size: requests in one call of a runner, at most.
        max_queue: requests that may wait, at most.
        objective: what the policy works for: the `mean` of latency, its `tail`, or `throughput`.
        run_timeout_s: seconds after which a runner is taken to hang; None: never.
        listener: is told what happens.
    """

    def __init__(
        self,
        *,
        policy: Policy | None = None,
        max_batch_size: int = 32,
        max_queue: int = 1024,
        objective: str = "mean",
        run_timeout_s: float | None = None,
        listener: BatchListener | None = None,
    ) -> None:
        _check(max_batch_size, max_queue, objective, run_timeout_s)
        self.max_batch_size = max_batch_size
        self.model = ServiceTimeModel(max_batch_size)
        self._max_queue = max_queue
        self._run_timeout_s = run_timeout_s
        self._listener = listener or BatchListener()
        self._policy = Guarded(policy or Adaptive(), self._policy_failed)
        self._policy.bind(max_batch_size=max_batch_size, objective=objective, model=self.model)
        self._queue: RequestQueue[In, Out] = RequestQueue()
        self._runners: list[RunnerHandle[In, Out]] = []
        self._retiring: set[RunnerHandle[In, Out]] = set()
        self._admission = Admission(self._queue, self._runners, self.model, max_batch_size)
        self._loans = Loans(self._queue, self._runners)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._look_scheduled = False
        self._closed = False
        self._abandoned = False
        self._drained = asyncio.Event()
        self._num_requests = 0
        self._num_named = 0
        self._num_answered = 0
        self._num_batches = 0
        self._shed: Counter[str] = Counter()
        self._wait_s = 0.0

    # -- requests ------------------------------------------------------------------------------------------------------

    async def submit(self, item: In, *, priority: int = 0, deadline_s: float | None = None) -> Out:
        """The answer for one item.

        Cancelling this takes the request out of the queue at once.

        Args:
            item: what the batch function gets, among others.
            priority: higher goes first.
            deadline_s: when the answer is of no use any more, on the loop's clock (`loop.time() + seconds`).

        Raises:
            QueueFullError, DeadlineError, BatchFunctionError, BatcherClosedError, or what the batch function
            returned for this item.
        """
        return await self.put(item, priority=priority, deadline_s=deadline_s)

    def put(self, item: In, *, priority: int = 0, deadline_s: float | None = None) -> asyncio.Future[Out]:
        """As `submit`, for callers that want a future; refusals are raised here and now."""
        loop = self._bind()
        if self._closed:
            raise BatcherClosedError("The batcher was closed and takes no more requests.")
        now_s = loop.time()
        self._policy.arrived(now_s)
        self._admission.rate.arrived(now_s)
        self._num_requests += 1
        request: Request[In, Out] = Request(
            item,
            loop=loop,
            number=self._num_requests,
            priority=priority,
            deadline_s=deadline_s,
            on_cancel=self._forget,
        )
        if deadline_s is not None and not self._admission.is_feasible(request.key, deadline_s, now_s):
            self._count_shed(SHED_INFEASIBLE)
            raise DeadlineError(self._admission.retry_after_s(now_s))
        if len(self._queue) >= self._max_queue:
            self._make_room(request)
        self._queue.push(request)
        if deadline_s is not None:
            request.timer = loop.call_at(deadline_s, self._expire, request)
        self._look_soon()
        return request

    def refusal(self, deadline_s: float | None = None, *, num_coming: int = 0) -> QueueFullError | DeadlineError | None:
        """What `put` would raise now for a request of priority 0, before anything is made of it; None: it is taken.

        A request that is refused by this is counted, as one that was put and refused.

        Args:
            deadline_s: on the loop's clock.
            num_coming: requests that this has let through, and that are not put yet.
        """
        loop = self._bind()
        if self._closed:
            return None
        now_s = loop.time()
        error: QueueFullError | DeadlineError | None = None
        if deadline_s is not None:
            key = (0, deadline_s, self._num_requests + 1)
            if not self._admission.is_feasible(key, deadline_s, now_s, num_coming):
                self._count_shed(SHED_INFEASIBLE)
                error = DeadlineError(self._admission.retry_after_s(now_s))
        if error is None and len(self._queue) >= self._max_queue and self._queue.last().key[0] <= 0:
            self._count_shed(SHED_QUEUE_FULL)
            error = QueueFullError(self._max_queue, self._admission.retry_after_s(now_s))
        if error is not None:
            self._policy.arrived(now_s)
            self._admission.rate.arrived(now_s)
        return error

    def num_rounds(self, num_more: int) -> float:
        """Full batches of each runner, until so many further requests are run behind those that wait."""
        return (len(self._queue) + num_more) / (self.max_batch_size * max(1, len(self._runners)))

    def _make_room(self, request: Request[In, Out]) -> None:
        """Refuse the newcomer, or the last in the queue where that has a lower priority."""
        last = self._queue.last()
        error = QueueFullError(self._max_queue, self._admission.retry_after_s(request.arrived_s))
        self._count_shed(SHED_QUEUE_FULL)
        if last.key[0] <= request.key[0]:
            raise error
        self._queue.remove(last)
        fail(last, error)

    def _forget(self, request: Request[In, Out]) -> None:
        if request.timer is not None:
            request.timer.cancel()
        if request.queued:
            self._queue.remove(request)
            self._note_drained()

    def _expire(self, request: Request[In, Out]) -> None:
        """Its deadline is now: what waits is dropped, and what runs has come too late."""
        if request.done():
            return
        waited = request.queued
        self._forget(request)
        self._count_shed(SHED_EXPIRED)
        fail(request, DeadlineError(self._admission.retry_after_s(request.deadline_s) if waited else None))

    # -- batches -------------------------------------------------------------------------------------------------------

    def _look_soon(self) -> None:
        """Look for a batch when all that is ready now has run: requests of one moment share a batch."""
        if not self._look_scheduled:
            self._look_scheduled = True
            self._bind().call_soon(self._look)

    def _look(self) -> None:
        self._look_scheduled = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._queue and (idle := [runner for runner in self._runners if runner.idle]):
            now_s = self._bind().time()
            hurried = any(runner.hurried for runner in idle)
            wait_s = 0.0 if hurried else self._chosen_wait_s(now_s, len(idle))
            if wait_s > 0:
                self._timer = self._bind().call_at(now_s + wait_s, self._look)
                return
            batch = self._take(now_s)
            if batch:
                # The one that has been idle for longest: so they all get equal parts where there is little to do.
                self._start(min(idle, key=_started_s), batch, now_s)
        self._loans.settle(self._bind().time())
        self._note_drained()

    def look_again(self) -> None:
        """What a runner may do has changed."""
        self._look_soon()

    def _chosen_wait_s(self, now_s: float, num_idle: int) -> float:
        num_queued = len(self._queue)
        if num_queued >= self.max_batch_size or self._closed:
            return 0.0
        others_s = [free_s for free_s in self._admission.free_in_s(now_s) if free_s > 0]
        opportunity = Opportunity(
            now_s=now_s,
            num_queued=num_queued,
            oldest_s=self._queue.oldest_s,
            num_idle=num_idle,
            next_free_s=0.0 if num_idle > 1 else min(others_s, default=math.inf),
        )
        wait_s = self._policy.wait_s(opportunity)
        deadline_s = self._queue.earliest_s
        if deadline_s < math.inf:
            # Nobody is made late by waiting for others.
            wait_s = min(wait_s, deadline_s - now_s - self.model.cautious_s(self.max_batch_size))
        wait_s = wait_s if wait_s > 1e-9 else 0.0
        self._wait_s = wait_s
        self._tell(self._listener.waiting, wait_s)
        return wait_s

    def _take(self, now_s: float) -> Sequence[Request[In, Out]]:
        """The next batch, without those that cannot be in time in it.

        It is never made smaller to save its most urgent request: under load that costs more requests than it saves.
        """
        while self._queue:
            first = self._queue.first(self.max_batch_size)
            limit_s = now_s + (self.model.cautious_s(len(first)) if self.model.trusted else 0.0)
            late = [request for request in first if request.deadline_s < limit_s]
            if late and len(late) == len(self._queue) and late[-1].deadline_s >= now_s + self.model.fastest_s:
                late.pop()  # one is tried: what spoiled the prediction may be over
            if not late:
                break
            retry_after_s = self._admission.retry_after_s(now_s)
            for request in late:
                self._forget(request)
                self._count_shed(SHED_INFEASIBLE)
                fail(request, DeadlineError(retry_after_s))
        return self._queue.pop(self.max_batch_size)

    def _start(self, runner: RunnerHandle[In, Out], batch: Sequence[Request[In, Out]], now_s: float) -> None:
        self._num_batches += 1
        runner.batch = batch
        runner.started_s = now_s
        runner.granted, runner.hurried = runner.lender is None, False
        self._tell(self._listener.batch_started, runner.name, [now_s - request.arrived_s for request in batch])
        runner.task = self._bind().create_task(self._run(runner, batch))
        runner.task.add_done_callback(lambda task: self._settle(runner, task))

    def _settle(self, runner: RunnerHandle[In, Out], task: asyncio.Task[None]) -> None:
        """A task that is cancelled before its first step runs none of its code: its batch is looked after here."""
        if runner.task is task:
            self._end(runner, runner.batch, RunnerLostError("The runner was taken away before it ran the batch."))

    async def _run(self, runner: RunnerHandle[In, Out], batch: Sequence[Request[In, Out]]) -> None:
        error: BaseException | None = None
        try:
            answers = await call(runner.run, [request.item for request in batch], self._run_timeout_s)
            self._answer(batch, answers)
        except asyncio.CancelledError:
            error = RunnerLostError("The runner was taken away while it ran the batch.")
        except Exception as raised:  # noqa: BLE001 - whatever it is, the requests of the batch are told
            error = raised
        except BaseException as raised:
            error = raised
            raise
        finally:
            self._end(runner, batch, error)

    def _answer(self, batch: Sequence[Request[In, Out]], answers: Sequence[Out | Exception]) -> None:
        for request, answer in zip(batch, answers, strict=True):
            if request.done():
                continue
            self._num_answered += 1
            if request.timer is not None:
                request.timer.cancel()
            if isinstance(answer, Exception):
                fail(request, answer)
            else:
                request.set_result(answer)

    def _end(
        self, runner: RunnerHandle[In, Out], batch: Sequence[Request[In, Out]], error: BaseException | None
    ) -> None:
        now_s = self._bind().time()
        service_s = now_s - runner.started_s
        runner.task, runner.batch = None, ()
        self._retiring.discard(runner)
        if error is None:
            self.model.observe(len(batch), service_s)
        else:
            self._recover(runner, batch, error)
        self._tell(self._listener.batch_finished, runner.name, len(batch), service_s, error)
        self._policy.finished(now_s, len(batch))
        self._look_soon()

    # -- runners -------------------------------------------------------------------------------------------------------

    def add_runner(
        self,
        run: RunFunction[In, Out],
        *,
        name: str = "",
        replace: Callable[[], RunFunction[In, Out]] | None = None,
        lender: Lender | None = None,
    ) -> RunnerHandle[In, Out]:
        """Add a replica: `run` takes a list of items, one batch at a time, and returns an answer or exception for each.

        Where `run` hangs, or raises RunnerLostError, `replace` makes the function that takes its place. Without it a
        function that hung is called again for the next batch, and a lost runner is removed.

        A runner that other batchers use too has a `lender`, which is asked for it, and grants it for one batch.
        """
        loop = self._bind()
        runner = RunnerHandle(self, run, name or self._new_name(), replace, lender)
        self._runners.append(runner)
        self._loans.introduce(runner, loop.time())
        self._look_soon()
        return runner

    def _new_name(self) -> str:
        """One that no runner has or had by this, and none was given."""
        taken = {runner.name for runner in (*self._runners, *self._retiring)}
        while (name := f"runner-{self._num_named}") in taken:
            self._num_named += 1
        self._num_named += 1
        return name

    def retire(self, runner: RunnerHandle[In, Out]) -> None:
        """Give a runner no more batches; `RunnerHandle.remove` also waits for the one it has."""
        runner.removed = True
        if runner in self._runners:
            self._runners.remove(runner)
        if runner.busy:
            self._retiring.add(runner)

    def _recover(self, runner: RunnerHandle[In, Out], batch: Sequence[Request[In, Out]], error: BaseException) -> None:
        """Run again what a lost runner had, fail what a failing function had, replace what is dead."""
        lost = isinstance(error, RunnerLostError)
        for request in batch:
            if request.done():
                continue
            request.num_losses += lost
            if lost and request.num_losses < _MOST_LOSSES and not self._abandoned:
                self._queue.push(request)
                self._loans.requeued()
            else:
                fail(request, as_failure(error, closed=self._abandoned))
        if not (lost or isinstance(error, RunTimeoutError)):
            return
        self._tell(self._listener.runner_failed, runner.name, error)
        if runner.replace is not None and not runner.removed:
            try:
                runner.run = runner.replace()
            except Exception as failed:  # noqa: BLE001 - the user's function
                self._tell(self._listener.runner_failed, runner.name, failed)
                self.retire(runner)
        elif lost:
            self.retire(runner)

    # -- the end -------------------------------------------------------------------------------------------------------

    async def close(self, *, drain: bool = True) -> None:
        """Take no more requests; answer those that wait and run (`drain`), or fail them with BatcherClosedError."""
        self._closed = True
        if drain:
            self._look_soon()
            await self._drained.wait()
        self._abandoned = True
        tasks = {runner.task for runner in (*self._runners, *self._retiring) if runner.task is not None}
        for task in tasks:
            task.cancel()
        for request in self._queue.pop(len(self._queue)):
            fail(request, BatcherClosedError("The batcher was closed before the request was run."))
        if tasks:
            await asyncio.wait(tasks)
        if self._timer is not None:
            self._timer.cancel()

    def _note_drained(self) -> None:
        """Nothing waits or runs any more, or nobody is left to run it."""
        busy = bool(self._retiring) or any(runner.busy for runner in self._runners)
        if self._closed and not busy and not (self._queue and self._runners):
            self._drained.set()

    # -- what is known -------------------------------------------------------------------------------------------------

    @property
    def stats(self) -> BatcherStats:
        """The state now."""
        batches = [runner.batch for runner in (*self._runners, *self._retiring)]
        return BatcherStats(
            num_queued=len(self._queue),
            num_in_flight=sum(map(len, batches)),
            num_runners=len(self._runners),
            num_answered=self._num_answered,
            num_batches=self._num_batches,
            num_shed=dict(self._shed),
            wait_s=self._wait_s,
            a_s=self.model.a_s,
            c_s=self.model.c_s,
        )

    def _count_shed(self, reason: str) -> None:
        self._shed[reason] += 1
        self._tell(self._listener.shed, reason)

    def _tell(self, method: Callable[..., None], *arguments: Any) -> None:
        """A listener that raises is reported, and harms no request."""
        try:
            method(*arguments)
        except Exception as error:  # noqa: BLE001 - the user's function
            self._bind().call_exception_handler({"message": "a listener of a batcher raised", "exception": error})

    def _policy_failed(self, error: Exception) -> None:
        text = "the policy of a batcher failed; from now on batches do not wait for more requests"
        self._bind().call_exception_handler({"message": text, "exception": error})

    def _bind(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        return self._loop


def _started_s(runner: RunnerHandle[Any, Any]) -> float:
    return runner.started_s


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
