"""The base of the methods that stop hopeless trials of another method early."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from orchestray.platform.errors import ConfigError
from orchestray.search.methods.base import Continue, Decision, Finished, Method, Observation, Proposal, Report
from orchestray.search.methods.hyper.random import Random
from orchestray.search.methods.space import Space


class EarlyStopping(Method):
    """A method around another one, `proposer`, which proposes the trials and receives their ends.

    A decision of the inner method other than `Continue` takes precedence: an evolution inside still steers its own
    trials. The inner method receives a trial that was stopped early with its score so far.
    """

    takes_proposer = True

    def __init__(self, *, proposer: Method | None = None, **arguments: Any) -> None:
        """
        Args:
            proposer: the inner method, for the same space and budget; None: random points.
            arguments: those of `Method`.
        """
        super().__init__(**arguments)
        self.proposer = Random(**arguments) if proposer is None else proposer
        self._budgets: dict[int, int] = {}

    def check_steps(self, **given: int) -> None:
        """Check parameters of a method that are steps before the end of a trial: later ones would stop nothing.

        Raises:
            ConfigError: names the one that is out of its range.
        """
        for name, steps in given.items():
            if not 1 <= steps < max(self.steps_per_trial, 2):
                raise ConfigError(
                    f"search.method.{name}: must be at least 1 and below the {self.steps_per_trial} steps of a trial, "
                    f"got {steps}"
                )

    # -- what others need ----------------------------------------------------------------------------------------------

    def milestone(self, trial: int, step: int) -> int:
        """Return the step after `step` at which this method needs a report; the budget limits it."""
        return self.budget(trial)

    def judge(self, report: Report) -> Decision:
        """Return the decision of this method on a trial that reports before its end."""
        return Continue()

    def ended(self, finished: Finished) -> Finished:
        """Record the end of a trial, and return the end that the inner method receives."""
        return finished

    # -- as a method ---------------------------------------------------------------------------------------------------

    def budget(self, trial: int) -> int:
        """Return the total number of steps of a trial."""
        return self._budgets.get(trial, self.steps_per_trial)

    def ask(self) -> Proposal | None:
        proposal = self.proposer.ask()
        if proposal is not None and proposal.steps is not None:
            self._budgets[proposal.trial] = proposal.steps
        return proposal

    def cautions(self) -> Sequence[str]:
        return self.proposer.cautions()

    def tally(self) -> Mapping[str, Any]:
        return self.proposer.tally()

    def begin_with(self, start: Sequence[Mapping[str, Any]]) -> bool:
        return self.proposer.begin_with(start)

    def learn(self, observations: Sequence[Observation]) -> bool:
        return self.proposer.learn(observations)

    def widen(self, space: Space) -> bool:
        self.space = space
        return self.proposer.widen(space)

    def allow(self, trials: int | None) -> None:
        super().allow(trials)
        self.proposer.allow(trials)

    def next_report(self, trial: int, step: int) -> int:
        return min(self.proposer.next_report(trial, step), self.milestone(trial, step))

    def report(self, report: Report) -> Decision:
        inner = self.proposer.report(report)
        own = self.judge(report)
        return own if isinstance(inner, Continue) else inner

    def tell(self, finished: Finished) -> None:
        self._budgets.pop(finished.trial, None)
        self.proposer.tell(self.ended(finished))

    def released(self) -> Sequence[tuple[int, Decision]]:
        return self.proposer.released()

    def genome_of(self, proposal: Proposal) -> Any:
        return self.proposer.genome_of(proposal)

    @property
    def hands_on(self) -> bool:
        return self.proposer.hands_on

    @property
    def has_program(self) -> bool:
        return self.proposer.has_program

    def parents(self) -> Collection[int]:
        return self.proposer.parents()

    @property
    def is_done(self) -> bool:
        return self.proposer.is_done
