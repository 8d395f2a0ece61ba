"""Replicas on a fixed graph, without a server: in step with their neighbours, or without waiting, in virtual time.

In step: Lian et al., "Can Decentralized Algorithms Outperform Centralized Algorithms?" (2017), algorithm 1. Without
waiting: Lian et al., "Asynchronous Decentralized Parallel Stochastic Gradient Descent" (2018), algorithm 1. There a
replica whose gradient is ready takes the mean with one neighbour, drawn at random, whatever that one is doing. Then it
makes its own step. So each does as many steps as it can.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from orchestray.trainers.survey.convergence.logistic import Logistic, Values
from orchestray.trainers.sync.local.mixing import Graph, fixed_graph, metropolis_hastings

_SPREAD = 0.2
"""Largest part by which a gradient takes less or more than its replica's usual time."""


@dataclass(frozen=True)
class Trained:
    """The result of a training."""

    steps: tuple[int, ...]
    """Number of steps of each replica."""
    messages: tuple[int, ...]
    """Number of models that each replica sent."""
    error: float
    """Loss of the mean of the replicas' weights above the least loss."""
    disagreement: float
    """Root of the mean square distance of the replicas' weights from their mean."""


def in_step(
    problem: Logistic,
    seconds: Sequence[float],
    until_s: float,
    *,
    graph: Graph = "ring",
    lr: float = 0.1,
    seed: int = 0,
) -> Trained:
    """Train with replicas that wait for their neighbours in every step.

    Args:
        problem: the problem; a gradient is that of one sample.
        seconds: seconds of a gradient of each replica, in the mean.
        until_s: virtual time of the training.
        graph: the neighbours.
        lr: learning rate.
        seed: seed of the samples and of the durations.
    """
    draw, size = np.random.default_rng(seed), len(seconds)
    talks = fixed_graph(size, graph)
    matrix, waits_for = metropolis_hastings(talks), talks | np.eye(size, dtype=bool)
    w, done_s, steps = np.zeros((size, problem.num_features)), np.zeros(size), 0
    while True:
        ready_s = done_s + np.array([_duration_s(each, draw) for each in seconds])
        done_s = np.where(waits_for, ready_s, 0.0).max(axis=1)
        if done_s.max() > until_s:
            break
        gradients = np.stack([_gradient(problem, each, draw) for each in w])
        w = matrix @ w - lr * gradients
        steps += 1
    return _result(problem, w, [steps] * size, (talks.sum(axis=0) * steps).tolist())


def without_waiting(
    problem: Logistic,
    seconds: Sequence[float],
    until_s: float,
    *,
    graph: Graph = "ring",
    lr: float = 0.1,
    seed: int = 0,
) -> Trained:
    """Train with replicas that never wait; arguments are those of `in_step`."""
    draw, size = np.random.default_rng(seed), len(seconds)
    neighbours = [np.flatnonzero(row) for row in fixed_graph(size, graph)]
    w, steps, messages = np.zeros((size, problem.num_features)), [0] * size, [0] * size
    gradients = [_gradient(problem, each, draw) for each in w]
    queue = [(_duration_s(each, draw), replica) for replica, each in enumerate(seconds)]
    heapq.heapify(queue)
    while queue[0][0] <= until_s:
        now_s, replica = heapq.heappop(queue)
        other = int(draw.choice(neighbours[replica]))
        w[[replica, other]] = (w[replica] + w[other]) / 2
        w[replica] -= lr * gradients[replica]  # of the weights before: those that it began with
        steps[replica] += 1
        messages[replica] += 1
        messages[other] += 1
        gradients[replica] = _gradient(problem, w[replica], draw)
        heapq.heappush(queue, (now_s + _duration_s(seconds[replica], draw), replica))
    return _result(problem, w, steps, messages)


def _duration_s(usual_s: float, draw: np.random.Generator) -> float:
    return usual_s * float(draw.uniform(1 - _SPREAD, 1 + _SPREAD))


def _gradient(problem: Logistic, w: Values, draw: np.random.Generator) -> Values:
    sample = draw.integers(len(problem.labels), size=1)
    row: Values = problem.matrix[sample[0]]
    gradient: Values = problem.slopes(sample, np.array([row @ w]))[0] * row
    return gradient


def _result(problem: Logistic, w: Values, steps: Sequence[int], messages: Sequence[int]) -> Trained:
    mean = w.mean(axis=0)
    error = float(problem.loss(mean)) - problem.least_loss
    return Trained(tuple(steps), tuple(messages), error, float(((w - mean) ** 2).sum(axis=1).mean() ** 0.5))
