"""The base class of the parameters of methods, with the facts that a config's rules need before a method is made."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from orchestray.platform.config.base import Section
from orchestray.platform.config.problems import Problem


@dataclass(frozen=True)
class Searched:
    """The rest of a search config, as far as the rules of a method's own keys depend on it."""

    keys: Collection[str]
    """Keys of `search.space`, with valid and invalid dimensions."""
    dimensions: Mapping[str, Any]
    """Valid dimensions, by key."""
    why_outside: Callable[[Any, Any], str | None]
    """Function of a dimension and a value that returns why the value is outside the dimension, or None."""
    trials: int | None
    """`search.budget.trials`."""


class MethodSection(Section):
    """The parameters of a method, with facts about it."""

    searches: ClassVar[Literal["space", "architecture", "both"]] = "both"
    """`space` if the method cannot search architectures; `architecture` if it needs one to search."""
    shares_weights: ClassVar[bool] = False
    """True if the first trial trains one set of weights for all networks."""
    counts_itself: ClassVar[bool] = False
    """True if the method ends by itself, without `budget.trials`."""
    counts: ClassVar[tuple[str, ...]] = ()
    """Keys with a number of trials that the method needs before it learns: those of a generation, a level, a stage."""
    changes_running: ClassVar[bool] = False
    """True if running trials get other values."""
    why_not_within: ClassVar[str | None] = None
    """Reason why no other method may end its trials early, after the method's name; None: one may."""

    type: str
    """Name of the method."""

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of the method's constructor that not every method has."""
        return self.model_dump(exclude={"type"})

    @property
    def proposer(self) -> MethodSection:
        """Section of the method that proposes the trials."""
        return self

    @property
    def is_one_process(self) -> bool:
        """True if a trial is a program that trains many networks, or members, in its own process."""
        return self.shares_weights

    def problems(self, place: str, searched: Searched) -> Iterator[Problem]:
        """Yield the rules between the method's own keys and the rest of the search that the config breaks.

        Args:
            place: dotted key of this section.
            searched: the rest of the search.
        """
        for key in self.counts:
            count, trials = getattr(self, key), searched.trials
            if count is not None and trials is not None and count > trials:
                text = f"must be at most the budget's trials ({trials}), got {count}; raise search.budget.trials"
                yield Problem(f"{place}.{key}", text)

    def is_default(self, key: str) -> bool:
        """Return True if a parameter has its default, which was not chosen with the number of trials in mind."""
        return bool(getattr(self, key) == type(self).model_fields[key].default)
