"""The base of methods whose trials are independent: numbers, the budget of trials, and known points."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from orchestray.platform.errors import ConfigError
from orchestray.search.methods.base import Finished, Method, Proposal, rng_of
from orchestray.search.methods.space import MAX_DRAWS as MAX_DRAWS  # noqa: PLC0414 - proposers take it from here
from orchestray.search.spaces.architectures.base import Genome, key_of

_START_DRAW = 0x57A


class Proposer(Method):
    """A method that proposes whole points: a value for each key and, with an architecture, a genome."""

    def __init__(self, **arguments: Any) -> None:
        """Take the arguments of `Method`.

        Raises:
            ConfigError: neither a key nor an architecture is searched.
        """
        super().__init__(**arguments)
        if not self.space and self.architecture is None:
            raise ConfigError("there is nothing to search: name at least one key in search.space or an architecture")
        self.num_asked = 0
        self.is_exhausted = False
        """True if every point has been proposed."""
        self._keys: set[str] = set()
        self._learnt: set[str] = set()
        """Keys of points of earlier searches, which only `begin_with` may repeat."""
        self._start: list[Mapping[str, Any]] = []

    def begin_with(self, start: Sequence[Mapping[str, Any]]) -> bool:
        self._start = list(start)
        return True

    @property
    def is_beginning(self) -> bool:
        """True if the next trial has values that the search is to begin with."""
        return self.num_asked < len(self._start)

    def begun(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of the next trial: those it is to begin with, before those that the method proposes."""
        if not self.is_beginning:
            return dict(values)
        rng = rng_of(self.seed, self.num_asked, _START_DRAW)
        return self.space.begun(self._start[self.num_asked], values, rng)

    @property
    def is_done(self) -> bool:
        return self.is_exhausted or (self.trials is not None and self.num_asked >= self.trials)

    def tell(self, finished: Finished) -> None:
        """Ignore the end of a trial."""

    def propose(self, values: Mapping[str, Any], genome: Genome = None, change: str = "") -> Proposal:
        """Return the next proposal, of this point, and record it as known."""
        self._keys.add(self.key(values, genome))
        self.num_asked += 1
        return Proposal(self.num_asked - 1, dict(values), genome, change=change)

    def key(self, values: Mapping[str, Any], genome: Genome = None) -> str:
        """Return a key that is equal for points that make the same trial."""
        architecture = "" if self.architecture is None else key_of(self.architecture, genome)
        return architecture + json.dumps({key: values[key] for key in self.space if key in values})

    def is_known(self, values: Mapping[str, Any], genome: Genome = None) -> bool:
        """Return True if the point was proposed already."""
        return self.key(values, genome) in self._keys

    def is_new(self, values: Mapping[str, Any], genome: Genome = None) -> bool:
        """Return True if a trial can have the point, and none has had it, here or in an earlier search."""
        key = self.key(values, genome)
        return key not in self._keys and key not in self._learnt and self.space.is_allowed(values)

    def may_begin(self, values: Mapping[str, Any], genome: Genome = None) -> bool:
        """Return True if the next trial is to begin with the point and can: an earlier search may have had it."""
        return self.is_beginning and not self.is_known(values, genome) and self.space.is_allowed(values)

    @property
    def num_points(self) -> int | None:
        """Number of points of the space; None if it cannot be counted."""
        return None if self.architecture is not None else self.space.num_points

    def last_point(self) -> dict[str, Any] | None:
        """Return the first new point in the order of the grid; None if there is none, or they cannot be listed."""
        if self.architecture is not None or not self.space.is_finite:
            return None
        return next((values for values in self.space.points() if self.is_new(values)), None)
