"""The base of methods whose trials are independent: numbers, the budget of trials, and known points."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from orchestray.platform.errors import ConfigError
from orchestray.search.methods.base import Finished, Method, Proposal
from orchestray.search.spaces.architectures.base import Genome, key_of

MAX_DRAWS = 200
"""Number of draws without a new architecture after which a space counts as exhausted."""


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
        self._start: list[Mapping[str, Any]] = []

    def begin_with(self, start: Sequence[Mapping[str, Any]]) -> bool:
        self._start = list(start)
        return True

    def completed(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of the next trial: those it is to begin with, before those that the method proposes."""
        first = self._start[self.num_asked] if self.num_asked < len(self._start) else {}
        return {**values, **first}

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
        return architecture + json.dumps([values[key] for key in self.space], sort_keys=True)

    def is_known(self, values: Mapping[str, Any], genome: Genome = None) -> bool:
        """Return True if the point was proposed already."""
        return self.key(values, genome) in self._keys

    @property
    def num_points(self) -> int | None:
        """Number of points of the space; None if it cannot be counted."""
        counts = [dimension.num_values for dimension in self.space.values()]
        if self.architecture is not None or any(count is None for count in counts):
            return None
        return math.prod(count for count in counts if count is not None)
