"""The part of the time of a run that counts, if workers fail: what checkpoints cost, and what is lost without them."""

from __future__ import annotations

import math


def best_interval_s(checkpoint_s: float, mean_time_between_failures_s: float) -> float:
    """Return the seconds between two checkpoints that lose least: sqrt(2 delta M).

    Young (1974), "A first order approximation to the optimum checkpoint interval"; it holds for delta << M.

    Args:
        checkpoint_s: seconds that training stands still for a checkpoint, delta.
        mean_time_between_failures_s: mean seconds between two failures of any worker, M.
    """
    return math.sqrt(2 * checkpoint_s * mean_time_between_failures_s)


def goodput(interval_s: float, checkpoint_s: float, restart_s: float, mean_time_between_failures_s: float) -> float:
    """Return the expected part of the time in which steps count, with failures at exponential times.

    A segment of work and its checkpoint is repeated until no failure comes: on average it takes
    (M + R) (exp((tau + delta) / M) - 1) seconds. Daly (2006), "A higher order estimate of the optimum checkpoint
    interval for restart dumps", equation 20, with the restart after each failure and not before the first.

    Args:
        interval_s: seconds of work between two checkpoints, tau.
        checkpoint_s: seconds that training stands still for a checkpoint, delta.
        restart_s: seconds from a failure to the next step, R.
        mean_time_between_failures_s: mean seconds between two failures of any worker, M.
    """
    mean_s = mean_time_between_failures_s
    exponent = (interval_s + checkpoint_s) / mean_s
    if exponent > 700:
        return 0.0
    return interval_s / ((mean_s + restart_s) * math.expm1(exponent))
