"""Prediction of which requests can be answered in time, from the queue, the running batches and the service times."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from typing import Any

from orchestray.serving.batching.policies.service_time import ServiceTimeModel
from orchestray.serving.batching.queue import Request, RequestQueue
from orchestray.serving.batching.runner import RunnerHandle

_NUM_KNOWN = 5
_LEAST_OUTAGE_S = 10.0
"""Shortest outage: a loss must first be noticed."""


class ColdStart:
    """A timer from the first request that finds no runner to the first runner, on the loop's clock."""

    def __init__(self) -> None:
        self._known_s: deque[float] = deque(maxlen=_NUM_KNOWN)
        self._asked_s: float | None = None
        """Time of the first request that found no runner."""
        self._gone_s: float | None = None
        """Time at which the last runner went; None while there is one."""

    @property
    def seconds(self) -> float | None:
        """Median of the last few starts, so that one outage is not expected again; None: nothing is known."""
        return statistics.median_low(self._known_s) if self._known_s else None

    def expect(self, seconds: float) -> None:
        """Record the length of an earlier start."""
        self._known_s.append(seconds)

    def asked(self, now_s: float) -> None:
        """Note a request that found no runner."""
        if self._asked_s is None:
            self._asked_s = now_s

    def gone(self, now_s: float) -> None:
        """Note that the last runner has gone."""
        self._gone_s = now_s

    def is_overdue(self, now_s: float) -> bool:
        """Return True if the last runner has been gone clearly longer than a new one takes to start."""
        return self._gone_s is not None and now_s - self._gone_s > self._longest_s

    def is_awaited(self, now_s: float) -> bool:
        """Return True if requests found no runner, not longer ago than a new one may well take to start."""
        return self._asked_s is not None and now_s - self._asked_s <= self._longest_s

    @property
    def _longest_s(self) -> float:
        return max(_LEAST_OUTAGE_S, 2 * (self.seconds or 0.0))

    def ended(self, now_s: float) -> None:
        """Note that a first runner exists."""
        self._gone_s = None
        if self._asked_s is not None:
            self._known_s.append(now_s - self._asked_s)
            self._asked_s = None

    def left_s(self, now_s: float) -> float:
        """Return the seconds until a runner is expected; 0 if nothing is known or it is overdue."""
        seconds = self.seconds
        if seconds is None:
            return 0.0
        return max(0.0, seconds - (0.0 if self._asked_s is None else now_s - self._asked_s))


_KNOWN_BATCHES = 64
_SHARE = 0.95
_LEAST_KNOWN = 8


class Lateness:
    """The prediction errors of the last batches: pauses of the event loop, and batches that take longer.

    The queue of an overloaded server is filled until further requests would be late. So every request in it has just
    the predicted time: if one batch takes longer, all requests behind it are late at once.
    """

    def __init__(self) -> None:
        self._errors_s: deque[float] = deque(maxlen=_KNOWN_BATCHES)
        self._room_s: float | None = 0.0

    def note(self, answered_s: float, requests: Sequence[Request[Any, Any]]) -> None:
        """Note that a batch is answered at `answered_s`, or would be.

        The error is taken against the latest promise in the batch. Requests with earlier promises were overtaken by
        more urgent ones, which says nothing about the time of a batch.
        """
        promised_s = [request.expected_s for request in requests if request.expected_s < math.inf]
        self._errors_s.append(answered_s - max(promised_s, default=math.inf))
        self._room_s = None

    @property
    def room_s(self) -> float:
        """Seconds that almost all of the last batches needed beyond the prediction; at least 0."""
        if self._room_s is None:
            known = sorted(self._errors_s)
            enough = len(known) >= _LEAST_KNOWN
            self._room_s = max(0.0, known[int(_SHARE * (len(known) - 1))]) if enough else 0.0
        return self._room_s


_LEAST_RETRY_S = 1e-3
_KNOWN_ROUNDS = 8
_ROOM_SHARE = 0.5
"""Largest share of a request's time that is reserved for prediction errors; the rest keeps runners busy."""
_TOGETHER_RATE = 0.25
"""Weight of the newest round in `_num_together`; the service-time model learns full batches at the same rate."""


class Admission:
    """A predictor of answer times, from the queue and the runners of one batcher.

    Args:
        queue: requests that wait.
        runners: runners of the batcher, which changes this list and the queue.
        model: model of the service time.
        max_batch_size: largest number of requests in a batch.
    """

    def __init__(
        self,
        queue: RequestQueue[Any, Any],
        runners: Sequence[RunnerHandle[Any, Any]],
        model: ServiceTimeModel,
        max_batch_size: int,
    ) -> None:
        self._queue = queue
        self._runners = runners
        self._model = model
        self._max_batch_size = max_batch_size
        self._gap_s: float | None = None
        """Moving average of the seconds between arrivals, over about 32 of them; None: less than two came."""
        self._last_s: float | None = None
        self.start = ColdStart()
        self.lateness = Lateness()
        self._rounds_s: deque[float] = deque([0.0, 0.0], maxlen=_KNOWN_ROUNDS)
        self.round_s = 0.0
        """Seconds per round of the event loop: the second longest of the last few, since the longest may be a pause.

        A round is measured from the request to look at the queue until the look, so it may be only the end of one.
        """
        self._num_together = 1.0
        """Moving average of the full batches, over all runners, whose end one round of the event loop sees."""
        self._free_at_s: list[float] | None = None
        """Times at which the runners become free, ascending; minus infinity: free now. None: must be computed again."""
        self._full_batch_s = self._unseen_s = 0.0

    def changed(self) -> None:
        """Discard cached predictions, because the runners, their batches or the measurements changed."""
        self._free_at_s = None

    def came_round(self, seconds: float) -> None:
        """Note the seconds from the request to look at the queue until the event loop did so."""
        self._rounds_s.append(seconds)
        second_s = sorted(self._rounds_s)[-2]
        if second_s != self.round_s:
            self.round_s = second_s
            self.changed()

    def ended_together(self, num_full: int) -> None:
        """Note that one round of the event loop saw `num_full` full batches end.

        The model of the service time has learned an equal part of that round for each.
        """
        for _ in range(num_full):
            self._num_together += _TOGETHER_RATE * (num_full - self._num_together)

    def arrived(self, now_s: float) -> None:
        """Note the arrival of a request, admitted or not."""
        if self._last_s is not None:
            gap_s = now_s - self._last_s
            self._gap_s = gap_s if self._gap_s is None else self._gap_s + (gap_s - self._gap_s) / 32.0
        self._last_s = now_s
        if not self._runners:
            self.start.asked(now_s)

    def expected_s(
        self, key: tuple[int, float, int], deadline_s: float, now_s: float, num_coming: int = 0, *, room: float = 1.0
    ) -> float | None:
        """Predict when a request with this key is answered; return None if that is after its deadline.

        Args:
            key: sort key of the request in the queue.
            deadline_s: deadline, on the loop's clock.
            now_s: time now, on the loop's clock.
            num_coming: requests ahead of it that are not in the queue yet.
            room: fraction of the reserve for prediction errors that applies to this request.

        Returns:
            a time on the loop's clock; infinity if nothing is ahead of the request or no prediction is possible, and
            then it is not refused.
        """
        left_s = deadline_s - now_s
        if left_s <= 0:
            return None
        free_in_s = self.free_in_s(now_s)
        if not free_in_s:
            least_s = self.start.left_s(now_s) + (self._model.fastest_s if self._model.trusted else 0.0)
            return math.inf if least_s <= left_s else None
        if not self._model.trusted:
            return math.inf
        if not self._queue and not num_coming and free_in_s[0] == 0.0:
            # Nothing is ahead: refuse only what no recent batch was fast enough for, so that a prediction spoiled by
            # one slow batch cannot keep out the very requests that would correct it.
            return math.inf if self._model.fastest_s <= left_s else None
        position, num_ahead = self._queue.position(key) + num_coming, len(self._queue) + num_coming
        finish_s = self._finish_in_s(position, num_ahead, free_in_s) + self._unseen_s
        # A request of the next batch is not behind a queue that was filled up to its deadline; below capacity all
        # requests are of the next batch.
        room_s = room * min(self.lateness.room_s, _ROOM_SHARE * left_s) if position >= self._max_batch_size else 0.0
        return now_s + finish_s if finish_s + room_s <= left_s else None

    def _finish_in_s(self, position: int, num_queued: int, free_in_s: Sequence[float]) -> float:
        """Predict the seconds until the request at this position of the queue is answered.

        Batches ahead of it are full; its own has requests behind it, and some still to come.
        """
        most = self._max_batch_size
        rounds, runner = divmod(position // most, len(free_in_s))
        start_s = free_in_s[runner] + rounds * self._full_batch_s
        num_coming = 0 if self._gap_s is None else int(start_s / max(self._gap_s, 1e-6))
        num_items = num_queued + 1 - position // most * most + num_coming
        return start_s + self._model.cautious_s(min(most, max(1, num_items)))

    @property
    def full_batch_s(self) -> float:
        """Seconds from one full batch of a runner to its next while requests wait; harmonic mean over the runners.

        A batch is never observed to take less than a round of the event loop. A runner with a known pace gets several
        batches at once if rounds are long, and runs them all in one round.
        """
        self._look()
        return self._full_batch_s

    def free_in_s(self, now_s: float) -> list[float]:
        """Return the seconds until each runner is expected to be free, ascending: 0 if free, always above 0 if busy."""
        return [0.0 if at_s == -math.inf else max(1e-6, at_s - now_s) for at_s in self._look()]

    def _look(self) -> list[float]:
        """Compute and cache what requests ask for between two changes."""
        if self._free_at_s is None:
            self._free_at_s = sorted(map(self.busy_until_s, self._runners))
            seconds = self._model.predict_s(self._max_batch_size)
            paces_s = [self._at_pace_s(runner, seconds) for runner in self._runners]
            self._full_batch_s = statistics.harmonic_mean(paces_s) if paces_s else seconds
            # If several batches end in one round, their ends are noticed only when the round is over.
            nums = [runner.num_at_once(self.round_s) for runner in self._runners]
            self._unseen_s = self.round_s if max(nums, default=1) > 1 else 0.0
        return self._free_at_s

    def _at_pace_s(self, runner: RunnerHandle[Any, Any], seconds: float) -> float:
        """Return the seconds per batch of a runner that has several at once, if one is observed to take `seconds`."""
        num = runner.num_at_once(self.round_s)
        if num == 1 or runner.pace_s is None:
            return seconds
        round_s = seconds * min(num, max(1.0, self._num_together / len(self._runners)))
        return min(seconds, max(runner.pace_s(), round_s / num))

    def busy_until_s(self, runner: RunnerHandle[Any, Any]) -> float:
        """Return when a runner will have finished its batches: in the past if late, minus infinity if it has none."""
        if not runner.flights:
            return -math.inf
        first_s, *more_s = (self._model.predict_s(len(flight.batch)) for flight in runner.flights)
        return runner.started_s + first_s + sum(self._at_pace_s(runner, seconds) for seconds in more_s)

    def queue_s(self, key: tuple[int, float, int], num_more: int) -> float:
        """Return the seconds in full batches ahead of a request with this key; see `Batcher.queue_s`."""
        return self._work_s(self._queue.position(key) + num_more)

    def retry_after_s(self, now_s: float) -> float:
        """Return the seconds until queued and running requests are done, plus the start of a runner if none exists."""
        running_s = min(self.free_in_s(now_s), default=0.0)
        seconds = max(_LEAST_RETRY_S, running_s + self._work_s(len(self._queue)))
        return seconds if self._runners else seconds + self.start.left_s(now_s)

    def _work_s(self, num_requests: int) -> float:
        """Return the seconds that all runners together need for a number of requests, in full batches."""
        return num_requests / self._max_batch_size * self.full_batch_s / max(1, len(self._runners))
