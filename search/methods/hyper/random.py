"""Points drawn at random, or spread evenly by a Sobol sequence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
from scipy.stats import qmc

from orchestray.platform.errors import ConfigError
from orchestray.search.methods.base import Proposal, rng_of
from orchestray.search.methods.hyper.proposer import MAX_DRAWS, Proposer
from orchestray.search.methods.space import Space
from orchestray.search.spaces.architectures.base import Genome

_BLOCK = 64
"""Points of the Sobol sequence that are computed at a time: a power of two."""


class Random(Proposer):
    """Draws, independent of each other and of every score (Bergstra and Bengio, 2012).

    Order-free: the n-th proposal depends on the seed, n and the proposals before alone. No point is proposed twice: a
    known one is drawn again, and the search ends when all are known. With an architecture the space counts as exhausted
    after 200 draws without a new network.
    """

    is_order_free = True

    def __init__(self, *, sequence: Literal["pseudo", "sobol"] = "pseudo", **arguments: Any) -> None:
        """Take the parameters of `params.Random` and the arguments of `Method`.

        A scrambled Sobol sequence leaves no large part of the space empty (Owen, 1998). Architectures are always drawn
        with random numbers.

        Raises:
            ConfigError: a Sobol sequence is requested, and only architectures are searched.
        """
        super().__init__(**arguments)
        if sequence == "sobol" and not self.space:
            raise ConfigError(
                "search.method.sequence: a Sobol sequence fills a space of hyper-parameters, and search.space is "
                "empty; use sequence: pseudo for architectures"
            )
        self.sobol = SobolPoints(len(self.space), self.seed) if sequence == "sobol" else None

    def widen(self, space: Space) -> bool:
        self.space = space
        self.is_exhausted = False
        return True

    def ask(self) -> Proposal | None:
        if self.is_done:
            return None
        rng = rng_of(self.seed, self.num_asked)
        values = self.space.sample(rng) if self.sobol is None else self.space.from_units(self.sobol[self.num_asked])
        values = self.begun(values)
        for _ in range(MAX_DRAWS):
            genome: Genome = None if self.architecture is None else self.architecture.sample(rng)
            if self.is_new(values, genome):
                return self.propose(values, genome)
            if self.architecture is None or not self.space.is_allowed(values):
                values = self.space.sample(rng)
        last = self.last_point()
        if last is None:
            self.is_exhausted = True
            return None
        return self.propose(last)

    def propose(self, values: Mapping[str, Any], genome: Genome = None, change: str = "") -> Proposal:
        proposal = super().propose(values, genome, change)
        self.is_exhausted = self.num_points is not None and self.num_asked >= self.num_points
        return proposal


class SobolPoints:
    """The points of a scrambled Sobol sequence by their number; only the last used block is kept."""

    def __init__(self, num_dimensions: int, seed: int) -> None:
        self.num_dimensions, self.seed = num_dimensions, seed
        self._block = -1
        self._points = np.empty((0, num_dimensions))

    def __getitem__(self, index: int) -> np.ndarray:
        """Return the n-th point: [num_dimensions], in [0, 1)."""
        block, place = divmod(index, _BLOCK)
        if block != self._block:
            engine = qmc.Sobol(self.num_dimensions, scramble=True, rng=rng_of(self.seed, 0x50B01))
            if block:
                engine.fast_forward(block * _BLOCK)
            self._block, self._points = block, engine.random(_BLOCK)
        point: np.ndarray = self._points[place]
        return point
