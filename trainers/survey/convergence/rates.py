"""Averaged SGD on sparse logistic regression, by one worker or by several that do not wait, in virtual time.

For convex losses with bounded gradients, the loss of the averaged weights comes within O(1 / sqrt(T)) of the least one
in T steps. m workers may update shared weights without waiting, if gradients are sparse and not older than a bound. In
the time of T steps they come within O(1 / sqrt(m T)). See Niu, Recht, Re and Wright, "HOGWILD!" (2011).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from orchestray.trainers.survey.convergence.logistic import Logistic, Values

SHORTEST, LONGEST = 0.5, 1.5
"""Seconds of a gradient, drawn evenly between these."""


@dataclass(frozen=True)
class Trained:
    """The result of repeated trainings."""

    errors: Values
    """Loss of the averaged weights above the least loss, [repetitions, updates asked for]."""
    most_stale: int
    """Most updates of others between the weights that a gradient was computed on, and its own update."""
    seconds: Values
    """Virtual time of each update asked for, in the mean over repetitions."""


def train(
    problem: Logistic,
    num_workers: int,
    num_updates: Sequence[int],
    learning_rate: float,
    repetitions: int = 16,
    seed: int = 0,
) -> Trained:
    """Train with workers that each read the weights, compute a gradient, and add it when they are done.

    Update n has the learning rate `learning_rate` / sqrt(n), by any worker. The weights are averaged over updates.

    Args:
        problem: the problem.
        num_workers: workers, m; with one this is SGD.
        num_updates: numbers of updates after which to look, rising.
        learning_rate: learning rate of the first update.
        repetitions: independent trainings.
        seed: seed of the samples and of the durations.
    """
    draw = np.random.default_rng(seed)
    rows = np.arange(repetitions)
    w = np.zeros((repetitions, problem.num_features))
    total = np.zeros_like(w)
    read = np.zeros((repetitions, num_workers, problem.num_features))
    version = np.zeros((repetitions, num_workers), dtype=np.int64)
    ends_s = draw.uniform(SHORTEST, LONGEST, (repetitions, num_workers))
    errors, seconds, most_stale = [], [], 0
    wanted = set(num_updates)
    for number in range(1, num_updates[-1] + 1):
        worker = ends_s.argmin(axis=1)
        now_s = ends_s[rows, worker]
        sample = draw.integers(len(problem.labels), size=repetitions)
        columns, values = problem.columns[sample], problem.values[sample]
        products = (read[rows, worker][rows[:, None], columns] * values).sum(axis=1)
        slopes = problem.slopes(sample, products)
        w[rows[:, None], columns] -= learning_rate / np.sqrt(number) * slopes[:, None] * values
        most_stale = max(most_stale, int((number - 1 - version[rows, worker]).max()))
        total += w
        read[rows, worker], version[rows, worker] = w, number
        ends_s[rows, worker] = now_s + draw.uniform(SHORTEST, LONGEST, repetitions)
        if number in wanted:
            errors.append(problem.loss(total / number) - problem.least_loss)
            seconds.append(now_s.mean())
    return Trained(np.stack(errors, axis=1), most_stale, np.asarray(seconds))


def staleness_bound(num_workers: int) -> int:
    """Return the most updates that the other workers can make while one computes a gradient."""
    return (num_workers - 1) * (int(LONGEST / SHORTEST) + 1)


def doublings(first: int, last: int) -> NDArray[np.int64]:
    """Return the numbers first, 2 first, 4 first, ... up to last."""
    return first * 2 ** np.arange(int(np.log2(last / first)) + 1)
