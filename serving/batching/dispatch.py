"""Dispatch: when a batch leaves the queue, and to which runner."""

from __future__ import annotations

import asyncio
import math
from operator import attrgetter
from typing import Generic, TypeVar

from orchestray.serving.batching.core import Core
from orchestray.serving.batching.errors import DeadlineError, fail
from orchestray.serving.batching.in_flight import InFlight
from orchestray.serving.batching.listener import SHED_INFEASIBLE
from orchestray.serving.batching.policies import Opportunity
from orchestray.serving.batching.runner import RunnerHandle

In = TypeVar("In")
Out = TypeVar("Out")

_SOON_S = 1e-9
"""Shortest wait in seconds; a shorter one is none."""
_AHEAD_SHARE = 0.25
"""Fraction of a batch's time that is left when its runner gets the next: no request overtakes those handed out."""


class Dispatch(Generic[In, Out]):
    """The dispatcher of batches to free runners, and of full ones to runners that would become free unnoticed.

    The event loop notices a free runner only in its next round, and the runner idles until then. So a runner with a
    known pace gets its next batch shortly before the end of the current one. That batch must be full, as it then gains
    nothing by waiting. Under load (requests come faster than they are read) a round takes longer than a batch. The
    runner then gets as many batches as it can run in a round.

    Args:
        core: shared state of the batcher.
        run_timeout_s: seconds after which a runner is considered hung.
        isolate: True if a failed batch is run again in parts (see `InFlight`).
    """

    def __init__(self, core: Core[In, Out], run_timeout_s: float | None, *, isolate: bool) -> None:
        self._core = core
        self.flights = InFlight(core, run_timeout_s, self._ended, isolate=isolate)
        self._timer: asyncio.TimerHandle | None = None
        self._is_asked = False
        """True if a look for a batch is scheduled."""
        self.wait_s = 0.0

    def look_soon(self) -> None:
        """Schedule a look for a batch after all callbacks that are ready now: simultaneous requests share a batch."""
        if not self._is_asked:
            self._is_asked, loop = True, self._core.loop
            loop.call_soon(self._look_as_asked, loop.time())

    def _look_as_asked(self, asked_s: float) -> None:
        self._is_asked = False
        self._core.admission.came_round(self._core.loop.time() - asked_s)
        self._look()

    def _wait_over(self, until_s: float) -> None:
        """Run what is queued if the wait is over and no request ended it."""
        if self._core.loop.time() < until_s - _SOON_S:  # some loops' timers begin at whole milliseconds
            self._timer = self._core.loop.call_at(until_s, self._wait_over, until_s)
        else:
            self._look(waited=not self._core.policy.is_asked_again)

    def _look(self, *, waited: bool = False) -> None:
        core = self._core
        self.stop_waiting()
        self.flights.learn()
        while core.queue and (idle := [runner for runner in core.runners if not runner.flights]):
            now_s = core.loop.time()
            wait_s = 0.0 if waited else self._chosen_wait_s(now_s, len(idle))
            waited = False
            if wait_s > 0:
                until_s = now_s + wait_s
                self._timer = core.loop.call_at(until_s, self._wait_over, until_s)
                return
            self._shed_late(now_s, 0.0)
            if batch := core.queue.pop(core.max_batch_size):
                # The runner that has been idle longest, so that all get equal shares under low load.
                self.flights.start(min(idle, key=attrgetter("started_s")), batch, now_s)
        for runner in core.runners:
            self._give_ahead(runner)
        core.note_drained()

    def stop_waiting(self) -> None:
        """Stop waiting for more requests."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _ended(self, runner: RunnerHandle[In, Out]) -> None:
        """Look for the next batch after one has ended; immediately if it is full."""
        if runner.flights or len(self._core.queue) < self._core.max_batch_size:
            self.look_soon()
        else:
            self._look()

    def _give_ahead(self, runner: RunnerHandle[In, Out]) -> None:
        core = self._core
        if runner.pace_s is None or runner.removed or runner.parts:
            return
        most = runner.num_at_once(core.admission.round_s)
        while 0 < len(runner.flights) < max(2, most) and len(core.queue) >= core.max_batch_size:
            now_s = core.loop.time()
            left_s = max(0.0, core.admission.busy_until_s(runner) - now_s)
            pace_s = runner.pace_s()
            if most == 1 and (
                pace_s == math.inf or not self._is_nearly_over(runner, now_s, left_s - _AHEAD_SHARE * pace_s)
            ):
                return  # or it has not run any yet, so its pace is unknown
            self._shed_late(now_s, left_s)
            if len(core.queue) < core.max_batch_size:
                return  # there is time: other requests may replace those that were late
            self.flights.start(runner, core.queue.pop(core.max_batch_size), now_s)

    def _is_nearly_over(self, runner: RunnerHandle[In, Out], now_s: float, in_s: float) -> bool:
        """Return True if the first batch of a runner is nearly over.

        Otherwise look again in `in_s` seconds; more urgent requests may come until then.
        """
        flight = runner.flights[0]

        def look() -> None:
            flight.is_nearly_over = True  # even if the clock or the prediction now disagrees slightly
            self.look_soon()

        if in_s > 0 and flight.nearly_over is None:
            flight.nearly_over = self._core.loop.call_at(now_s + in_s, look)
        return flight.is_nearly_over or in_s <= 0

    def _chosen_wait_s(self, now_s: float, num_idle: int) -> float:
        core = self._core
        num_queued = len(core.queue)
        if num_queued >= core.max_batch_size or core.closed:
            return 0.0
        others_s = [free_s for free_s in core.admission.free_in_s(now_s) if free_s > 0]
        opportunity = Opportunity(
            now_s=now_s,
            num_queued=num_queued,
            oldest_s=core.queue.oldest_s,
            num_idle=num_idle,
            next_free_s=0.0 if num_idle > 1 else min(others_s, default=math.inf),
        )
        try:
            wait_s = float(core.policy.wait_s(opportunity))
            if not math.isfinite(wait_s):
                raise ValueError(f"a policy must say for how many seconds to wait, got {wait_s}")  # noqa: TRY301
        except Exception as error:  # noqa: BLE001 - the user's policy
            core.give_up_policy(error)
            wait_s = 0.0
        deadline_s = core.queue.earliest_s
        if deadline_s < math.inf:
            # Waiting for others must not make a request late.
            wait_s = min(wait_s, deadline_s - now_s - core.model.cautious_s(core.max_batch_size))
        wait_s = wait_s if wait_s > _SOON_S else 0.0
        self.wait_s = wait_s
        core.tell(core.listener.waiting, wait_s)
        return wait_s

    def _shed_late(self, now_s: float, busy_s: float) -> None:
        """Refuse requests that cannot be in time in the next batch of a runner that is busy for `busy_s` seconds.

        A batch is never made smaller to save its most urgent request: under load that costs more than it saves.
        """
        core, model, is_noted = self._core, self._core.model, False
        while core.queue:
            first = core.queue.first(core.max_batch_size)
            limit_s = now_s + (busy_s + model.cautious_s(len(first)) if model.trusted else 0.0)
            late = [request for request in first if request.deadline_s < limit_s]
            if late and len(late) == len(core.queue) and late[-1].deadline_s >= now_s + model.fastest_s:
                late.pop()  # try one: the cause of the bad prediction may be over
            if not late:
                break
            if not is_noted:  # note one pause once, however many requests it made late
                core.admission.lateness.note(limit_s, late)
                is_noted = True
            retry_after_s = core.admission.retry_after_s(now_s)
            for request in late:
                core.forget(request)
                core.count_shed(SHED_INFEASIBLE)
                fail(request, DeadlineError(retry_after_s))
