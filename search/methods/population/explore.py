"""The new hyper-parameters of a member that has copied another, as pure functions.

Jaderberg et al. 2017, section 4.1: perturb the copied values, or draw them from the space again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from orchestray.search.methods.space import MAX_DRAWS, Space

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
    """Return new values near the given ones, for a point that a trial can have; those given if none is found.

    Args:
        rule: `perturb` changes each value as its dimension does (`Dimension.perturb`); `resample`
            draws each value again with `resample_probability` and keeps the others; `both` draws again with
            `resample_probability` and perturbs the others.
        space: dimension of each key.
        values: the copied values; keys that come into being are drawn.
        rng: random numbers of this decision.
        factors: factors of a perturbation.
        resample_probability: probability that a key is drawn again.
    """
    whole = Space.of(space)
    for _ in range(MAX_DRAWS):
        made = {}
        for key, dimension in whole.items():
            if key not in values:
                continue
            is_drawn = rule != "perturb" and float(rng.random()) < resample_probability
            if is_drawn:
                made[key] = dimension.sample(rng)
            else:
                made[key] = values[key] if rule == "resample" else dimension.perturb(values[key], rng, factors)
        made = whole.completed(made, rng)
        if whole.is_allowed(made):
            return made
    return dict(values)


def describe_changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """Return the changes in words: `lr 0.1 -> 0.12, momentum 0.9 -> 0.72`."""
    keys = [key for key in {**before, **after} if (key in before) != (key in after) or before[key] != after[key]]
    changed = [f"{key} {_shown(before.get(key, '-'))} -> {_shown(after.get(key, '-'))}" for key in keys]
    return ", ".join(changed) or "nothing changed"


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
