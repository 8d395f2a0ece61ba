"""The new hyper-parameters of a member that has copied another, as pure functions.

Jaderberg et al. 2017, section 4.1: perturb the copied values, or draw them from the space again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

if TYPE_CHECKING:
    from orchestray.search.spaces.dimensions import Dimension

Explore = Literal["perturb", "resample", "both"]


def explored(
    rule: Explore,
    space: Mapping[str, Dimension],
    values: Mapping[str, Any],
    rng: np.random.Generator,
    *,
    factors: Sequence[float] = (0.8, 1.2),
    resample_probability: float = 0.25,
) -> dict[str, Any]:
    """Return new values near the given ones.

    Args:
        rule: `perturb` changes each value as its dimension does (`Dimension.perturb`); `resample`
            draws each value again with `resample_probability` and keeps the others; `both` draws again with
            `resample_probability` and perturbs the others.
        space: dimension of each key.
        values: the copied values.
        rng: random numbers of this decision.
        factors: factors of a perturbation.
        resample_probability: probability that a key is drawn again.
    """
    made = {}
    for key, dimension in space.items():
        is_drawn = rule != "perturb" and float(rng.random()) < resample_probability
        if is_drawn:
            made[key] = dimension.sample(rng)
        else:
            made[key] = values[key] if rule == "resample" else dimension.perturb(values[key], rng, factors)
    return made


def describe_changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """Return the changes in words: `lr 0.1 -> 0.12, momentum 0.9 -> 0.72`."""
    changed = [f"{key} {_shown(before[key])} -> {_shown(after[key])}" for key in after if after[key] != before.get(key)]
    return ", ".join(changed) or "nothing changed"


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
