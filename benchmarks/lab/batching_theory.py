"""Exact results about batches on one server under Poisson arrivals, which measurements are held against.

Service time s(b) = a + c b, at most B in a batch, run what there is as soon as the server is free. Inoue, "Queueing
analysis of GPU-based inference servers with dynamic batching" (arXiv 1912.06322), has the closed forms for B infinite.
"""

from __future__ import annotations

import math

import numpy as np


def mean_latency_s(rate_per_s: float, a_s: float, c_s: float, mean_batch: float, mean_square_batch: float) -> float:
    """Return the mean latency from the moments of the batch size (over batches), for B infinite: an exact identity.

    W = (a E[b] + c E[b^2] + (rate / 2) E[s(b)^2]) / E[b]: each request waits for the rest of the service it arrives
    in, and is then served with all that arrived in it.
    """
    mean_square_service = a_s**2 + 2 * a_s * c_s * mean_batch + c_s**2 * mean_square_batch
    return (a_s * mean_batch + c_s * mean_square_batch + rate_per_s / 2 * mean_square_service) / mean_batch


def mean_square_batch(rate_per_s: float, a_s: float, c_s: float, mean_batch: float) -> float:
    """Return E[b^2] over batches from E[b], for B infinite."""
    load = rate_per_s * c_s
    busy = rate_per_s * a_s
    return (mean_batch + busy**2 + 2 * busy * load * mean_batch) / (1 - load**2)


def greedy_chain(rate_per_s: float, a_s: float, c_s: float, max_batch_size: int) -> tuple[float, float]:
    """Return mean latency (seconds) and batch size of the greedy policy with batches of at most B, by the exact chain.

    The chain of the number left behind at departures, n' = n - min(n, B) + Poisson(rate s(b)), truncated where its
    tail is below 1e-12; the time average of the number present over a cycle gives the latency by Little's law.
    """
    if rate_per_s * (a_s + c_s * max_batch_size) >= max_batch_size:
        raise ValueError("the load is at or above capacity: there is no steady state")
    size = 64 * max_batch_size
    taken = np.minimum(np.maximum(np.arange(size), 1), max_batch_size)
    service_s = a_s + c_s * taken
    transition = np.zeros((size, size))
    for left_behind in range(size):
        start = max(left_behind, 1) - taken[left_behind]
        law = _poisson(rate_per_s * service_s[left_behind], size - start)
        transition[left_behind, start:] = law
        transition[left_behind, -1] += 1.0 - law.sum()
    stationary = _stationary(transition)
    at_start = np.maximum(np.arange(size), 1)
    # Seconds times requests present, over a service: those there at its start, and those that come, half of it each.
    area = (at_start * service_s + rate_per_s * service_s**2 / 2) @ stationary
    idle_s = stationary[0] / rate_per_s
    length_s = service_s @ stationary + idle_s
    return float(area / length_s / rate_per_s), float(taken @ stationary)


def _stationary(transition: np.ndarray) -> np.ndarray:
    size = len(transition)
    system = transition.T - np.eye(size)
    system[-1] = 1.0
    return np.asarray(np.linalg.solve(system, np.eye(size)[-1]))


def _poisson(mean: float, size: int) -> np.ndarray:
    counts = np.arange(size)
    log_factorials = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, size)))])
    return np.asarray(np.exp(counts * math.log(mean) - mean - log_factorials))
