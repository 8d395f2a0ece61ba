"""Rules that combine many gradients into one: pure functions of a matrix with one row per worker.

Every rule but the mean tolerates some workers that send anything, NaN and infinity included: their distances are
infinite, and NaN is sorted last.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def mean(vectors: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return the weighted mean of the rows.

    Args:
        vectors: one per worker, `[workers, elements]`.
        weights: weight of each, `[workers]`, not all zero; None: equal weights.

    Returns:
        `[elements]`.
    """
    if weights is None:
        return vectors.mean(0)
    weights = weights.to(vectors.dtype)
    return (weights / weights.sum()) @ vectors


def krum_scores(vectors: Tensor, byzantine: int) -> Tensor:
    """Return the sum of the squared distances from each row to its n - f - 2 nearest other rows.

    Blanchard et al. 2017, section 4.

    Args:
        vectors: one per worker, `[n, elements]`.
        byzantine: f, with n >= 2f + 3.

    Returns:
        `[n]`, float64.

    Raises:
        ValueError: there are too few workers.
    """
    num_workers = vectors.shape[0]
    if num_workers < 2 * byzantine + 3:
        raise ValueError(
            f"Krum withstands {byzantine} Byzantine workers from {2 * byzantine + 3} workers on; got {num_workers}."
        )
    # Differences instead of differences of squares, which cancel for vectors that are close.
    rows = [(vectors - vector).double().square().sum(1) for vector in vectors]
    distances = torch.stack(rows).nan_to_num(nan=math.inf, posinf=math.inf)
    distances.fill_diagonal_(math.inf)
    return distances.sort(1).values[:, : num_workers - byzantine - 2].sum(1)


def krum_choice(vectors: Tensor, byzantine: int) -> int:
    """Return the index of the row with the best Krum score; the first one if scores are equal.

    Arguments and errors are those of `krum_scores`.
    """
    return int(krum_scores(vectors, byzantine).argmin())


def multi_krum(vectors: Tensor, byzantine: int, num_chosen: int | None = None) -> Tensor:
    """Return the mean of the rows with the best Krum scores (Blanchard et al. 2017, section 5, "Multi-Krum").

    Args:
        vectors: one per worker, `[n, elements]`.
        byzantine: f, with n >= 2f + 3.
        num_chosen: m, from 1 (which is Krum) to n - f; default: n - f - 2, the number of neighbours in a score.

    Returns:
        `[elements]`.

    Raises:
        ValueError: there are too few workers, or `num_chosen` is out of range.
    """
    scores = krum_scores(vectors, byzantine)
    most = vectors.shape[0] - byzantine
    chosen = most - 2 if num_chosen is None else num_chosen
    if not 1 <= chosen <= most:
        raise ValueError(f"Multi-Krum takes the mean of 1 to n - f = {most} gradients; asked for {chosen}.")
    # In the order of workers, so that the bits of the sum do not depend on the order of the scores.
    best = scores.sort(stable=True).indices[:chosen].sort().values
    return vectors[best].mean(0)


def median(vectors: Tensor) -> Tensor:
    """Return the median of each coordinate; the mean of the middle two for an even number of workers.

    Yin, Chen, Ramchandran and Bartlett, "Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates"
    (ICML 2018), definition 1. If fewer than half of the workers are Byzantine, it lies within the range of the others'
    values.

    Args:
        vectors: one per worker, `[n, elements]`.

    Returns:
        `[elements]`.
    """
    num_workers = vectors.shape[0]
    ordered = vectors.sort(0).values
    low, high = ordered[(num_workers - 1) // 2], ordered[num_workers // 2]
    return low.clone() if num_workers % 2 else low / 2 + high / 2


def trimmed_mean(vectors: Tensor, byzantine: int) -> Tensor:
    """Return the mean of each coordinate without its `byzantine` smallest and largest values.

    Yin et al. 2018, definition 2.

    Args:
        vectors: one per worker, `[n, elements]`.
        byzantine: f, with n > 2f.

    Returns:
        `[elements]`.

    Raises:
        ValueError: no values would be left.
    """
    num_workers = vectors.shape[0]
    if num_workers <= 2 * byzantine:
        raise ValueError(
            f"The trimmed mean withstands {byzantine} Byzantine workers from {2 * byzantine + 1} workers on; "
            f"got {num_workers}."
        )
    return vectors.sort(0).values[byzantine : num_workers - byzantine].mean(0)
