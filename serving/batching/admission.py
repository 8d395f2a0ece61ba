"""Which requests can still be answered in time: predicted from what is queued, what runs and how long batches take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from orchestray.serving.batching.cold_start import ColdStart
from orchestray.serving.batching.queue import RequestQueue
from orchestray.serving.batching.runner import RunnerHandle
from orchestray.serving.batching.service_time import ServiceTimeModel

_LEAST_RETRY_S = 1e-3


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

    def arrived(self, now_s: float) -> None:
        """A request came, whether or not it is taken."""
        self.rate.arrived(now_s)
        if not self._runners:
            self.start.asked(now_s)

    def is_feasible(self, key: tuple[int, float, int], deadline_s: float, now_s: float, num_coming: int = 0) -> bool:
        """Whether a request that would be ordered by this key can be answered by its deadline, as far as is known.

        Args:
            key: of the request.
            deadline_s: on the loop's clock.
            now_s: by the same clock.
            num_coming: further ones ahead of it, which are not in the queue yet.
        """
        left_s = deadline_s - now_s
        if left_s <= 0:
            return False
        free_in_s = self.free_in_s(now_s)
        if not free_in_s:
            return self.start.left_s(now_s) + (self._model.fastest_s if self._model.trusted else 0.0) <= left_s
        if not self._model.trusted:
            return True
        if not self._queue and not num_coming and min(free_in_s) == 0.0:
            # Nothing is ahead: only what was never faster is refused, so that a prediction spoiled by one slow
            # batch cannot keep out the very requests that would correct it.
            return self._model.fastest_s <= left_s
        position, num_ahead = self._queue.position(key) + num_coming, len(self._queue) + num_coming
        rate_per_s = self.rate.per_s
        return finish_in_s(position, num_ahead, rate_per_s, free_in_s, self._model, self._max_batch_size) <= left_s

    def free_in_s(self, now_s: float) -> list[float]:
        """Seconds until each runner is expected to be free: 0 for an idle one, never 0 for a busy one."""
        return [max(1e-6, self._left_s(runner, now_s)) if runner.busy else 0.0 for runner in self._runners]

    def _left_s(self, runner: RunnerHandle[Any, Any], now_s: float) -> float:
        """Of the batches that it has; negative where it is late with them."""
        known_s = sum(self._model.predict_s(len(flight.batch)) for flight in runner.flights)
        return runner.started_s + known_s - now_s

    def retry_after_s(self, now_s: float) -> float:
        """Seconds until what is queued and running now is done; where there is no runner, after one has come."""
        seconds = retry_after_s(len(self._queue), self.free_in_s(now_s), self._model, self._max_batch_size)
        return seconds if self._runners else seconds + self.start.left_s(now_s)


def start_in_s(position: int, free_in_s: Sequence[float], model: ServiceTimeModel, max_batch_size: int) -> float:
    """Seconds until the request at this position of the queue is run, if all ahead of it are run in full batches.

    `free_in_s` holds, for each runner, the seconds until it has finished what it runs; it must not be empty.
    """
    batches_ahead = position // max_batch_size
    rounds, runner = divmod(batches_ahead, len(free_in_s))
    return sorted(free_in_s)[runner] + rounds * model.predict_s(max_batch_size)


def finish_in_s(
    position: int,
    num_queued: int,
    rate_per_s: float,
    free_in_s: Sequence[float],
    model: ServiceTimeModel,
    max_batch_size: int,
) -> float:
    """Seconds until the request is answered; its batch also takes in those behind it, and those still to come."""
    start_s = start_in_s(position, free_in_s, model, max_batch_size)
    ahead = position // max_batch_size * max_batch_size
    num_items = num_queued + 1 - ahead + int(rate_per_s * start_s)
    return start_s + model.cautious_s(min(max_batch_size, max(1, num_items)))


def retry_after_s(num_queued: int, free_in_s: Sequence[float], model: ServiceTimeModel, max_batch_size: int) -> float:
    """Seconds until what is queued and running now is done: (queue / B) s(B) a runner, and what runs."""
    running_s = min(free_in_s, default=0.0)
    queue_s = num_queued / max_batch_size * model.predict_s(max_batch_size) / max(1, len(free_in_s))
    return max(_LEAST_RETRY_S, running_s + queue_s)
