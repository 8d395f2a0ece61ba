"""What a resumed search may change."""

from __future__ import annotations

from orchestray.platform.config.problems import shown
from orchestray.platform.config.resume import flat
from orchestray.platform.config.search.schema import SearchConfig

_FREE = (
    "base.strategy",
    "base.resources",
    "base.engine",
    "base.checkpoint",
    "base.max_restarts",
    "base.allow_faults",
    "base.faults",
    "search.parallel",
    "search.budget.time_limit_s",
    "search.budget.trial_time_limit_s",
    "search.budget.trial_memory_mb",
)
_MAY_GROW = "search.budget.trials"


def search_differences(old: SearchConfig, new: SearchConfig) -> list[str]:
    """The keys in which a resumed search's config differs from the saved one although they may not differ.

    Its trials may be spread otherwise, and there may be more of them; whatever else were to change would make the
    proposals others than those that were made.

    Returns: a text each, "search.seed (was 0, now 1)"; empty if the search may go on.
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
