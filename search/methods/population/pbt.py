"""Population-based training (Jaderberg et al. 2017, "Population Based Training of Neural Networks", algorithm 1)."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from orchestray.platform.errors import ConfigError
from orchestray.search.methods.base import (
    Continue,
    Decision,
    Exploit,
    Finished,
    Method,
    PackedMember,
    Pause,
    Proposal,
    Report,
    merit,
    rng_of,
)
from orchestray.search.methods.population import packing
from orchestray.search.methods.population.exploit import ExploitRule, choose_source
from orchestray.search.methods.population.explore import Explore, describe_changes, explored
from orchestray.search.methods.population.time_sharing import Turns

if TYPE_CHECKING:
    from orchestray.search.methods.space import Space
    from orchestray.trainers.config.schema import TrainConfig

_INITIAL, _SURVIVOR, _EXPLOIT, _EXPLORE = range(4)
"""Purposes of random numbers."""


@dataclass
class Member:
    """The last report of one model of the population."""

    changes: Mapping[str, Any]
    step: int = 0
    score: float | None = None
    violation: float = 0.0
    """Sum of the bounds that it breaks; 0 if it is feasible."""
    evaluations: deque[float] = field(default_factory=deque)
    num_reports: int = 0
    """Number of reports since it began; its draws depend on it."""
    must_copy: int | None = None
    """Trial to copy before the first step, if the member replaces one whose process failed."""
    is_copy: bool = False
    """True if it has copied another since its last report: its score is that of the other."""


class PopulationBasedTraining(Method):
    """A population that trains, copies its winners and perturbs their hyper-parameters.

    A trial is a member. Every `interval_steps` steps it looks at the others (exploit) and may become a copy of a better
    one, with weights, optimizer, position and hyper-parameters; the hyper-parameters are then changed (explore). The
    copy has the other's state at its last report, whose score was compared.

    Asynchronous members do not wait. Each is compared with the last reports of the others, so the outcome depends on
    the order of reports. If members outnumber the processes they take turns; the one furthest behind goes first. A copy
    is not copied before it has reported. Otherwise two members whose scores fall would hand the better state of an
    earlier step to each other for ever.
    Synchronous members wait at the end of an interval until all have reported, and all decide from the same scores. The
    outcome is then the same at any concurrency, as long as no process fails.

    A member whose process failed is replaced, in a new trial, by a copy of a random member among the remaining ones.
    There are at most `population` replacements, and none before a member has reported.
    """

    def __init__(
        self,
        *,
        population: int = 8,
        interval_steps: int = 50,
        exploit: ExploitRule = "truncation",
        fraction: float = 0.2,
        p: float = 0.05,
        evaluations: int = 10,
        explore: Explore = "perturb",
        factors: Sequence[float] = (0.8, 1.2),
        resample_probability: float = 0.25,
        initial: Sequence[Mapping[str, Any]] = (),
        synchronous: bool = False,
        packed: bool = False,
        **arguments: Any,
    ) -> None:
        """Take the parameters of `params.PopulationBasedTraining` and the arguments of `Method`.

        Replacements of members whose processes failed do not count towards `trials`.

        Raises:
            ConfigError: an argument is missing, or two do not fit each other.
        """
        super().__init__(**arguments)
        _check(self, population, interval_steps, initial, packed=packed)
        self.population, self.interval_steps = population, interval_steps
        self._exploit, self._fraction, self._p, self._num_evaluations = exploit, fraction, p, evaluations
        self._explore, self._factors, self._resample_probability = explore, tuple(factors), resample_probability
        self._initial = [dict(values) for values in initial]
        self._synchronous, self._packed = synchronous, packed
        self._objective: dict[str, str] | None = None
        self.is_order_free = synchronous or packed  # type: ignore[misc]  # only where all wait for all, or are in one
        self.members: dict[int, Member] = {}
        """All proposed members, by trial; ended ones keep their last report."""
        self._alive: set[int] = set()
        self._num_missing = 0
        """Number of members whose processes failed and that have not been replaced yet."""
        self._replacements_left = population
        self._turns = Turns()
        self._in_one: tuple[PackedMember, ...] = ()
        """The members of a packed population."""

    @property
    def hands_on(self) -> bool:
        return True

    @property
    def has_program(self) -> bool:
        return self._packed

    def members_of(self, trial: int) -> Sequence[PackedMember]:
        return self._in_one

    def check_base(self, base: TrainConfig) -> None:
        if self._packed:
            packing.check_config(base, list(self.space))

    def judge_by(self, metric: str, mode: str) -> None:
        self._objective = {"metric": metric, "mode": mode}

    def begin_with(self, start: Sequence[Mapping[str, Any]]) -> bool:
        """Begin the first members with these values.

        Raises:
            ConfigError: there are more of them than members, or `initial` says it already.
        """
        if self._initial:
            raise ConfigError("search.start: says the same as search.method.initial; name the values in one of them")
        if len(start) > self.population:
            raise ConfigError(
                f"search.start: has {len(start)} trials, and the population {self.population} members; raise "
                "search.method.population"
            )
        self._initial = [dict(values) for values in start]
        return True

    def widen(self, space: Space) -> bool:
        self.space = space
        return not self._packed

    def ask(self) -> Proposal | None:
        if self._packed:
            return self._ask_packed()
        number = len(self.members)
        if number < self.population:
            return self._proposed(Proposal(number, changes=self._first_values(number), change="drawn"))
        if self._num_missing:
            donors = self._donors()
            if donors:
                self._num_missing -= 1
                source = int(rng_of(self.seed, _SURVIVOR, number).choice(donors))
                changes = dict(self.members[source].changes)
                text = f"in place of a member whose process failed: a copy of trial {source}"
                proposal = Proposal(number, changes=changes, parent=source, change=text)
                return self._proposed(proposal, must_copy=source)
        self._turns.idle()
        return None

    def _ask_packed(self) -> Proposal | None:
        if self.members:
            return None
        self.members[0] = Member({})
        self._alive.add(0)
        arguments = packing.arguments(
            self.space,
            initial=self._initial_values(),
            seed=self.seed,
            population=self.population,
            interval_steps=self.interval_steps,
            exploit=self._exploit,
            fraction=self._fraction,
            p=self._p,
            evaluations=self._num_evaluations,
            explore=self._explore,
            factors=self._factors,
            resample_probability=self._resample_probability,
            objective=self._objective,
        )
        return Proposal(0, program=packing.PROGRAM, arguments=arguments, change=f"{self.population} members in one")

    def _initial_values(self) -> list[dict[str, Any]]:
        return [self._first_values(number) for number in range(self.population)]

    def _first_values(self, number: int) -> dict[str, Any]:
        rng = rng_of(self.seed, _INITIAL, number)
        given = self._initial[number] if number < len(self._initial) else {}
        return self.space.begun(given, self.space.sample(rng), rng)

    def _proposed(self, proposal: Proposal, must_copy: int | None = None) -> Proposal:
        member = Member(proposal.changes, must_copy=must_copy)
        member.evaluations = deque(maxlen=self._num_evaluations)
        self.members[proposal.trial] = member
        self._alive.add(proposal.trial)
        self._turns.started()
        return proposal

    def next_report(self, trial: int, step: int) -> int:
        if self.members[trial].must_copy is not None:
            return step  # before its first step, to become what it copies
        return min((step // self.interval_steps + 1) * self.interval_steps, self.steps_per_trial)

    def report(self, report: Report) -> Decision:
        if self._packed:
            self._in_one = packing.members_after(self._in_one, self._initial_values(), report)
            return Continue()
        member = self.members[report.trial]
        member.num_reports += 1
        if member.must_copy is None:
            member.step, member.score, member.violation = report.step, _counted(report.score), report.violation
            member.is_copy = False
            member.evaluations.extend(_counted(score) for score in report.evaluations or (report.score,))
            if report.step >= self.steps_per_trial:
                return Continue()
        if self._synchronous or self._is_anybody_missing() or self._turns.is_before_its_turn(member.step):
            self._turns.hold(report.trial, member.step)
            return Pause()
        return self._go_on(report.trial, self._source(report.trial))

    def released(self) -> Sequence[tuple[int, Decision]]:
        if self._packed or self._is_anybody_missing():
            return ()
        if not self._synchronous:
            return [(trial, self._go_on(trial, self._source(trial))) for trial in self._turns.due()]
        if len(self._turns.held) < len(self._alive):
            return ()
        chosen = {trial: self._source(trial) for trial in self._turns.all()}
        # A member that is copied, and copies a third at the same time, is copied first. No two copy each other: the
        # better of the two is copied.
        return [(trial, self._go_on(trial, chosen[trial])) for trial in sorted(chosen, key=self._rank)]

    def _rank(self, trial: int) -> tuple[float, float, int]:
        """Return the sort key by which all rules compare members; those that are yet to become copies are the worst."""
        member = self.members[trial]
        if member.must_copy is not None or member.score is None:
            return float("-inf"), float("-inf"), -trial
        score = float(np.mean(member.evaluations)) if self._exploit == "t_test" else member.score
        return -member.violation, score, -trial

    def _source(self, trial: int) -> int | None:
        """Return the trial that a member copies, by the last reports of all; None if it copies none."""
        member, donors = self.members[trial], self._donors()
        if member.must_copy is not None:
            if member.must_copy in donors or not donors:
                return member.must_copy if donors else None
            return int(rng_of(self.seed, _SURVIVOR, trial, 1).choice(donors))
        reported = {other: self.members[other] for other in donors}
        scores = {other: one.score for other, one in reported.items() if one.score is not None}
        evaluations = {other: tuple(one.evaluations) for other, one in reported.items()}
        rule = self._exploit
        if any(one.violation for one in reported.values()):
            scores, evaluations = _feasible_first(reported, scores, evaluations)
            if member.violation and rule == "t_test":  # there is nothing to test: the order of merit decides
                rule = "binary_tournament"
        return choose_source(
            rule,
            trial,
            scores,
            evaluations,
            rng_of(self.seed, _EXPLOIT, trial, member.num_reports),
            sources=[other for other, one in reported.items() if not one.is_copy],
            fraction=self._fraction,
            p_value=self._p,
        )

    def _go_on(self, trial: int, source: int | None) -> Decision:
        """Copy the source, if any, and explore from it."""
        member = self.members[trial]
        member.must_copy = None
        if source is None:
            return Continue()
        copied = self.members[source]
        changes = explored(
            self._explore,
            self.space,
            copied.changes,
            rng_of(self.seed, _EXPLORE, trial, member.num_reports),
            factors=self._factors,
            resample_probability=self._resample_probability,
        )
        text = f"copied trial {source}; {describe_changes(copied.changes, changes)}"
        member.changes, member.step, member.score = changes, copied.step, copied.score
        member.violation, member.is_copy = copied.violation, True
        member.evaluations = copied.evaluations.copy()
        return Exploit(source, changes, text)

    def _donors(self) -> list[int]:
        """Return the members whose state can be copied: running trials that have reported."""
        return [trial for trial in sorted(self._alive) if self.members[trial].score is not None]

    def _is_anybody_missing(self) -> bool:
        """Return True if there is a member to propose."""
        return len(self.members) < self.population or (self._num_missing > 0 and bool(self._donors()))

    def tell(self, finished: Finished) -> None:
        self._alive.discard(finished.trial)
        self._turns.ended(finished.trial)
        if finished.status == "failed" and not self._packed and self._replacements_left > 0:
            self._replacements_left -= 1
            self._num_missing += 1

    @property
    def is_done(self) -> bool:
        if self._packed:
            return bool(self.members)
        if len(self.members) < self.population:
            return False
        return not self._alive and not (self._num_missing and self._donors())


def _counted(score: float) -> float:
    """Return the score for comparisons: diverged members are the worst."""
    return score if math.isfinite(score) else -math.inf


def _feasible_first(
    reported: Mapping[int, Member], scores: Mapping[int, float], evaluations: Mapping[int, tuple[float, ...]]
) -> tuple[dict[int, float], dict[int, tuple[float, ...]]]:
    """Return places in the order of merit as scores, and no evaluations of infeasible members: those always lose."""
    order = sorted({merit(score, reported[other].violation) for other, score in scores.items()})
    places = {other: float(order.index(merit(score, reported[other].violation))) for other, score in scores.items()}
    lost = {other: (-math.inf,) for other, one in reported.items() if one.violation}
    return places, {**evaluations, **lost}


def _check(
    method: PopulationBasedTraining, population: int, interval_steps: int, initial: Sequence[Any], *, packed: bool
) -> None:
    problems = []
    if method.architecture is not None:
        problems.append(
            "search.architecture: the members of population_based_training copy each other's weights, so all have one "
            "network; take architecture out, or use regularized_evolution"
        )
    if not method.space:
        problems.append("search.space: population_based_training has nothing to explore; name a key and its dimension")
    if method.trials is not None and population > method.trials:
        problems.append(
            f"search.method.population: {population} members are more than the {method.trials} trials of the budget; "
            f"use population: {method.trials} or budget.trials: {population}"
        )
    if interval_steps >= method.steps_per_trial > 1:
        problems.append(
            f"search.method.interval_steps: {interval_steps} leaves no step after the first look at the others; it "
            f"must be below steps_per_trial: {method.steps_per_trial}"
        )
    if packed and method.space.is_conditional:
        keys = ", ".join(method.space.conditions.when)
        problems.append(
            f"search.space: the members of a packed population have the same keys, and {keys} would be there for some "
            "only; take its when out (members then try its values everywhere), or use packed: false, which follows it"
        )
    if len(initial) > population:
        problems.append(f"search.method.initial: has {len(initial)} members, and the population {population}")
    unknown = sorted({key for values in initial for key in values if key not in method.space})
    problems += [f"search.method.initial: {key} is no key of search.space" for key in unknown]
    if problems:
        raise ConfigError(problems)
