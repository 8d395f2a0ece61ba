"""Rules that make one gradient of many: pure functions on a matrix with a row a worker.

Every rule but the mean withstands some workers that send anything, numbers that are none included: of NaN and
infinities a distance is infinite, and in an order they come last.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def mean(vectors: Tensor, weights: Tensor | None = None) -> Tensor:
    """The weighted mean of the rows.

    Args:
        vectors: one a worker, `[workers, elements]`.
        weights: what each counts for, `[workers]`, not all zero; None: all the same.

    Returns:
        `[elements]`.
    """
    if weights is None:
        return vectors.mean(0)
    weights = weights.to(vectors.dtype)
    return (weights / weights.sum()) @ vectors


def krum_tolerates(num_workers: int) -> int:
    """How many Byzantine workers Krum withstands among `num_workers`: the largest f with n >= 2f + 3.

    Blanchard, El Mhamdi, Guerraoui and Stainer, "Machine Learning with Adversaries: Byzantine Tolerant Gradient
    Descent" (NIPS 2017), proposition 4.2.
    """
    return max(0, (num_workers - 3) // 2)


def trimming_tolerates(num_workers: int) -> int:
    """How many Byzantine workers median and trimmed mean withstand among `num_workers`: the largest f with n > 2f."""
    return max(0, (num_workers - 1) // 2)


def krum_scores(vectors: Tensor, byzantine: int) -> Tensor:
    """Of each row the sum of the squared distances to its n - f - 2 nearest others (Blanchard et al. 2017, section 4).

    Args:
        vectors: one a worker, `[n, elements]`.
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
    # Differences, not the difference of squares: among near vectors the latter has no digits left.
    rows = [(vectors - vector).double().square().sum(1) for vector in vectors]
    distances = torch.stack(rows).nan_to_num(nan=math.inf, posinf=math.inf)
    distances.fill_diagonal_(math.inf)
    return distances.sort(1).values[:, : num_workers - byzantine - 2].sum(1)


def krum(vectors: Tensor, byzantine: int) -> Tensor:
    """The row with the best Krum score; of equal ones the first. Arguments and errors as of `krum_scores`.

    Returns:
        `[elements]`.
    """
    return vectors[int(krum_scores(vectors, byzantine).argmin())].clone()


def multi_krum(vectors: Tensor, byzantine: int, num_chosen: int | None = None) -> Tensor:
    """The mean of the rows with the best Krum scores (Blanchard et al. 2017, section 5, "Multi-Krum").

    Args:
        vectors: one a worker, `[n, elements]`.
        byzantine: f, with n >= 2f + 3.
        num_chosen: m, from 1 (which is Krum) to n - f; default: n - f - 2, as many as a score looks at.

    Returns:
        `[elements]`.

    Raises:
        ValueError: there are too few workers, or no such number can be chosen.
    """
    scores = krum_scores(vectors, byzantine)
    most = vectors.shape[0] - byzantine
    chosen = most - 2 if num_chosen is None else num_chosen
    if not 1 <= chosen <= most:
        raise ValueError(f"Multi-Krum takes the mean of 1 to n - f = {most} gradients; asked for {chosen}.")
    # In the order of workers, so that the sum's bits do not depend on who is nearer.
    best = scores.sort(stable=True).indices[:chosen].sort().values
    return vectors[best].mean(0)


def median(vectors: Tensor) -> Tensor:
    """The median of each coordinate, for an even number of workers the mean of the two in the middle.

    Yin, Chen, Ramchandran and Bartlett, "Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates"
    (ICML 2018), definition 1. With fewer than half of the workers Byzantine it lies within what the others sent.

    Args:
        vectors: one a worker, `[n, elements]`.

    Returns:
        `[elements]`.
    """
    num_workers = vectors.shape[0]
    ordered = vectors.sort(0).values
    low, high = ordered[(num_workers - 1) // 2], ordered[num_workers // 2]
    return low.clone() if num_workers % 2 else low / 2 + high / 2


def trimmed_mean(vectors: Tensor, byzantine: int) -> Tensor:
    """The mean of each coordinate without its `byzantine` smallest and largest values (Yin et al. 2018, definition 2).

    Args:
        vectors: one a worker, `[n, elements]`.
        byzantine: f, with n > 2f.

    Returns:
        `[elements]`.

    Raises:
        ValueError: nothing would be left.
    """
    num_workers = vectors.shape[0]
    if num_workers <= 2 * byzantine:
        raise ValueError(
            f"The trimmed mean withstands {byzantine} Byzantine workers from {2 * byzantine + 1} workers on; "
            f"got {num_workers}."
        )
    return vectors.sort(0).values[byzantine : num_workers - byzantine].mean(0)
