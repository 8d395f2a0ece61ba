"""Omnivore: a grid of values that is tried again and again while one model trains."""

from __future__ import annotations

import math
from typing import Any

import pytest

from orchestray.platform.errors import ConfigError
from orchestray.search.methods.base import Continue, Exploit, Finished, Proposal, Report, Stop
from orchestray.search.methods.population.omnivore import Omnivore
from orchestray.search.methods.population.params import Omnivore as Section
from orchestray.search.methods.space import Space
from orchestray.search.registry.methods import make_method
from orchestray.search.simulation.virtual_time import Simulated, simulate
from orchestray.search.spaces.dimensions import Choice, Dimension, Integer, Uniform
from support.replayed import replay
from support.toy_choices import Layers

SPACE: dict[str, Dimension] = {"momentum": Choice((0.0, 0.3, 0.6, 0.9)), "staleness": Choice((0, 4))}
STEPS = 60


def made(**parameters: Any) -> Omnivore:
    chosen = {"space": SPACE, "steps_per_trial": STEPS, "every_steps": 20, "probe_steps": 5, **parameters}
    return Omnivore(**chosen)


class Moving:
    """A score that rises by a step the more, the nearer the momentum is to one that changes every 20 steps."""

    BEST = (0.9, 0.3, 0.6)

    def __init__(self) -> None:
        self.states: dict[int, tuple[int, float]] = {}

    def evaluate(self, proposal: Proposal, step: int) -> float:
        done, score = self.states.get(proposal.trial, (0, 0.0))
        for one in range(done, step):
            score += (
                1.0 - abs(proposal.changes["momentum"] - self.BEST[one // 20]) - 0.1 * proposal.changes["staleness"]
            )
        self.states[proposal.trial] = step, score
        return score

    def become(self, trial: int, decision: Exploit) -> None:
        self.states[trial] = self.states[decision.source]


def run(method: Omnivore, **how: Any) -> Simulated:
    toy = Moving()
    return simulate(method, toy.evaluate, on_become=toy.become, **how)


def test_at_every_interval_all_points_probe_from_one_state_and_the_best_trains_on() -> None:
    method = made()
    found = run(method, workers=3)
    assert [retune.step for retune in method.retunes] == [5, 25, 45]
    assert [retune.changes["momentum"] for retune in method.retunes] == list(Moving.BEST)
    assert all(retune.changes["staleness"] == 0 for retune in method.retunes)
    assert all(len(retune.scores) == 8 for retune in method.retunes)
    assert sorted(trial.status for trial in found.trials.values()) == ["stopped"] * 7 + ["succeeded"]


def test_a_tuned_run_beats_every_fixed_one_where_the_best_momentum_moves() -> None:
    best = run(made()).best.score or 0.0
    for momentum in (0.0, 0.3, 0.6, 0.9):
        fixed = Moving().evaluate(Proposal(0, {"momentum": momentum, "staleness": 0}), STEPS)
        assert best > fixed


class EverySeventh(Omnivore):
    """A method whose trials report at every seventh step alone, as a trainable of a user may."""

    def next_report(self, trial: int, step: int) -> int:
        return -(-super().next_report(trial, step) // 7) * 7


def test_trials_that_report_at_other_steps_probe_and_train_on_by_turns() -> None:
    method = EverySeventh(space=SPACE, steps_per_trial=STEPS, every_steps=20, probe_steps=5)
    found = run(method, workers=3)
    assert [(retune.step, len(retune.scores)) for retune in method.retunes] == [(7, 8), (28, 8), (49, 8)]
    assert sorted(trial.status for trial in found.trials.values()) == ["stopped"] * 7 + ["succeeded"]


def test_a_training_that_ends_within_a_probe_ends_with_all_its_points() -> None:
    method = made(steps_per_trial=43)
    found = run(method, workers=3)
    assert [retune.step for retune in method.retunes] == [5, 25]
    assert [(trial.status, trial.step) for trial in found.trials.values()] == [("succeeded", 43)] * 8


@pytest.mark.parametrize(("others", "winner"), [(1.0, 0), (math.nan, 3), (math.inf, 3), (-math.inf, 3)])
def test_the_first_of_equals_trains_on_and_never_one_that_diverged(others: float, winner: int) -> None:
    method = made()
    simulate(method, lambda proposal, _step: 1.0 if proposal.trial == 3 else others, on_become=lambda *_: None)
    assert [retune.winner for retune in method.retunes] == [winner] * 3


def test_where_a_condition_ends_the_one_that_trains_on_as_it_shows_its_state_no_other_begins_to_probe() -> None:
    method = made(space={"momentum": Choice((0.0, 0.9))})
    for trial in range(2):
        assert method.ask() is not None
        method.report(Report(trial, 5, float(trial)))
    assert method.released() == [(1, Continue())]
    method.report(Report(1, 20, 2.0))
    method.tell(Finished(1, "stopped", 20, 2.0))
    ((trial, decision),) = method.released()
    assert trial == 0
    assert isinstance(decision, Stop)


def test_points_that_no_trial_can_have_are_not_tried_and_as_many_trials_as_points_are_enough() -> None:
    method = made(space=Space(SPACE, is_refused=lambda values: values["momentum"] == 0.9), trials=6)
    found = run(method, workers=3)
    assert sorted(trial.proposal.changes["momentum"] for trial in found.trials.values()) == [0, 0, 0.3, 0.3, 0.6, 0.6]


def test_the_outcome_is_the_same_at_any_concurrency() -> None:
    def outcome(workers: int) -> Any:
        method = made()
        found = run(method, workers=workers, seconds_per_step=lambda proposal: 1.0 + proposal.trial % 3)
        return method.retunes, sorted((number, trial.reports) for number, trial in found.trials.items())

    assert outcome(1) == outcome(3) == outcome(8)


def test_the_steps_beyond_one_training_are_the_probes() -> None:
    found = run(made(), workers=2)
    assert found.steps == STEPS + 3 * 7 * 5


@pytest.mark.parametrize("fails_at", [5, 10, 20, 25])
def test_points_whose_processes_fail_are_left_out_and_the_training_ends(fails_at: int) -> None:
    toy = Moving()

    def evaluate(proposal: Proposal, step: int) -> float:
        if proposal.changes["momentum"] == 0.9 and step >= fails_at:
            raise RuntimeError("killed")
        return toy.evaluate(proposal, step)

    method = made()
    found = simulate(method, evaluate, workers=2, on_become=toy.become)
    assert [trial.step for trial in found.trials.values() if trial.status == "succeeded"] == [STEPS]
    assert not [trial for trial in found.trials.values() if trial.status == "running"]


def test_it_ends_where_every_point_fails() -> None:
    def fail(proposal: Proposal, step: int) -> float:
        raise RuntimeError("out of memory")

    found = simulate(made(), fail, workers=3)
    assert {trial.status for trial in found.trials.values()} == {"failed"}


def test_a_killed_search_goes_on_by_its_journal() -> None:
    replay(made(), run(made(), workers=2).calls)


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        ({"space": {"momentum": Uniform(0.0, 1.0)}}, "with type: choice"),
        ({"space": {"seed": Integer(0, 2**62)}}, "with type: choice"),
        ({"space": {}}, "nothing to tune"),
        ({"architecture": Layers()}, "take architecture out"),
        ({"probe_steps": 20}, "shorter than every_steps: 20"),
        ({"trials": 4}, "8 points"),
    ],
)
def test_what_does_not_fit_is_refused(parameters: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        made(**parameters)


def test_a_section_makes_the_method() -> None:
    section = Section(type="omnivore", every_steps=50)
    assert isinstance(make_method(**section.model_dump(), space=SPACE, steps_per_trial=100), Omnivore)
