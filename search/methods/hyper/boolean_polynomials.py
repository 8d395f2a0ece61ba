"""Sparse polynomials over bits, found from few samples by compressed sensing.

Hazan et al., Hyperparameter optimization: a spectral approach, 2018, section 4.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from sklearn.linear_model import lasso_path

_ALPHAS = np.geomspace(1.0, 1e-3, 30)
"""Penalties relative to the one at which all coefficients are 0."""
_MAX_ENUMERATED = 16
"""Most bits whose assignments are all evaluated: those of the largest terms."""


@dataclass(frozen=True)
class Term:
    """A coefficient times the parity of some bits: the product of their signs, each +1 or -1."""

    bits: tuple[int, ...]
    coefficient: float


def parities(signs: np.ndarray, degree: int) -> tuple[np.ndarray, list[tuple[int, ...]]]:
    """Return all products of 1 to `degree` bits.

    Args:
        signs: [n, num_bits], +1 and -1.
        degree: most bits of a product.

    Returns:
        The products, [n, num_products], and the bits of each.
    """
    supports: list[tuple[int, ...]] = []
    columns = []
    for size in range(1, min(degree, signs.shape[1]) + 1):
        chosen = np.array(list(combinations(range(signs.shape[1]), size)))
        columns.append(signs[:, chosen].prod(2))
        supports += [tuple(int(bit) for bit in row) for row in chosen]
    return np.concatenate(columns, axis=1), supports


def num_parities(num_bits: int, degree: int) -> int:
    """Return the number of products of 1 to `degree` bits."""
    return sum(math.comb(num_bits, size) for size in range(1, min(degree, num_bits) + 1))


def sparse_terms(signs: np.ndarray, scores: np.ndarray, degree: int, num_terms: int) -> list[Term]:
    """Return the few products that explain the scores (Algorithm 1): Lasso selects them, least squares weighs them.

    Along the path of falling penalties, the last model with at most `num_terms` products is used.

    Args:
        signs: [n, num_bits], +1 and -1.
        scores: [n].
        degree: degree of the polynomial.
        num_terms: most products.

    Returns:
        The terms, the largest coefficient first.
    """
    features, supports = parities(signs.astype(float), degree)
    centred = scores - scores.mean()
    if not np.any(np.abs(centred) > 1e-12):
        return []
    highest = float(np.abs(features.T @ centred).max()) / len(centred)
    _, path, _ = lasso_path(features, centred, alphas=highest * _ALPHAS, max_iter=2000, tol=1e-3)
    sizes = (np.abs(path) > 1e-9).sum(0)
    fitting = np.flatnonzero((sizes > 0) & (sizes <= num_terms))
    if not len(fitting):
        return []
    chosen = np.flatnonzero(np.abs(path[:, fitting[-1]]) > 1e-9)
    design = np.column_stack([features[:, chosen], np.ones(len(centred))])
    coefficients = np.linalg.lstsq(design, scores, rcond=None)[0][:-1]
    order = np.argsort(-np.abs(coefficients), kind="stable")
    return [Term(supports[chosen[place]], float(coefficients[place])) for place in order]


def best_assignments(terms: Sequence[Term], count: int) -> list[dict[int, int]]:
    """Return the `count` assignments (bit to +1 or -1) with the largest sum of terms, the best first."""
    bits: list[int] = []
    used: list[Term] = []
    for term in terms:  # the largest first, while all assignments can be evaluated
        new = [bit for bit in term.bits if bit not in bits]
        if len(bits) + len(new) <= _MAX_ENUMERATED:
            bits += new
            used.append(term)
    if not bits:
        return [{}]
    rows = np.arange(2 ** len(bits))
    signs = 1 - 2 * ((rows[:, None] >> np.arange(len(bits))) & 1)
    totals = np.zeros(len(rows))
    for term in used:
        totals += term.coefficient * signs[:, [bits.index(bit) for bit in term.bits]].prod(1)
    best = np.argsort(-totals, kind="stable")[:count]
    return [{bit: int(sign) for bit, sign in zip(bits, signs[row], strict=True)} for row in best]
