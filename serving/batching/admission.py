"""Which requests can still be answered in time: predicted from what is queued, what runs and how long batches take."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from typing import Any

from orchestray.serving.batching.cold_start import ColdStart
from orchestray.serving.batching.lateness import Lateness
from orchestray.serving.batching.queue import RequestQueue
from orchestray.serving.batching.runner import RunnerHandle
from orchestray.serving.batching.service_time import ServiceTimeModel

_LEAST_RETRY_S = 1e-3
_KNOWN_ROUNDS = 8
_ROOM_SHARE = 0.5
"""Of a request's time, how much is left for what predictions leave out, at most: the rest keeps runners busy."""
_TOGETHER_RATE = 0.25
"""As that by which the model of the service time learns what full batches take."""


class ArrivalRate:
    """Requests per second, as a moving average over about 32 of them."""

    def __init__(self) -> None:
        self._gap_s: float | None = None
        self._last_s: float | None = None

    def arrived(self, now_s: float) -> None:
        if self._last_s is not None:
            gap_s = now_s - self._last_s
            self._gap_s = gap_s if self._gap_s is None else self._gap_s + (gap_s - self._gap_s) / 32.0
        self._last_s = now_s

    @property
    def per_s(self) -> float:
        return 0.0 if self._gap_s is None else 1.0 / max(self._gap_s, 1e-6)


class Admission:
    """What the queue and the runners of one batcher mean for who comes now.

    Args:
        queue: what waits.
        runners: who runs batches; the batcher changes both.
        model: of the service time.
        max_batch_size: requests in a batch, at most.
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
        self.rate = ArrivalRate()
        self.start = ColdStart()
        self.lateness = Lateness()
        self._rounds_s: deque[float] = deque([0.0, 0.0], maxlen=_KNOWN_ROUNDS)
        self.round_s = 0.0
        """Seconds that the event loop takes for a round: the second longest of the last few, for one may be a pause.

        Of some only the end was seen, from when there was something to look at.
        """
        self._num_together = 1.0
        """Full batches, of all runners, of which one round of the event loop sees the end: a moving average."""
        self._free_at_s: list[float] | None = None
        """When each runner will be free, the first first; minus infinity: now. None: something has changed."""
        self._full_batch_s = self._unseen_s = 0.0

    def changed(self) -> None:
        """The runners, what they have, or what is known of them is other than before."""
        self._free_at_s = None

    def came_round(self, seconds: float) -> None:
        """The event loop took so long to come round to what there was to look at."""
        self._rounds_s.append(seconds)
        second_s = sorted(self._rounds_s)[-2]
        if second_s != self.round_s:
            self.round_s = second_s
            self.changed()

    def ended_together(self, num_full: int) -> None:
        """One round of the event loop saw the end of so many full batches.

        What the model of the service time has learned of each is its part of that round.
        """
        for _ in range(num_full):
            self._num_together += _TOGETHER_RATE * (num_full - self._num_together)

    def arrived(self, now_s: float) -> None:
        """A request came, whether or not it is taken."""
        self.rate.arrived(now_s)
        if not self._runners:
            self.start.asked(now_s)

    def expected_s(
        self, key: tuple[int, float, int], deadline_s: float, now_s: float, num_coming: int = 0, *, room: float = 1.0
    ) -> float | None:
        """When a request that would be ordered by this key is answered, as far as is known; None: after its deadline.

        Args:
            key: of the request.
            deadline_s: on the loop's clock.
            now_s: by the same clock.
            num_coming: further ones ahead of it, which are not in the queue yet.
            room: the share that is left for it of what predictions leave out.

        Returns:
            a time of that clock; infinity where it has none ahead, or nothing is known, and it is not refused.
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
            # Nothing is ahead: only what was never faster is refused, so that a prediction spoiled by one slow
            # batch cannot keep out the very requests that would correct it.
            return math.inf if self._model.fastest_s <= left_s else None
        position, num_ahead = self._queue.position(key) + num_coming, len(self._queue) + num_coming
        rate_per_s = self.rate.per_s
        most, model = self._max_batch_size, self._model
        finish_s = finish_in_s(position, num_ahead, rate_per_s, free_in_s, model, most, self._full_batch_s)
        finish_s += self._unseen_s
        # Who is in the next batch is behind no queue that was filled to its deadline: below capacity all are.
        room_s = room * min(self.lateness.room_s, _ROOM_SHARE * left_s) if position >= most else 0.0
        return now_s + finish_s if finish_s + room_s <= left_s else None

    @property
    def full_batch_s(self) -> float:
        """Seconds from one full batch of a runner to its next, where both wait; of several runners, what is as fast.

        What a batch is seen to take is at least a round of the event loop. A runner with a pace runs several in a long
        one, and is given as many.
        """
        self._look()
        return self._full_batch_s

    def free_in_s(self, now_s: float) -> list[float]:
        """Seconds until each runner is expected to be free, the first first: 0 if it is, never 0 for a busy one."""
        return [0.0 if at_s == -math.inf else max(1e-6, at_s - now_s) for at_s in self._look()]

    def _look(self) -> list[float]:
        """Work out what many requests ask for between one change and the next."""
        if self._free_at_s is None:
            self._free_at_s = sorted(self.busy_until_s(runner) for runner in self._runners)
            seconds = self._model.predict_s(self._max_batch_size)
            paces_s = [self._at_pace_s(runner, seconds) for runner in self._runners]
            self._full_batch_s = statistics.harmonic_mean(paces_s) if paces_s else seconds
            # Where several batches end in a round, they are seen to have when it is over.
            several = any(runner.num_at_once(self.round_s) > 1 for runner in self._runners)
            self._unseen_s = self.round_s if several else 0.0
        return self._free_at_s

    def _at_pace_s(self, runner: RunnerHandle[Any, Any], seconds: float) -> float:
        """What a runner takes for a batch, of those that it is given at once, where one is seen to take `seconds`."""
        num = runner.num_at_once(self.round_s)
        if num == 1 or runner.pace_s is None:
            return seconds
        round_s = seconds * min(num, max(1.0, self._num_together / len(self._runners)))
        return min(seconds, max(runner.pace_s(), round_s / num))

    def busy_until_s(self, runner: RunnerHandle[Any, Any]) -> float:
        """When a runner will have run the batches that it has; in the past where it is late with them.

        Minus infinity where it has none.
        """
        if not runner.flights:
            return -math.inf
        first_s, *more_s = (self._model.predict_s(len(flight.batch)) for flight in runner.flights)
        return runner.started_s + first_s + sum(self._at_pace_s(runner, seconds) for seconds in more_s)

    def queue_s(self, key: tuple[int, float, int], num_more: int) -> float:
        """Seconds in which what is ahead of a request with this key is run, in full batches; see `Batcher.queue_s`."""
        num_ahead = self._queue.position(key) + num_more
        return _queue_s(num_ahead, len(self._runners), self.full_batch_s, self._max_batch_size)

    def retry_after_s(self, now_s: float) -> float:
        """Seconds until what is queued and running now is done; where there is no runner, after one has come."""
        free_in_s = self.free_in_s(now_s)
        seconds = retry_after_s(len(self._queue), free_in_s, self.full_batch_s, self._max_batch_size)
        return seconds if self._runners else seconds + self.start.left_s(now_s)


def start_in_s(position: int, free_in_s: Sequence[float], full_batch_s: float, max_batch_size: int) -> float:
    """Seconds until the request at this position of the queue is run, if all ahead of it are run in full batches.

    `free_in_s` holds, for each runner, the seconds until it has finished what it runs, in ascending order; it must not
    be empty. `full_batch_s` is what it takes for each batch after that.
    """
    batches_ahead = position // max_batch_size
    rounds, runner = divmod(batches_ahead, len(free_in_s))
    return free_in_s[runner] + rounds * full_batch_s


def finish_in_s(
    position: int,
    num_queued: int,
    rate_per_s: float,
    free_in_s: Sequence[float],
    model: ServiceTimeModel,
    max_batch_size: int,
    full_batch_s: float,
) -> float:
    """Seconds until the request is answered; its batch also takes in those behind it, and those still to come."""
    start_s = start_in_s(position, free_in_s, full_batch_s, max_batch_size)
    ahead = position // max_batch_size * max_batch_size
    num_items = num_queued + 1 - ahead + int(rate_per_s * start_s)
    return start_s + model.cautious_s(min(max_batch_size, max(1, num_items)))


def retry_after_s(num_queued: int, free_in_s: Sequence[float], full_batch_s: float, max_batch_size: int) -> float:
    """Seconds until what is queued and running now is done: (queue / B) s(B) a runner, and what runs."""
    running_s = min(free_in_s, default=0.0)
    return max(_LEAST_RETRY_S, running_s + _queue_s(num_queued, len(free_in_s), full_batch_s, max_batch_size))


def _queue_s(num_queued: int, num_runners: int, full_batch_s: float, max_batch_size: int) -> float:
    return num_queued / max_batch_size * full_batch_s / max(1, num_runners)
