"""What the methods share that end hopeless trials early: another method proposes, they decide who goes on."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from orchestray.platform.config.search.stopping import why_not_within
from orchestray.platform.errors import ConfigError
from orchestray.search.methods.base import Continue, Decision, Finished, Method, Proposal, Report
from orchestray.search.methods.registry import METHODS, make_method


class EarlyStopping(Method):
    """A method around another one, `proposer`, which says what is tried and hears how it ended.

    What the inner method decides of a trial of its own accord (anything but `Continue`) goes before what this one
    would: an evolution inside still steers its own trials. A trial that is stopped early is told to
    the inner method with the score it had.
    """

    def __init__(self, *, proposals: Mapping[str, Any] | None = None, **arguments: Any) -> None:
        """
        Args:
            proposals: the inner method as a config says it, `type` and parameters; None: `{type: random}`.
            arguments: those of `Method`.

        Raises:
            ConfigError: the inner method is not there, cannot search this space, or its trials must not be stopped.
        """
        super().__init__(**arguments)
        inner = {"type": "random", **dict(proposals or {})}
        if inner["type"] not in METHODS:
            raise ConfigError(
                f"search.method.proposals.type: there is no method {inner['type']!r}; there are "
                f"{', '.join(sorted(METHODS))}"
            )
        reason = why_not_within(inner["type"])
        if reason is not None:
            raise ConfigError(f"search.method.proposals: {reason}")
        self.proposer = make_method(**inner, **arguments)
        self._budgets: dict[int, int] = {}

    # -- what others need ----------------------------------------------------------------------------------------------

    def milestone(self, trial: int, step: int) -> int:
        """The step after `step` at which this method wants a report; at most the budget is used of it."""
        return self.budget(trial)

    def judge(self, report: Report) -> Decision:
        """What this method would do with a trial that reports before its end."""
        return Continue()

    def ended(self, finished: Finished) -> Finished:
        """Hear of an end; returns what the inner method is to hear of it."""
        return finished

    # -- as a method ---------------------------------------------------------------------------------------------------

    def budget(self, trial: int) -> int:
        """Steps of a trial in all."""
        return self._budgets.get(trial, self.steps_per_trial)

    def ask(self) -> Proposal | None:
        proposal = self.proposer.ask()
        if proposal is not None and proposal.steps is not None:
            self._budgets[proposal.trial] = proposal.steps
        return proposal

    def allow(self, trials: int | None) -> None:
        super().allow(trials)
        self.proposer.allow(trials)

    def next_report(self, trial: int, step: int) -> int:
        return min(self.proposer.next_report(trial, step), max(self.milestone(trial, step), step + 1))

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
