"""What the methods share whose trials know nothing of each other's weights: numbering, the budget of trials, and not
proposing an architecture twice.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from orchestray.platform.errors import ConfigError
from orchestray.search.methods.base import Finished, Method, Proposal
from orchestray.search.spaces.base import Genome, key_of

MAX_DRAWS = 200
"""Draws without a new architecture after which a space counts as exhausted."""


class Proposer(Method):
    """A method that proposes whole points: a value for each key and, with an architecture, a genome."""

    def __init__(self, **arguments: Any) -> None:
        """Arguments: those of `Method`."""
        super().__init__(**arguments)
        if not self.space and self.architecture is None:
            raise ConfigError("there is nothing to search: name at least one key in search.space or an architecture")
        self.num_asked = 0
        self.is_exhausted = False
        """Whether there is no point left that was not proposed."""
        self._keys: set[str] = set()

    @property
    def is_done(self) -> bool:
        return self.is_exhausted or (self.trials is not None and self.num_asked >= self.trials)

    def tell(self, finished: Finished) -> None:
        """Nothing is learned from it."""

    def propose(self, values: Mapping[str, Any], genome: Genome = None, change: str = "") -> Proposal:
        """The next proposal, of this point."""
        self._keys.add(self.key(values, genome))
        self.num_asked += 1
        return Proposal(self.num_asked - 1, dict(values), genome, change=change)

    def key(self, values: Mapping[str, Any], genome: Genome = None) -> str:
        """The same for points that are the same trial."""
        architecture = "" if self.architecture is None else key_of(self.architecture, genome)
        return architecture + json.dumps([values[key] for key in self.space], sort_keys=True)

    def is_known(self, values: Mapping[str, Any], genome: Genome = None) -> bool:
        """Whether the point was proposed already."""
        return self.key(values, genome) in self._keys

    @property
    def num_points(self) -> int | None:
        """How many points there are; None: they are not to be counted."""
        counts = [dimension.num_values for dimension in self.space.values()]
        if self.architecture is not None or any(count is None for count in counts):
            return None
        return math.prod(count for count in counts if count is not None)
