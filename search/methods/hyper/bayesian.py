"""Bayesian optimisation: a model of the score says what to try next."""

from __future__ import annotations

from typing import Any, Literal

from orchestray.platform.errors import ConfigError
from orchestray.search.methods.base import Finished, Proposal, rng_of
from orchestray.search.methods.hyper.encoding import Encoded, Encoder
from orchestray.search.methods.hyper.history import History
from orchestray.search.methods.hyper.proposer import MAX_DRAWS, Proposer
from orchestray.search.methods.hyper.random import SobolPoints
from orchestray.search.methods.hyper.surrogates import Candidate, GaussianProcessModel
from orchestray.search.methods.hyper.tpe import ParzenModel
from orchestray.search.spaces.base import Genome
from orchestray.search.spaces.dimensions import from_units


class Bayesian(Proposer):
    """Sequential model-based optimisation: begins with points spread evenly, then tries what a model of the score
    thinks best, again and again.

    `gaussian_process` maximises the expected improvement (Jones et al., 1998) under a Gaussian process; trials that run
    already count with the score the model predicts for them (the kriging believer of Ginsbourger et al., 2010) or with
    the worst there is (their constant liar), so that workers side by side try different things. `tpe` models where good
    and bad points lie, and tries what is likelier among the good (Bergstra et al., 2011).

    Numbers, integers, choices and architectures can be searched together. No point is proposed twice; when there is no
    new one the search ends. Not order-free: a proposal depends on which trials had ended.
    """

    def __init__(
        self,
        *,
        model: Literal["gaussian_process", "tpe"] = "gaussian_process",
        initial: int | None = None,
        pending: Literal["believer", "liar"] = "believer",
        **arguments: Any,
    ) -> None:
        """
        Args:
            model: of the score.
            initial: trials before the model is used; None: twice the number of dimensions plus 2, or 10 for `tpe`.
            pending: how trials that run count for the Gaussian process; of `tpe` they are among the bad.
            arguments: those of `Method`.

        Raises:
            ConfigError: `initial` is below 2.
        """
        super().__init__(**arguments)
        self.encoder = Encoder(self.space, self.architecture is not None)
        self.initial = initial if initial is not None else (10 if model == "tpe" else 2 * self.encoder.num_groups + 2)
        if self.initial < 2:
            raise ConfigError(f"search.method.initial: must be >= 2, got {self.initial}")
        self.model: GaussianProcessModel | ParzenModel = (
            ParzenModel(self.encoder, self.architecture, self.seed)
            if model == "tpe"
            else GaussianProcessModel(self.encoder, self.architecture, self.seed, is_liar=pending == "liar")
        )
        self.history = History(len(self.encoder.numeric), len(self.encoder.unordered))
        self._spread = SobolPoints(len(self.space), self.seed) if self.space else None
        self._pending: dict[int, tuple[Encoded, Genome]] = {}

    def ask(self) -> Proposal | None:
        if self.is_done:
            return None
        if self.num_points is not None and self.num_asked >= self.num_points:
            self.is_exhausted = True
            return None
        candidate = self._by_model() if len(self.history) >= self.initial else None
        candidate = candidate or self._spread_out()
        if candidate is None:
            self.is_exhausted = True
            return None
        proposal = self.propose(candidate.values, candidate.genome)
        self._pending[proposal.trial] = (self.encoder.encode(candidate.values, candidate.genome), candidate.genome)
        return proposal

    def _by_model(self) -> Candidate | None:
        """The best new point of the model; None if all it thinks of are known."""
        points = [point for point, _ in self._pending.values()]
        candidates = self.model.propose(self.num_asked, self.history, points)
        return next((point for point in candidates if not self.is_known(point.values, point.genome)), None)

    def _spread_out(self) -> Candidate | None:
        """The next point of a Sobol sequence, with a drawn genome; drawn anew while it is known."""
        rng = rng_of(self.seed, self.num_asked)
        for draw in range(MAX_DRAWS):
            units = rng.random(len(self.space))
            if self._spread is not None and draw == 0:
                units = self._spread[self.num_asked]
            values = from_units(self.space, list(units))
            genome = None if self.architecture is None else self.architecture.sample(rng)
            if not self.is_known(values, genome):
                return Candidate(values, genome)
        return self._last_points()

    def _last_points(self) -> Candidate | None:
        """The first point, in the order of the grid, that is not known; None if they cannot be counted."""
        if self.num_points is None:
            return None
        indices = [0] * len(self.space)
        every = [dimension.all_values() or [] for dimension in self.space.values()]
        while True:
            values = {key: axis[index] for key, axis, index in zip(self.space, every, indices, strict=True)}
            if not self.is_known(values):
                return Candidate(values, None)
            for place in reversed(range(len(indices))):
                indices[place] = (indices[place] + 1) % len(every[place])
                if indices[place]:
                    break

    def tell(self, finished: Finished) -> None:
        point, genome = self._pending.pop(finished.trial)
        self.history.add(point, genome, None if finished.status == "failed" else finished.score)
