"""The search in virtual time: it counts time, workers and steps, and its journal can be replayed."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from orchestray.search.methods.base import Continue, Decision, Finished, Method, Pause, Proposal, Report, Stop
from orchestray.search.methods.hyper.random import Random
from orchestray.search.simulation.virtual_time import simulate
from orchestray.search.spaces.dimensions import Uniform
from support.replayed import replay

SPACE = {"x": Uniform(0.0, 1.0)}


class Halves(Method):
    """A method that holds the first trial until the second has reported, and then stops it."""

    def __init__(self) -> None:
        super().__init__(space=SPACE, trials=2, steps_per_trial=4)
        self.asked = 0
        self.told: list[Finished] = []
        self.freed: list[tuple[int, Decision]] = []

    def ask(self) -> Proposal:
        self.asked += 1
        return Proposal(self.asked - 1, {"x": 0.5})

    def next_report(self, trial: int, step: int) -> int:
        return step + 2

    def report(self, report: Report) -> Decision:
        if report.trial == 0:
            return Pause()
        if report.step == 2:
            self.freed = [(0, Stop("held"))]
        return Continue()

    def released(self) -> Sequence[tuple[int, Decision]]:
        freed, self.freed = self.freed, []
        return freed

    def tell(self, finished: Finished) -> None:
        self.told.append(finished)

    @property
    def is_done(self) -> bool:
        return self.asked == 2


def test_time_is_that_of_the_busiest_worker_and_steps_are_counted_once() -> None:
    method = Random(space=SPACE, trials=4, steps_per_trial=10)
    searched = simulate(method, lambda proposal, _step: float(proposal.trial), workers=2)
    assert searched.makespan_s == 20
    assert searched.busy_s == 40
    assert searched.steps == 40
    assert searched.best.proposal.trial == 3
    assert searched.best_so_far() == [0, 1, 2, 3]


def test_a_held_trial_has_no_worker_and_ends_when_it_is_released() -> None:
    method = Halves()
    searched = simulate(method, lambda _proposal, step: float(step))
    assert [(told.trial, told.status, told.step) for told in method.told] == [(0, "stopped", 2), (1, "succeeded", 4)]
    assert searched.makespan_s == 6


def test_a_trial_that_raises_has_failed_and_the_search_goes_on() -> None:
    def evaluate(proposal: Proposal, _step: int) -> float:
        if proposal.trial == 1:
            raise ValueError("diverged")
        return 1.0

    searched = simulate(Random(space=SPACE, trials=3), evaluate)
    assert [trial.status for trial in searched.trials.values()] == ["succeeded", "failed", "succeeded"]


def test_a_replay_accepts_the_same_method_and_refuses_another() -> None:
    calls = simulate(Random(space=SPACE, trials=3, seed=1), lambda _proposal, _step: 0.0).calls
    replay(Random(space=SPACE, trials=3, seed=1), calls)
    with pytest.raises(AssertionError, match="call 0"):
        replay(Random(space=SPACE, trials=3, seed=2), calls)
