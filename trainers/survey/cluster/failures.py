"""Workers that die: the share of time that is useful, by simulation and closed form, and how often to save.

Each worker dies with rate lambda, so a cluster of W whose workers all wait for one another fails with rate W lambda. It
then restarts, which takes R, from its last checkpoint. A checkpoint is saved after every interval of tau seconds of
work, and takes delta.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Failures:
    """The failures of workers, and what they cost.

    Args:
        rate_per_s: failures of one worker a second, lambda.
        checkpoint_s: seconds of saving a checkpoint, delta.
        restart_s: seconds from a failure until work goes on, R.
    """

    rate_per_s: float
    checkpoint_s: float = 0.0
    restart_s: float = 0.0

    def __post_init__(self) -> None:
        if min(self.rate_per_s, self.checkpoint_s, self.restart_s) < 0:
            raise ValueError(f"rates and seconds of failures are not negative, got {self}")


@dataclass(frozen=True)
class Outcome:
    """The result of a simulation of failures."""

    goodput: float
    """Share of the time that is work which was not lost, from 0 to 1."""
    num_failures: int
    total_s: float


def restarting(
    intervals_s: NDArray[np.float64], num_workers: int, failures: Failures, draw: np.random.Generator
) -> Outcome:
    """Simulate a cluster that goes back to its last checkpoint whenever a worker dies, also while it restarts.

    Args:
        intervals_s: seconds of work between checkpoints, [intervals].
        num_workers: workers that wait for one another.
        failures: their failures.
        draw: generator of the times of failures.
    """
    useful_s = float(intervals_s.sum())
    rate_per_s = num_workers * failures.rate_per_s
    needed_s = intervals_s + failures.checkpoint_s
    if not rate_per_s:
        total_s = float(needed_s.sum())
        return Outcome(useful_s / total_s, 0, total_s)
    total_s, num_failures = float(needed_s.sum()), 0
    open_s = needed_s
    while len(open_s):  # the time to the next failure has no memory: each attempt draws its own
        fails_s = draw.exponential(1 / rate_per_s, len(open_s))
        open_s, fails_s = open_s[fails_s < open_s], fails_s[fails_s < open_s]
        total_s += float(fails_s.sum())
        num_failures += len(open_s)
        restarts_s = np.full(len(open_s), failures.restart_s)
        while len(restarts_s):
            fails_s = draw.exponential(1 / rate_per_s, len(restarts_s))
            total_s += float(np.minimum(fails_s, restarts_s).sum())
            restarts_s = restarts_s[fails_s < restarts_s]
            num_failures += len(restarts_s)
    return Outcome(useful_s / total_s, num_failures, total_s)


def restarting_goodput(interval_s: float, num_workers: int, failures: Failures) -> float:
    """Return the expected share of useful time of `restarting`.

    With a rate L = W lambda, an interval takes exp(L R) (exp(L (tau + delta)) - 1) / L in the mean. See Daly, "A
    higher order estimate of the optimum checkpoint interval for restart dumps" (2006).
    """
    rate_per_s = num_workers * failures.rate_per_s
    needed_s = interval_s + failures.checkpoint_s
    if not rate_per_s:
        return interval_s / needed_s
    if rate_per_s * (needed_s + failures.restart_s) > _NEVER:
        return 0.0
    return interval_s * rate_per_s / (math.exp(rate_per_s * failures.restart_s) * math.expm1(rate_per_s * needed_s))


_NEVER = 700.0
"""Expected failures in an interval from which on its duration is no longer a float."""


def young_daly_s(num_workers: int, failures: Failures) -> float:
    """Return the work between checkpoints that loses least, sqrt(2 delta / (W lambda)); infinite without failures.

    Young, "A first order approximation to the optimum checkpoint interval" (1974).
    """
    rate_per_s = num_workers * failures.rate_per_s
    return math.sqrt(2 * failures.checkpoint_s / rate_per_s) if rate_per_s else math.inf


def best_interval_s(num_workers: int, failures: Failures) -> float:
    """Return the interval with the most goodput, without Young's approximation.

    The root of (1 - L tau) exp(L (tau + delta)) = 1, which the derivative of the goodput has, by bisection.
    """
    rate_per_s = num_workers * failures.rate_per_s
    if not rate_per_s:
        return math.inf
    low, high = 0.0, 1.0  # of L tau
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        rises = math.log1p(-middle) + middle + rate_per_s * failures.checkpoint_s > 0
        low, high = (middle, high) if rises else (low, middle)
    return low / rate_per_s


_HALVINGS = 50


def going_on_goodput(step_s: float, num_workers: int, failures: Failures, bound: int | None) -> float:
    """Return the expected share of useful time if the others go on without a worker that restarts.

    Its own share of the work is lost meanwhile. Under a bound on staleness the others go on for that many steps, and
    wait for the rest of the restart.

    Args:
        step_s: seconds of a step.
        num_workers: workers.
        failures: their failures; nothing is saved, as the state is with the others.
        bound: most steps that a worker may be ahead; None: any number.
    """
    own = 1 / (1 + failures.rate_per_s * failures.restart_s)
    if bound is None:
        return own
    waits_s = max(0.0, failures.restart_s - bound * step_s)
    return own / (1 + num_workers * failures.rate_per_s * waits_s)
