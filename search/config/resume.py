"""The keys that a resumed search may change."""

from __future__ import annotations

from collections.abc import Mapping

from orchestray.platform.config.problems import shown
from orchestray.search.config.dimensions import Choice, Dimension, Range
from orchestray.search.config.schema import SearchConfig
from orchestray.trainers.config.resume import flat

_FREE = (
    "base.strategy",
    "base.resources",
    "base.engine",
    "base.checkpoint",
    "base.max_restarts",
    "base.allow_faults",
    "base.faults",
    "search.parallel",
    "search.callbacks",
    "search.budget.time_limit_s",
    "search.budget.trial_time_limit_s",
    "search.budget.trial_memory_mb",
)
_MAY_GROW = "search.budget.trials"


def search_differences(old: SearchConfig, new: SearchConfig) -> list[str]:
    """Return the differences between a resumed search's config and the saved one that are not allowed.

    Trials may be distributed differently, there may be more of them, and the space may be wider. Any other change would
    change the proposals.

    Args:
        old: the saved config.
        new: the config of the resumed search.

    Returns:
        A text for each difference, "search.seed (was 0, now 1)"; empty if the search may be resumed.
    """
    before, after = (flat(one.model_dump(mode="json", exclude={"search": {"space"}})) for one in (old, new))
    differences = []
    for path in dict.fromkeys([*before, *after]):
        was, now = before.get(path), after.get(path)
        is_free = any(path == free or path.startswith(f"{free}.") for free in _FREE)
        if was == now or is_free:
            continue
        if path != _MAY_GROW:
            differences.append(f"{path} (was {shown(was)}, now {shown(now)})")
        elif was is None or now is None or now < was:
            differences.append(f"{path} (was {shown(was)}, now {shown(now)}; it may only be raised)")
    return differences + space_differences(old.search.space, new.search.space)


def space_differences(old: Mapping[str, Dimension], new: Mapping[str, Dimension]) -> list[str]:
    """Return the differences between two spaces that are not a widening: lower bounds, higher ones, further values.

    Args:
        old: dimension of each key before.
        new: dimension of each key now.

    Returns:
        A text for each difference; empty if the new space contains the old one, and has the same keys.
    """
    differences = []
    for key in dict.fromkeys([*old, *new]):
        was, now = old.get(key), new.get(key)
        if was == now or (was is not None and now is not None and _contains(now, was)):
            continue
        shown_was, shown_now = (None if one is None else one.model_dump(mode="json") for one in (was, now))
        more = "" if was is None or now is None else "; it may only become wider"
        differences.append(f"search.space.{key} (was {shown(shown_was)}, now {shown(shown_now)}{more})")
    return differences


def _contains(wide: Dimension, narrow: Dimension) -> bool:
    others = [one.model_dump(exclude={"low", "high", "values"}) for one in (wide, narrow)]
    if others[0] != others[1]:
        return False
    if isinstance(wide, Choice) and isinstance(narrow, Choice):
        return all(value in wide.values for value in narrow.values)
    if not isinstance(wide, Range) or not isinstance(narrow, Range):
        return False
    return wide.low <= narrow.low and narrow.high <= wide.high
