"""Functions with a known maximum, as searches score them."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from orchestray.search.methods.base import Proposal
from orchestray.search.spaces.dimensions import Dimension, Uniform

BRANIN_SPACE: Mapping[str, Dimension] = {"x": Uniform(-5.0, 10.0), "y": Uniform(0.0, 15.0)}
BRANIN_BEST = -0.39788735772973816
HARTMANN_SPACE: Mapping[str, Dimension] = {f"x{axis}": Uniform(0.0, 1.0) for axis in range(6)}
HARTMANN_BEST = 3.322368011391339

_HEIGHTS = np.array([1.0, 1.2, 3.0, 3.2])
_STEEPNESS = np.array(
    [[10, 3, 17, 3.5, 1.7, 8], [0.05, 10, 17, 0.1, 8, 14], [3, 3.5, 1.7, 10, 17, 8], [17, 8, 0.05, 10, 0.1, 14]]
)
_CENTRES = 1e-4 * np.array(
    [
        [1312, 1696, 5569, 124, 8283, 5886],
        [2329, 4135, 8307, 3736, 1004, 9991],
        [2348, 1451, 3522, 2883, 3047, 6650],
        [4047, 8828, 8732, 5743, 1091, 381],
    ]
)


def branin(proposal: Proposal, _step: int = 1) -> float:
    """Return Branin's function, negated: three maxima, all `BRANIN_BEST`."""
    x, y = proposal.changes["x"], proposal.changes["y"]
    valley = y - 5.1 / (4 * math.pi**2) * x**2 + 5 / math.pi * x - 6
    return float(-(valley**2 + 10 * (1 - 1 / (8 * math.pi)) * math.cos(x) + 10))


def hartmann(proposal: Proposal, _step: int = 1) -> float:
    """Return Hartmann's function of six numbers, negated: the best of six maxima is `HARTMANN_BEST`."""
    at = np.array([proposal.changes[key] for key in HARTMANN_SPACE])
    return float(_HEIGHTS @ np.exp(-(_STEEPNESS * (at - _CENTRES) ** 2).sum(1)))
