"""Batches in flight: their start, their answers, and their recovery if a runner fails."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from orchestray.serving.batching.core import Core
from orchestray.serving.batching.errors import RunnerLostError, RunTimeoutError, as_failure, fail
from orchestray.serving.batching.queue import Request
from orchestray.serving.batching.runner import BatchInFlight, RunnerHandle, call

In = TypeVar("In")
Out = TypeVar("Out")

_MOST_LOSSES = 2


class InFlight(Generic[In, Out]):
    """The executor of the batches of one batcher.

    Args:
        core: shared state of the batcher.
        run_timeout_s: seconds after which a runner is considered hung; None: never.
        ended: called with the runner whose batch has ended, when all is settled.
        isolate: True if a failed batch is run again in parts, to find the requests that fail.
    """

    def __init__(
        self,
        core: Core[In, Out],
        run_timeout_s: float | None,
        ended: Callable[[RunnerHandle[In, Out]], None],
        *,
        isolate: bool,
    ) -> None:
        self._core = core
        self._isolate = isolate
        self._run_timeout_s = run_timeout_s
        self._ended = ended
        self._unlearned: list[tuple[int, float]] = []
        """Sizes and seconds of batches that ended in this round of the loop, not yet reported to the model."""
        self.num_batches = 0
        self.num_answered = 0

    def start(
        self, runner: RunnerHandle[In, Out], batch: Sequence[Request[In, Out]], now_s: float, *, is_part: bool = False
    ) -> None:
        """Start a batch on a runner, after those that it already has."""
        self.num_batches += 1
        if not runner.flights:
            runner.started_s = now_s
        flight = BatchInFlight(batch, runner.flights[-1].task if runner.flights else None)
        flight.is_part = is_part
        runner.flights.append(flight)
        self._core.admission.changed()
        for request in batch:
            request.after = flight.after
        core = self._core
        core.tell(core.listener.batch_started, runner.name, [now_s - request.arrived_s for request in batch])
        flight.task = core.loop.create_task(self._run(runner, flight))
        flight.task.add_done_callback(lambda _: self._settle(runner, flight))
        self._limit_first(runner)

    def _limit_first(self, runner: RunnerHandle[In, Out]) -> None:
        """Start the time limit of a runner's first batch; those behind it get theirs when it ends."""
        if self._run_timeout_s is None or not runner.flights:
            return
        flight = runner.flights[0]
        if flight.limit is None:
            flight.limit = self._core.loop.call_later(self._run_timeout_s, self._hangs, runner, flight)

    def _hangs(self, runner: RunnerHandle[In, Out], flight: BatchInFlight[In, Out]) -> None:
        """Abandon a batch that hangs: a function that ignores even its cancellation must not block others."""
        if flight.task is not None:
            flight.task.cancel()
        text = f"The batch function did not return within {self._run_timeout_s:g} s and was cancelled."
        self._end(runner, flight, RunTimeoutError(text))

    def _settle(self, runner: RunnerHandle[In, Out], flight: BatchInFlight[In, Out]) -> None:
        """End the batch of a task that was cancelled before its first step, and so has run none of its code."""
        if flight in runner.flights:
            self._end(runner, flight, RunnerLostError("The runner was taken away before it ran the batch."))

    async def _run(self, runner: RunnerHandle[In, Out], flight: BatchInFlight[In, Out]) -> None:
        error: BaseException | None = None
        answers: Sequence[Out | Exception] = ()
        items: list[In] = []
        if runner.flights[0] is flight:
            runner.started_s = self._core.loop.time()
            self._core.admission.changed()
        try:
            items = [request.item for request in flight.batch]
            answers = await call(runner.run, items)
        except asyncio.CancelledError:
            error = RunnerLostError("The runner was taken away while it ran the batch.")
        except Exception as raised:  # noqa: BLE001 - whatever it is, it is passed to the requests of the batch
            error = raised
            flight.was_cancelled = flight.task is not None and flight.task.cancelling() > 0
        except BaseException as raised:
            error = raised
            raise
        finally:
            self._end(runner, flight, error, answers)
            # An error references this frame, which would reference the error and the requests: a cycle for the
            # collector.
            error, answers, items = None, (), []
            del flight

    def _answer(self, batch: Sequence[Request[In, Out]], answers: Sequence[Out | Exception]) -> None:
        for request, answer in zip(batch, answers, strict=True):
            if request.done():
                continue
            self.num_answered += 1
            if request.timer is not None:
                request.timer.cancel()
            if isinstance(answer, Exception):
                fail(request, answer)
            else:
                request.set_result(answer)

    def _end(
        self,
        runner: RunnerHandle[In, Out],
        flight: BatchInFlight[In, Out],
        error: BaseException | None,
        answers: Sequence[Out | Exception] = (),
    ) -> None:
        if flight not in runner.flights:
            return  # it hung, and was abandoned
        core = self._core
        now_s = core.loop.time()
        service_s = now_s - runner.started_s
        flight.cancel_timers()
        runner.flights.remove(flight)
        core.admission.changed()
        runner.started_s = now_s if runner.flights else runner.started_s
        if error is None:
            runner.parts.answered()
            runner.num_batches += 1
            runner.num_items += len(flight.batch)
            self._unlearned.append((len(flight.batch), service_s))
            if not flight.is_part:  # the parts are late through no fault of the prediction
                core.admission.lateness.note(now_s + core.model.answer_s, flight.batch)
            if not runner.flights and flight.after is None:
                self.learn()
        if not flight.taken_back:
            core.tell(core.listener.batch_finished, runner.name, len(flight.batch), service_s, error)
            try:
                core.policy.finished(now_s, len(flight.batch))
            except Exception as failed:  # noqa: BLE001 - the user's policy
                core.give_up_policy(failed)
        if error is not None and not self._is_split(runner, flight, error):
            self._recover(runner, flight, error)
        self._start_part(runner, now_s)
        if not runner.flights:
            core.retiring.discard(runner)
        self._limit_first(runner)
        # The runner must not idle while the answers are sent; but a client that sends its next request on an answer
        # should share the batch.
        is_full = not runner.flights and len(core.queue) >= core.max_batch_size
        if is_full:
            self._ended(runner)
        if error is None:
            self._answer(flight.batch, answers)
            core.loop.call_soon(self._learn_answers, now_s)
        if not is_full:
            self._ended(runner)

    def _learn_answers(self, ended_s: float) -> None:
        """Report to the model the seconds that the callers of a batch took to send their answers."""
        self._core.model.observe_answers(self._core.loop.time() - ended_s)

    def learn(self) -> None:
        """Report the times of the last batches to the model of service times.

        If several end in one round of the loop, it sees the first late and the others at once: each counts as their
        mean.
        """
        if self._unlearned:
            sizes, times_s = zip(*self._unlearned, strict=True)
            for num_items in sizes:
                self._core.model.observe(num_items, sum(times_s) / len(times_s))
            self._core.admission.ended_together(sizes.count(self._core.max_batch_size))
            self._unlearned.clear()
            self._core.admission.changed()

    def retire(self, runner: RunnerHandle[In, Out]) -> None:
        """Give a runner no more batches; `RunnerHandle.remove` also waits for those that it has."""
        runner.removed = True
        if runner in self._core.runners:
            self._core.runners.remove(runner)
            self._core.admission.changed()
            if not self._core.runners:
                self._core.admission.start.gone(self._core.loop.time())
        if runner.flights:
            self._core.retiring.add(runner)

    def _is_split(self, runner: RunnerHandle[In, Out], flight: BatchInFlight[In, Out], error: BaseException) -> bool:
        """Return True if a failed batch is run again in parts: if its function raised, and nothing else is wrong."""
        if not self._isolate or flight.was_cancelled or self._core.abandoned:
            return False
        if isinstance(error, RunnerLostError | RunTimeoutError) or not isinstance(error, Exception):
            return False
        return runner.parts.split(flight.batch, is_part=flight.is_part)

    def _start_part(self, runner: RunnerHandle[In, Out], now_s: float) -> None:
        """Start the next part of a failed batch, ahead of everything in the queue."""
        while runner.parts and not runner.flights:
            if part := runner.parts.next():
                self.start(runner, part, now_s, is_part=True)

    def _recover(self, runner: RunnerHandle[In, Out], flight: BatchInFlight[In, Out], error: BaseException) -> None:
        """Requeue the requests of a lost runner, fail those of a failing function, and replace a dead runner."""
        core = self._core
        lost, has_failed = isinstance(error, RunnerLostError), False
        for request in flight.batch:
            if request.done():
                continue
            request.num_losses += lost and not flight.taken_back
            if lost and request.num_losses < _MOST_LOSSES and not core.abandoned:
                core.queue.push(request)
            else:
                fail(request, as_failure(error, closed=core.abandoned))
                has_failed = True
        if flight.is_part and has_failed:
            runner.parts.failed_alone()
        if flight.taken_back or not (lost or isinstance(error, RunTimeoutError)):
            return
        for request in runner.parts.take_all():
            if core.abandoned:
                fail(request, as_failure(error, closed=True))
            else:
                core.queue.push(request)
        for other in reversed(runner.flights):
            other.take_back()
            self.num_batches -= 1
            core.tell(core.listener.batch_taken_back, runner.name, len(other.batch))
        core.tell(core.listener.runner_failed, runner.name, error)
        if runner.replace is not None and not runner.removed:
            try:
                runner.run = runner.replace()
            except Exception as failed:  # noqa: BLE001 - the user's function
                core.tell(core.listener.runner_failed, runner.name, failed)
                self.retire(runner)
        elif lost:
            self.retire(runner)

    async def abandon(self) -> None:
        """Cancel every batch now."""
        runners = (*self._core.runners, *self._core.retiring)
        tasks = {flight.task for runner in runners for flight in runner.flights if flight.task is not None}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
