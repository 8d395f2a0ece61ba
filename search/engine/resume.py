"""The state in which a search begins or resumes. Independent of Ray."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestray.search.engine.session import MethodSession
from orchestray.search.registry.check import method_of

if TYPE_CHECKING:
    from orchestray.search.config.schema import SearchConfig
    from orchestray.search.engine.session import Journal


def session_of(config: SearchConfig, journal: Journal, *, trials_before: int | None = None) -> MethodSession:
    """Return the session of a search's method, with the journal replayed and the config's number of trials.

    The answers of a method may depend on the total number of trials. Each part of the journal is therefore replayed
    with the number it was recorded with.

    Args:
        config: config of the search, as it continues.
        journal: calls of its method so far; empty for a new search.
        trials_before: number of trials when the search began, if the journal does not say; None: that of the config.

    Raises:
        ConfigError: the method cannot search this space.
        SearchError: the method's answers differ from the journal; nothing was written.
    """
    calls = journal.entries()
    first = next((call["before"] for call in calls if call["call"] == "allow"), trials_before if calls else None)
    session = MethodSession(method_of(config, trials=first), journal)
    if session.method.trials != config.search.budget.trials:
        session.allow(config.search.budget.trials)
    return session
