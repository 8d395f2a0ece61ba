"""Bayesian optimisation: a model of the score chooses the next trial."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

from orchestray.platform.errors import ConfigError
from orchestray.search.methods.base import Finished, Observation, Proposal, rng_of
from orchestray.search.methods.hyper.encoding import Encoded, Encoder
from orchestray.search.methods.hyper.history import History
from orchestray.search.methods.hyper.proposer import MAX_DRAWS, Proposer
from orchestray.search.methods.hyper.random import SobolPoints
from orchestray.search.methods.hyper.surrogates import Candidate, GaussianProcessModel
from orchestray.search.methods.hyper.tpe import ParzenModel
from orchestray.search.methods.space import Space


class Bayesian(Proposer):
    """Sequential model-based optimisation: points spread evenly, then the best points of a model of the score.

    `gaussian_process` maximises the expected improvement (Jones et al., 1998) under a Gaussian process. Running trials
    count with the predicted or the worst score (kriging believer and constant liar of Ginsbourger et al., 2010),
    so that concurrent trials differ. `tpe` models the densities of good and bad
    points, and proposes points that are likelier among the good (Bergstra et al., 2011).

    Trials may have to keep bounds. Then `gaussian_process` multiplies the expected improvement on the best feasible
    trial by the probability that a point keeps them (Gardner et al., 2014). `tpe` orders the trials feasible first,
    then by violation.

    Numbers, integers, choices and architectures can be searched together. No point is proposed twice; the search ends
    when all are known. Not order-free: a proposal depends on the trials that have ended.
    """

    def __init__(
        self,
        *,
        model: Literal["gaussian_process", "tpe"] = "gaussian_process",
        initial: int | None = None,
        pending: Literal["believer", "liar"] = "believer",
        **arguments: Any,
    ) -> None:
        """Take the parameters of `params.Bayesian` and the arguments of `Method`; `tpe` counts running trials as bad.

        Raises:
            ConfigError: `initial` is below 2.
        """
        super().__init__(**arguments)
        self.encoder = Encoder(self.space, self.architecture is not None)
        self.initial = initial if initial is not None else (10 if model == "tpe" else 2 * self.encoder.num_groups + 2)
        if self.initial < 2:
            raise ConfigError(f"search.method.initial: must be >= 2, got {self.initial}")
        self._make_model: Callable[..., GaussianProcessModel | ParzenModel] = (
            ParzenModel if model == "tpe" else partial(GaussianProcessModel, is_liar=pending == "liar")
        )
        self._ended: list[Observation] = []
        """All that `history` holds, as values: a wider space has other places for them."""
        self._running: dict[int, tuple[Proposal, Encoded]] = {}
        self.num_by_model = 0
        """Number of trials that the model has proposed."""
        self._forget()
        self._spread = SobolPoints(len(self.space), self.seed) if self.space else None

    def tally(self) -> Mapping[str, Any]:
        return {"by_model": self.num_by_model}

    def _forget(self) -> None:
        """Begin with a model and a history that know nothing."""
        self.model: GaussianProcessModel | ParzenModel = self._make_model(self.encoder, self.architecture, self.seed)
        self.history = History(len(self.encoder.numeric), len(self.encoder.unordered))

    def _know(self, trial: Observation) -> None:
        self._ended.append(trial)
        point = self.encoder.encode(trial.changes, trial.genome)
        scores = trial.scores if len(trial.scores) > 1 else (trial.score,)
        is_known = trial.is_trained and not math.isnan(trial.score)
        self.history.add(point, trial.genome, scores if is_known else (), trial.violations)

    def learn(self, observations: Sequence[Observation]) -> bool:
        """Take in trials of earlier searches; their points are not proposed again, unless to begin with."""
        for one in observations:
            self._know(one)
            self._learnt.add(self.key(one.changes, one.genome))
        return True

    def widen(self, space: Space) -> bool:
        """Continue over a wider space: all trials so far are encoded again, and the model is fitted from scratch."""
        self.space = space
        self.encoder = Encoder(self.space, self.architecture is not None)
        self.is_exhausted = False
        self._forget()
        ended, self._ended = self._ended, []
        for one in ended:
            self._know(one)
        running = [proposal for proposal, _ in self._running.values()]
        self._running = {one.trial: (one, self.encoder.encode(one.changes, one.genome)) for one in running}
        return True

    def ask(self) -> Proposal | None:
        if self.is_done:
            return None
        if self.num_points is not None and self.num_asked >= self.num_points:
            self.is_exhausted = True
            return None
        candidate = self._by_model() if len(self.history) >= self.initial and not self.is_beginning else None
        self.num_by_model += candidate is not None
        candidate = candidate or self._spread_out()
        if candidate is None:
            self.is_exhausted = True
            return None
        proposal = self.propose(candidate.values, candidate.genome)
        self._running[proposal.trial] = proposal, self.encoder.encode(proposal.changes, proposal.genome)
        return proposal

    def _by_model(self) -> Candidate | None:
        """Return the best new point of the model; None if all its candidates are known."""
        points = [point for _, point in self._running.values()]
        candidates = self.model.propose(self.num_asked, self.history, points)
        return next((point for point in candidates if self.is_new(point.values, point.genome)), None)

    def _spread_out(self) -> Candidate | None:
        """Return the next point of a Sobol sequence, with a random genome; known points are replaced by random ones."""
        rng = rng_of(self.seed, self.num_asked)
        for draw in range(MAX_DRAWS):
            units = rng.random(len(self.space))
            if self._spread is not None and draw == 0:
                units = self._spread[self.num_asked]
            values = self.space.from_units(units)
            if draw == 0 or self.architecture is not None:
                values = self.begun(values)
            genome = None if self.architecture is None else self.architecture.sample(rng)
            if self.is_new(values, genome) or (draw == 0 and self.may_begin(values, genome)):
                return Candidate(values, genome)
        last = self.last_point()
        return None if last is None else Candidate(last, None)

    def tell(self, finished: Finished) -> None:
        proposal, _ = self._running.pop(finished.trial)
        if finished.status == "failed" or finished.score is None:
            self._know(Observation(proposal.changes, proposal.genome, math.nan))
        else:
            is_trained = finished.step > 0 or finished.violation == 0
            told = finished.score, finished.scores, finished.violations
            self._know(Observation(proposal.changes, proposal.genome, *told, is_trained))
