"""Where a search stands when it begins or goes on. Knows no Ray."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestray.search.checks import method_of
from orchestray.search.engine.director import Director

if TYPE_CHECKING:
    from orchestray.platform.config.search.schema import SearchConfig
    from orchestray.search.engine.director import Journal


def director_of(config: SearchConfig, journal: Journal, *, trials_before: int | None = None) -> Director:
    """The method of a search with all calls of its journal made again, and the trials it may have from here on.

    What a method answers may depend on how many trials there may be in all. So each stretch of the journal is made
    again with the number it was made with.

    Args:
        config: of the search, as it goes on.
        journal: of its method's calls; empty where it begins.
        trials_before: the budget's trials as the search began, where the journal does not tell; None: the config's.

    Raises:
        ConfigError: the method cannot search what it is given.
        SearchError: the method answers otherwise than it did; nothing was written.
    """
    calls = journal.entries()
    first = next((call["before"] for call in calls if call["call"] == "allow"), trials_before if calls else None)
    director = Director(method_of(config, trials=first), journal)
    if director.method.trials != config.search.budget.trials:
        director.allow(config.search.budget.trials)
    return director
