"""The measured speed of each worker, and batches whose shares are sized by it.

With a bound on staleness, and in lock step, every worker computes a part of every batch. As long as the parts are
equal, a worker that stays slow holds up all others. Parts sized by speed take all workers the same time.

Sources: Harlap et al. 2016, "Addressing the straggler problem for iterative convergent parallel ML" (FlexRR: flexible
synchronization, with work reassigned from worker to worker): here a worker that would wait takes over what a slow
worker has not begun (`ShareScheduler`). Chen et al. 2020, "Semi-dynamic load balancing: efficient distributed learning
in non-dedicated environments" (LB-BSP: batches sized at the barriers by what each worker can do): here the sizes of the
workers' parts follow their speeds from one batch to the next (`Speeds`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from orchestray.trainers.ps.protocol.requests import Entry

_KEPT = 0.5
"""Fraction of the known speed of a worker, on a log scale, that is kept when a share of it is timed. A speed that is
ten times off is a third off after three shares, whether it has risen or fallen; one late share is soon forgotten.
"""
_LEAST_S = 1e-6


class Stopwatch:
    """A stopwatch of shares: seconds from handing out a share to its acknowledgement.

    The time in which the share waited behind another one of the same worker is not counted. The coordinator has no
    clock and gets the seconds with the acknowledgement, so copies of it and logs of its inputs get the same.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        """
        Args:
            clock: returns seconds since any fixed moment; never goes back.
        """
        self._clock = clock
        self._begun_s: dict[int, dict[int, float]] = {}
        """Time at which each worker was given each of its orders."""
        self._done_s: dict[int, float] = {}
        """Time at which each worker last finished an order."""

    def start(self, worker: int, order_id: int) -> None:
        """Record that a worker is given an order."""
        self._begun_s.setdefault(worker, {})[order_id] = self._clock()

    def stop(self, worker: int, order_id: int) -> float | None:
        """Return the seconds since an order was given out, or since the worker finished the one before, if that was
        later.

        None: another server gave it out, or it was stopped before.
        """
        begun_s = self._begun_s.get(worker, {}).pop(order_id, None)
        if begun_s is None:
            return None
        before_s, now_s = self._done_s.get(worker, begun_s), self._clock()
        self._done_s[worker] = now_s
        return now_s - max(begun_s, before_s)

    def timed(self, entry: Entry) -> Entry:
        """Add how long the acknowledged shares took to an entry of a worker."""
        if entry.hello is not None:
            self.forget(entry.worker)
        took_s = tuple(self.stop(entry.worker, report.order_id) for report in entry.acknowledge)
        return replace(entry, took_s=took_s) if took_s else entry

    def forget(self, worker: int) -> None:
        """Forget a worker, which no longer holds any order."""
        self._begun_s.pop(worker, None)
        self._done_s.pop(worker, None)


@dataclass
class Speeds:
    """The measured samples per second of each worker, and the parts of a batch that follow from them."""

    _logs: dict[int, float] = field(default_factory=dict)
    """Natural logarithms of samples/s."""
    owed: dict[int, float] = field(default_factory=dict)
    """Samples by which a worker's parts have come out too small, by rounding: between -1 and 1, with sum 0."""

    def note(self, worker: int, num_samples: int, took_s: float) -> None:
        """Record how long a worker took for a share."""
        measured = math.log(num_samples / max(took_s, _LEAST_S))
        known = self._logs.get(worker)
        self._logs[worker] = measured if known is None else _KEPT * known + (1 - _KEPT) * measured

    def forget(self, worker: int) -> None:
        """Forget a lost worker; the next worker with its number may be on another machine."""
        self._logs.pop(worker, None)
        self.owed.pop(worker, None)

    def rates(self, workers: Collection[int]) -> list[float]:
        """Return the samples/s of workers. A worker that was never timed counts as their mean; 1 for each if none was
        timed.
        """
        known = [math.exp(self._logs[worker]) for worker in workers if worker in self._logs]
        mean = fmean(known) if known else 1.0
        return [math.exp(self._logs[worker]) if worker in self._logs else mean for worker in workers]

    def parts(self, workers: Sequence[int], num_absent: int, num_samples: int) -> tuple[list[int], dict[int, float]]:
        """Return each worker's part of `num_samples` samples, in proportion to its speed.

        What rounding takes in one batch it gives back in a later one, so over the batches each worker gets its exact
        part. A worker whose part is less than a sample still gets one now and then, which shows when it has recovered.

        Args:
            workers: present workers.
            num_absent: number of workers expected besides them; each counts as one of the mean speed.
            num_samples: samples of the batch, at least 1.

        Returns:
            Sizes for the workers, then for the absent; their sum is `num_samples`. And the new `owed` once the batch is
                handed out like this.
        """
        rates = self.rates(workers)
        rates += [fmean(rates) if rates else 1.0] * num_absent
        owed = [self.owed.get(worker, 0.0) for worker in workers] + [0.0] * num_absent
        wanted = [num_samples * rate / sum(rates) + more for rate, more in zip(rates, owed, strict=True)]
        sizes = _rounded(wanted, num_samples)
        left = [want - size for want, size in zip(wanted, sizes, strict=True)][: len(workers)]
        surplus = fmean(left) if left else 0.0  # of workers that were absent or have left
        return sizes, {worker: more - surplus for worker, more in zip(workers, left, strict=True)}


def _rounded(wanted: Sequence[float], total: int) -> list[int]:
    """Round to non-negative whole numbers with the sum `total`: down, and up where the remainders are largest."""
    sizes = [max(0, math.floor(want)) for want in wanted]
    places = range(len(wanted))
    while (missing := total - sum(sizes)) > 0:
        for place in sorted(places, key=lambda place: sizes[place] - wanted[place])[:missing]:
            sizes[place] += 1
    while sum(sizes) > total:
        sizes[min((place for place in places if sizes[place]), key=lambda place: wanted[place] - sizes[place])] -= 1
    return sizes
