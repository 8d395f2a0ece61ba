"""Asynchronous successive halving: Li et al., A System for Massively Parallel Hyperparameter Tuning, 2020."""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from orchestray.platform.errors import ConfigError
from orchestray.search.methods.base import Continue, Decision, Finished, Pause, Proposal, Report, Stop, rng_of
from orchestray.search.methods.hyper.stopping import EarlyStopping

_BRACKET_DRAW = 0xA54A


@dataclass
class Rung:
    """A number of steps at which trials report and wait for promotion."""

    steps: int
    ordered: list[tuple[tuple[float, float], int]] = field(default_factory=list)
    """((violation, -score), trial) of all trials that reported here, the best first."""
    waiting: set[int] = field(default_factory=set)

    def promotable(self, eta: int) -> list[int]:
        """Return the trials of the best 1/eta that still wait, the best first (Algorithm 2, lines 12 to 16)."""
        best = self.ordered[: len(self.ordered) // eta]
        return [trial for _, trial in best if trial in self.waiting]

    def hopeless(self, eta: int, num_at_most: int) -> list[int]:
        """Return the waiting trials outside the best 1/eta if `num_at_most` reach the rung, all new ones worse."""
        return [trial for _, trial in self.ordered[num_at_most // eta :] if trial in self.waiting]


class Asha(EarlyStopping):
    """Successive halving that trains a trial `eta` times as far once it is among the best 1/eta of its rung.

    The promotion rule is the paper's (Algorithm 2). After every report, the best floor(n / eta) of the n trials that
    have reached a rung are promoted, before new trials begin. No trial waits for a rung to fill. So of N trials at
    least floor(N / eta^k) reach rung k. It is exactly this number if no better trial arrives after a worse one was
    promoted. Otherwise it is a few more, of the order of the square root of N (section 3.2). Waiting trials are held
    without a process. They are stopped as soon as they cannot be promoted even if all later trials are worse.

    Rung k of bracket s is at grace_steps * eta^(s+k) steps. A rung beyond which less than 1/eta of that is left of a
    trial is left out. A trial promoted from the last rung is trained to its end. Not order-free: promotions depend on
    the order of reports.
    """

    def __init__(self, *, eta: int = 4, grace_steps: int | None = None, brackets: int = 1, **arguments: Any) -> None:
        """Take the parameters of `params.Asha` and the arguments of `EarlyStopping`.

        The default of `grace_steps` stays the same if more trials are allowed later. A trial's bracket is drawn so that
        each bracket trains about the same number of steps.

        Raises:
            ConfigError: eta is below 2, or no rung is below `steps_per_trial`.
        """
        super().__init__(**arguments)
        if eta < 2:
            raise ConfigError(f"search.method.eta: must be >= 2, got {eta}")
        self.eta = eta
        self.grace_steps = grace_steps if grace_steps is not None else self._usual_grace_steps()
        self.check_steps(grace_steps=self.grace_steps)
        rungs = [Rung(steps) for steps in _rung_steps(self.grace_steps, eta, self.steps_per_trial)]
        if not 1 <= brackets <= max(len(rungs), 1):
            raise ConfigError(f"search.method.brackets: there are {len(rungs)} rungs, so 1 to {len(rungs)} brackets")
        self.brackets = [[Rung(rung.steps) for rung in rungs[first:]] for first in range(brackets)]
        """The rungs of each bracket, the lowest first."""
        self._weights = [float(eta) ** -first for first in range(brackets)]
        self._bracket: dict[int, int] = {}
        """Bracket of each trial that has not ended."""
        self._rung: dict[int, int] = {}
        """Rung at which each trial that has not ended waits, or to which it is trained."""
        self._num_at = [[0] * (len(rungs) + 1) for rungs in self.brackets]
        """Number of these trials by bracket and rung; the last is the end of a trial."""
        self._num_asked = 0
        self._held = 0
        self._ahead: Proposal | None = None

    def _usual_grace_steps(self) -> int:
        enough = 3 if self.trials is None else min(3, int(math.log(max(self.trials, 1), self.eta) + 1e-9))
        return max(1, self.steps_per_trial // int(self.eta ** max(enough, 1)))

    def cautions(self) -> Sequence[str]:
        rungs, others = len(self.brackets[0]), super().cautions()
        if self.trials is None or self.trials >= self.eta**rungs:
            return others
        fewer = int(math.log(self.trials, self.eta) + 1e-9)
        enough = math.ceil(self.steps_per_trial / self.eta**fewer)
        return (
            *others,
            f"one trial in {self.eta} goes on from each of {rungs} rungs, so of {self.trials} perhaps none is trained "
            f"for all {self.steps_per_trial} steps; raise search.budget.trials to {self.eta**rungs}"
            + (f" or search.method.grace_steps to {enough}" if fewer else ""),
        )

    # -- a trial's way -------------------------------------------------------------------------------------------------

    def ask(self) -> Proposal | None:
        proposal, self._ahead = self._ahead or super().ask(), None
        if proposal is None:
            return None
        draws = rng_of(self.seed, _BRACKET_DRAW, proposal.trial)
        weights = [weight / sum(self._weights) for weight in self._weights]
        self._bracket[proposal.trial] = int(draws.choice(len(weights), p=weights)) if len(weights) > 1 else 0
        self._rung[proposal.trial] = 0
        self._num_at[self._bracket[proposal.trial]][0] += 1
        self._num_asked += 1
        return proposal

    @property
    def is_done(self) -> bool:
        return self._ahead is None and super().is_done

    def milestone(self, trial: int, step: int) -> int:
        rungs = self.brackets[self._bracket[trial]]
        return next((rung.steps for rung in rungs[self._rung[trial] :] if rung.steps > step), self.budget(trial))

    def judge(self, report: Report) -> Decision:
        rungs, place = self.brackets[self._bracket[report.trial]], self._rung[report.trial]
        if report.step >= self.budget(report.trial) or place >= len(rungs) or report.step < rungs[place].steps:
            return Continue()
        insort(rungs[place].ordered, ((report.violation, -report.score), report.trial))
        rungs[place].waiting.add(report.trial)
        self._held += 1
        return Pause()

    def report(self, report: Report) -> Decision:
        decision = super().report(report)
        if not isinstance(decision, Pause):  # the inner method has decided otherwise
            self._leave(report.trial)
        return decision

    def ended(self, finished: Finished) -> Finished:
        if finished.trial in self._bracket:
            self._forget(finished.trial)
        return finished

    def _forget(self, trial: int) -> None:
        """Forget a trial that has ended."""
        self._leave(trial)
        self._num_at[self._bracket.pop(trial)][self._rung.pop(trial)] -= 1

    def _leave(self, trial: int) -> None:
        """Remove a trial from the waiting ones of its rung."""
        rungs, place = self.brackets[self._bracket[trial]], self._rung[trial]
        if place < len(rungs) and trial in rungs[place].waiting:
            rungs[place].waiting.discard(trial)
            self._held -= 1

    # -- who goes on ---------------------------------------------------------------------------------------------------

    def released(self) -> Sequence[tuple[int, Decision]]:
        decisions: list[tuple[int, Decision]] = list(super().released())
        for rungs in self.brackets:
            for place in reversed(range(len(rungs))):  # the highest rung first, as in the paper
                decisions += [(trial, self._promote(trial)) for trial in rungs[place].promotable(self.eta)]
        decisions += self._stopped()
        if not decisions and self._is_stalled():
            # The inner method may have found only now that it has no more to propose.
            decisions += self._stopped() if self.is_done else [self._make_room()]
        return decisions

    def _stopped(self) -> list[tuple[int, Decision]]:
        """Stop the trials that cannot be promoted any more."""
        decisions: list[tuple[int, Decision]] = []
        for number, rungs in enumerate(self.brackets):
            for place, rung in enumerate(rungs):  # the lowest first: a stopped trial reaches no higher rung
                decisions += [(trial, self._stop(rung, trial)) for trial in self._hopeless(number, place)]
        return decisions

    def _promote(self, trial: int) -> Decision:
        self._leave(trial)
        counts, place = self._num_at[self._bracket[trial]], self._rung[trial]
        counts[place] -= 1
        counts[place + 1] += 1
        self._rung[trial] = place + 1
        return Continue()

    def _stop(self, rung: Rung, trial: int) -> Decision:
        self._forget(trial)
        return Stop(f"not among the best 1/{self.eta} at step {rung.steps}")

    def _hopeless(self, bracket: int, place: int) -> list[int]:
        """Return the trials that wait at a rung and cannot be promoted, whatever later trials report."""
        rung = self.brackets[bracket][place]
        if not rung.waiting or not (self.proposer.is_done or self.trials is not None):
            return []
        unasked = 0 if self.is_done else max((self.trials or 0) - self._num_asked, 0)
        below = sum(self._num_at[bracket][: place + 1]) - len(rung.waiting)
        return rung.hopeless(self.eta, len(rung.ordered) + unasked + below)

    def _is_stalled(self) -> bool:
        """Return True if all trials wait here, and the inner method proposes no other now, or never again."""
        if not self._held or self._held < len(self._bracket) or self._ahead is not None:
            return False
        self._ahead = super().ask()
        return self._ahead is None

    def _make_room(self) -> tuple[int, Decision]:
        """Stop the worst trial of the lowest rung with waiting trials, or promote the only waiting one.

        So the best of each generation of the inner method is trained further.
        """
        rung = next(rung for place in range(len(self.brackets[0])) for rung in self._level(place) if rung.waiting)
        trial = next(trial for _, trial in reversed(rung.ordered) if trial in rung.waiting)
        return trial, self._promote(trial) if self._held == 1 else self._stop(rung, trial)

    def _level(self, place: int) -> list[Rung]:
        return [rungs[place] for rungs in self.brackets if place < len(rungs)]


def _rung_steps(grace_steps: int, eta: int, steps_per_trial: int) -> list[int]:
    """Return the steps of the rungs below the end of a trial.

    After the last one a trial has at least 1/eta of its steps so far to go: to stop it earlier would save next to
    nothing, and leave the best one short of its end. The first rung is there in any case.
    """
    num_rungs = max(0, math.ceil(math.log(steps_per_trial / grace_steps, eta) - 1e-9))
    rungs = [grace_steps * eta**rung for rung in range(num_rungs)]
    return [rung for rung in rungs if rung == grace_steps or steps_per_trial * eta >= rung * (eta + 1)]
