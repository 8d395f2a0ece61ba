"""How fast each worker is, as the lead server learns it, and how a batch is cut by that.

Under a bound on staleness, and in lock step, every worker has a part of every batch to compute, so a worker that stays
slow holds up all of them as long as the parts are equal. Cut by speed they take everybody the same time.

Sources: Harlap et al. 2016, "Addressing the straggler problem for iterative convergent parallel ML" (FlexRR: a
synchronization that gives way, and work that is reassigned from worker to worker meanwhile): here who would wait takes
over what a slow worker has not begun (`dealing.Dealer`).
Chen et al. 2020, "Semi-dynamic load balancing: efficient distributed learning in non-dedicated environments" (LB-BSP:
batches that are sized at the barriers by what each worker can do): here the sizes of the workers' parts follow their
speeds from one batch to the next (`Speeds`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from statistics import fmean
from typing import Any

_KEPT = 0.5
"""Of what was known of a worker's speed so much is kept, on a log scale, when a share of it is timed: a speed that is
ten times off is a third off after three shares, whether it has risen or fallen; one late share is soon forgotten."""
_LEAST_S = 1e-6


class Stopwatch:
    """Seconds between a share's going out to a worker and its acknowledgement, less those in which it waited behind
    another one that the worker held. What the ledger, which knows no time, is told with the acknowledgement: so a copy
    of the ledger, and a log of its inputs, are told the same.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        """
        Args:
            clock: tells seconds from any moment on; never goes back.
        """
        self._clock = clock
        self._begun_s: dict[int, dict[int, float]] = {}
        """When each worker was given each of its orders."""
        self._done_s: dict[int, float] = {}
        """When each worker was last done with one."""

    def start(self, worker: int, order_id: int) -> None:
        """A worker is given an order."""
        self._begun_s.setdefault(worker, {})[order_id] = self._clock()

    def stop(self, worker: int, order_id: int) -> float | None:
        """The seconds since, or since the worker was done with the last one before, if that was later; None: somebody
        else gave it out, or it was stopped before.
        """
        begun_s = self._begun_s.get(worker, {}).pop(order_id, None)
        if begun_s is None:
            return None
        before_s, now_s = self._done_s.get(worker, begun_s), self._clock()
        self._done_s[worker] = now_s
        return now_s - max(begun_s, before_s)

    def forget(self, worker: int) -> None:
        """A worker holds nothing any more."""
        self._begun_s.pop(worker, None)
        self._done_s.pop(worker, None)


class Speeds:
    """Samples a second of each worker, from the shares it has done, and the parts of a batch that follow from them."""

    def __init__(self) -> None:
        self._logs: dict[int, float] = {}
        """Natural logarithms of samples/s."""
        self.owed: dict[int, float] = {}
        """Samples by which a worker's parts have come out too small, by rounding: between -1 and 1, and 0 in all."""

    def note(self, worker: int, num_samples: int, took_s: float) -> None:
        """A worker has done a share."""
        measured = math.log(num_samples / max(took_s, _LEAST_S))
        known = self._logs.get(worker)
        self._logs[worker] = measured if known is None else _KEPT * known + (1 - _KEPT) * measured

    def forget(self, worker: int) -> None:
        """A worker is lost; whoever has its number next may be on another machine."""
        self._logs.pop(worker, None)
        self.owed.pop(worker, None)

    def rates(self, workers: Collection[int]) -> list[float]:
        """Samples/s of these; of one that was never timed the mean of the others'; 1 of each if none was."""
        known = [math.exp(self._logs[worker]) for worker in workers if worker in self._logs]
        mean = fmean(known) if known else 1.0
        return [math.exp(self._logs[worker]) if worker in self._logs else mean for worker in workers]

    def parts(self, workers: Sequence[int], num_absent: int, num_samples: int) -> tuple[list[int], dict[int, float]]:
        """Of so many samples the part of each worker, in proportion to its speed.

        What rounding takes from one batch it gives back in a later one. So over the batches each worker gets its exact
        part, and one whose part of a batch is less than a sample is given one now and then, and seen to have recovered.

        Args:
            workers: that are there.
            num_absent: workers to be expected beside them; each counts as one of the mean speed.
            num_samples: at least 1.

        Returns:
            Sizes for the workers, then for the absent; their sum is `num_samples`. And what is `owed` once the batch is
            handed out so.
        """
        rates = self.rates(workers)
        rates += [fmean(rates) if rates else 1.0] * num_absent
        owed = [self.owed.get(worker, 0.0) for worker in workers] + [0.0] * num_absent
        wanted = [num_samples * rate / sum(rates) + more for rate, more in zip(rates, owed, strict=True)]
        sizes = _rounded(wanted, num_samples)
        left = [want - size for want, size in zip(wanted, sizes, strict=True)][: len(workers)]
        surplus = fmean(left) if left else 0.0  # of who was absent, or has left
        return sizes, {worker: more - surplus for worker, more in zip(workers, left, strict=True)}

    def to_json(self) -> dict[str, Any]:
        return {"logs": [list(item) for item in self._logs.items()], "owed": [list(item) for item in self.owed.items()]}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Speeds:
        speeds = Speeds()
        speeds._logs, speeds.owed = dict(value["logs"]), dict(value["owed"])
        return speeds


def _rounded(wanted: Sequence[float], total: int) -> list[int]:
    """Whole numbers of this sum, none negative, close to what is wanted: rounded down, and the largest rests up."""
    sizes = [max(0, math.floor(want)) for want in wanted]
    places = range(len(wanted))
    while (missing := total - sum(sizes)) > 0:
        for place in sorted(places, key=lambda place: sizes[place] - wanted[place])[:missing]:
            sizes[place] += 1
    while sum(sizes) > total:
        sizes[min((place for place in places if sizes[place]), key=lambda place: wanted[place] - sizes[place])] -= 1
    return sizes
