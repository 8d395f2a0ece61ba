"""The keys that a resumed search may change."""

from __future__ import annotations

from orchestray.platform.config.problems import shown
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

    Trials may be distributed differently, and there may be more of them. Any other change would change the proposals.

    Args:
        old: the saved config.
        new: the config of the resumed search.

    Returns:
        A text for each difference, "search.seed (was 0, now 1)"; empty if the search may be resumed.
    """
    before, after = flat(old.model_dump(mode="json")), flat(new.model_dump(mode="json"))
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
    return differences
