"""The results of a load, as numbers for JSON."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from orchestray.loadtest.loads import ClosedLoop
from orchestray.loadtest.plan import Plan
from orchestray.loadtest.tally import Latencies, Tally
from orchestray.platform.errors import OrchestrayError

_QUANTILES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99, "p99_9": 0.999}
_BUSY_SHARE = 0.9
_LAG_S, _MEAN_LAG_S, _LAG_SHARE = 0.002, 0.0002, 0.1


class EndpointError(OrchestrayError):
    """Raised when the endpoint does not answer, refuses the request, or does not describe what it expects."""


@dataclass(frozen=True)
class Progress:
    """The progress of a load, `now_s` seconds after its beginning."""

    now_s: float
    num_answered: int
    num_failed: int
    num_pending: int


@dataclass(frozen=True)
class Measured:
    """The result of one load."""

    plan: Plan
    tally: Tally
    cpu_shares: tuple[float, ...]
    """Share of a core that each process of the load generator used."""
    num_retried: int = 0
    is_interrupted: bool = False
    """True if the load ended early, with the plan's duration shortened to what was measured."""

    @property
    def offered_per_s(self) -> float:
        return self.tally.num_offered / self.plan.duration_s

    @property
    def answered_per_s(self) -> float:
        """Answers with 2xx per second that came in the measured time."""
        return self.tally.num_answered_within / self.plan.duration_s

    @property
    def goodput_per_s(self) -> float:
        """Requests per second that were answered with 2xx within the deadline, by the time they were due."""
        return self.tally.num_in_time / self.plan.duration_s

    @property
    def mean_in_flight(self) -> float:
        """Mean number of pending requests, of those answered with any status: rate x mean latency.

        By Little's law that is their mean number between the times they were due and their answers.
        """
        return (self.tally.latency.sum_s + self.tally.refused.sum_s) / self.plan.duration_s

    @property
    def num_failed(self) -> int:
        """Number of requests without a 2xx answer."""
        return self.tally.num_offered - self.tally.latency.num

    @property
    def limited(self) -> bool:
        """True if the load generator itself was too slow, so that these numbers are not the server's.

        For an open loop, its lateness is then more than a tenth of the mean latency, or of p99. A pause of the whole
        machine does not count, as the server had it too. Clients of a closed loop are never late: there the limit is
        that a process was busy nearly all the time.
        """
        lag, latency = self.tally.lag, self.tally.latency
        if isinstance(self.plan.load, ClosedLoop):
            return max(self.cpu_shares, default=0.0) > _BUSY_SHARE
        late_in_mean = lag.mean_s > max(_MEAN_LAG_S, _LAG_SHARE * latency.mean_s)
        return late_in_mean or lag.quantile_s(0.99) > max(_LAG_S, _LAG_SHARE * latency.quantile_s(0.99))

    def summary(self) -> dict[str, Any]:
        """Return all results as numbers for JSON; latencies are in ms, and missing values are null."""
        tally, plan = self.tally, self.plan
        return {
            "url": plan.target.url,
            "load": str(plan.load),
            "duration_s": plan.duration_s,
            "warm_up_s": plan.warm_up_s,
            "num_offered": tally.num_offered,
            "num_ok": tally.latency.num,
            "num_failed": self.num_failed,
            "offered_per_s": _rounded(self.offered_per_s),
            "answered_per_s": _rounded(self.answered_per_s),
            "mean_in_flight": _rounded(self.mean_in_flight),
            "deadline_ms": None if plan.deadline_s is None else plan.deadline_s * 1e3,
            "goodput_per_s": None if plan.deadline_s is None else _rounded(self.goodput_per_s),
            "latency_ms": _in_ms(tally.latency),
            "refused_latency_ms": _in_ms(tally.refused) if tally.refused.num else None,
            "statuses": {str(status): count for status, count in sorted(tally.statuses.items())},
            "errors": dict(sorted(tally.errors.items())),
            "client": {
                "cpu_percent": [_rounded(100 * share) for share in self.cpu_shares],
                "lag_ms": {"p50": _ms(tally.lag.quantile_s(0.5)), "p99": _ms(tally.lag.quantile_s(0.99))},
                "limited": self.limited,
                "num_retried": self.num_retried,
            },
            "seconds": [
                {
                    "second": number,
                    "num_ok": latency.num,
                    "num_failed": num - latency.num,
                    "p50_ms": _ms(latency.quantile_s(0.5)),
                    "p99_ms": _ms(latency.quantile_s(0.99)),
                }
                for number, (latency, num) in tally.seconds.items()
            ],
        }


def _in_ms(latencies: Latencies) -> dict[str, float | None]:
    """Return mean, minimum, percentiles and maximum."""
    found = {name: _ms(latencies.quantile_s(share)) for name, share in _QUANTILES.items()}
    return {"mean": _ms(latencies.mean_s), "min": _ms(latencies.min_s), **found, "max": _ms(latencies.max_s)}


def _ms(seconds: float) -> float | None:
    return _rounded(seconds * 1e3) if math.isfinite(seconds) else None


def _rounded(value: float) -> float:
    return float(f"{value:.5g}")
