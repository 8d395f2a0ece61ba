"""The state in which a search begins or resumes. Independent of Ray."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

from orchestray.platform.errors import ConfigError
from orchestray.search.config.dimensions import Dimension
from orchestray.search.config.resume import space_differences
from orchestray.search.engine.earlier import does_not_learn, earlier_trials
from orchestray.search.engine.session import MethodSession, checked_calls
from orchestray.search.registry.check import hyper_space_of, method_of

if TYPE_CHECKING:
    from orchestray.search.config.schema import SearchConfig
    from orchestray.search.engine.session import Journal, Sections

_DIMENSIONS: TypeAdapter[dict[str, Any]] = TypeAdapter(dict[str, Dimension])


def session_of(config: SearchConfig, journal: Journal, *, previous: SearchConfig | None = None) -> MethodSession:
    """Return the session of a search's method, with the journal replayed and the config's number of trials.

    The answers of a method may depend on the total number of trials and on the space. Each part of the journal is
    therefore replayed with those it was recorded with.

    Args:
        config: config of the search, as it continues.
        journal: calls of its method so far; empty for a new search.
        previous: config with which the search began or was resumed last; None: the same.

    Raises:
        ConfigError: the method cannot search this space, continue over a wider one, or learn from earlier results.
        SearchError: the method's answers differ from the journal, or it cannot be read; nothing was written.
    """
    calls = checked_calls(journal)
    before = (previous or config) if calls else config
    trials = next((call["before"] for call in calls if call["call"] == "allow"), before.search.budget.trials)
    last = _sections(before)
    widened = [call for call in calls if call["call"] == "widen"]
    first, last = (widened[0]["before"], widened[-1]["space"]) if widened else (last, last)
    session = MethodSession(
        method_of(_over(config, first), trials=trials),
        journal,
        space_of=lambda sections: hyper_space_of(_over(config, sections)),
    )
    if not calls and config.search.learn_from and not session.learn(earlier_trials(config).observations):
        raise ConfigError(does_not_learn(config))
    if (now := _sections(config)) != last:
        _widen(session, config, last, now)
    if session.method.trials != config.search.budget.trials:
        session.allow(config.search.budget.trials)
    return session


def _over(config: SearchConfig, sections: Sections) -> SearchConfig:
    """Return the config with the space of these sections."""
    search = config.search.model_copy(update={"space": _DIMENSIONS.validate_python(sections)})
    return config.model_copy(update={"search": search})


def _sections(config: SearchConfig) -> dict[str, Any]:
    return {key: dimension.model_dump(mode="json") for key, dimension in config.search.space.items()}


def _widen(session: MethodSession, config: SearchConfig, before: dict[str, Any], now: dict[str, Any]) -> None:
    if differences := space_differences(_DIMENSIONS.validate_python(before), config.search.space):
        raise ConfigError([f"a resumed search may not change {difference}" for difference in differences])
    if not session.widen(before, now):
        raise ConfigError(
            f"search.space: {config.search.method.type} cannot go on over a wider space, since its trials so far are "
            "part of its plan; go on with the bounds as they were, or begin a new search that learns from this one "
            "(search.learn_from)"
        )
