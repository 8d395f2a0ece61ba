"""ASHA: who is promoted, how far trials are trained, and that nobody is left waiting."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest

from orchestray.platform.errors import ConfigError
from orchestray.search.methods.base import Finished, Method, Proposal
from orchestray.search.methods.hyper.asha import Asha
from orchestray.search.methods.space import Space
from orchestray.search.registry.methods import make_method
from orchestray.search.simulation.virtual_time import Simulated, simulate
from orchestray.search.spaces.dimensions import Choice, Dimension, Uniform
from support.replayed import replay
from support.toy_choices import Layers

SPACE = {"x": Uniform(0.0, 1.0)}


def asha(**arguments: Any) -> Asha:
    given = {"space": SPACE, "trials": 64, "steps_per_trial": 64, "eta": 4, "grace_steps": 1, **arguments}
    made = make_method("asha", **given)
    assert isinstance(made, Asha)
    return made


def drawn(seed: int, num_trials: int = 5000) -> np.ndarray:
    return np.random.default_rng(seed).random(num_trials)


def at_steps(searched: Simulated, steps: int) -> set[int]:
    return {number for number, trial in searched.trials.items() if any(step >= steps for step, _ in trial.reports)}


@pytest.mark.parametrize("workers", [1, 5, 64])
def test_rungs_hold_n_over_eta_to_the_k_when_better_trials_come_first(workers: int) -> None:
    searched = simulate(asha(), lambda proposal, _step: -float(proposal.trial), workers=workers)
    assert [len(at_steps(searched, 4**rung)) for rung in range(4)] == [64, 16, 4, 1]
    assert at_steps(searched, 64) == {0}


@pytest.mark.parametrize("seed", range(5))
def test_rungs_hold_at_least_n_over_eta_and_of_the_order_of_root_n_more_in_any_order(seed: int) -> None:
    scores = drawn(seed, 256)
    searched = simulate(asha(trials=256), lambda proposal, _step: scores[proposal.trial], workers=8)
    below = 256
    for rung in range(1, 4):
        size = len(at_steps(searched, 4**rung))
        assert below // 4 <= size <= below // 4 + 2 * math.sqrt(below)
        below = size
    assert searched.trials[int(scores.argmax())].status == "succeeded"


@pytest.mark.parametrize("workers", [1, 3, 16])
def test_each_promotion_is_of_the_best_quarter_of_its_rung_and_the_best_of_it_comes_first(workers: int) -> None:
    scores = drawn(7, 64)
    searched = simulate(asha(), lambda proposal, step: scores[proposal.trial] + step, workers=workers)
    rungs: dict[int, list[int]] = {1: [], 4: [], 16: []}
    at = dict.fromkeys(range(64), 0)
    for call in searched.calls:
        if call.name == "report" and call.argument is not None:
            at[call.argument.trial] = call.argument.step
            if call.argument.step in rungs:
                rungs[call.argument.step].append(call.argument.trial)
        if call.name == "released":
            for trial, decision in call.answer:
                rung = sorted(rungs[at[trial]], key=lambda other: -scores[other])
                if type(decision).__name__ == "Continue":
                    assert trial in rung[: len(rung) // 4]
                else:
                    assert trial not in rung[: len(rung) // 4]


@pytest.mark.parametrize("brackets", [1, 3])
@pytest.mark.parametrize("workers", [1, 7])
def test_every_trial_ends_also_where_trials_fail(brackets: int, workers: int) -> None:
    scores = drawn(3)

    def evaluate(proposal: Proposal, step: int) -> float:
        if proposal.trial % 5 == 2 and step >= 4:
            raise RuntimeError("diverged")
        return float(scores[proposal.trial])

    method = asha(brackets=brackets)
    searched = simulate(method, evaluate, workers=workers)
    assert len(searched.trials) == 64
    assert all(trial.status in ("succeeded", "stopped", "failed") for trial in searched.trials.values())
    assert not any(rung.waiting for rungs in method.brackets for rung in rungs)


def test_brackets_begin_at_rungs_of_their_own_and_cost_about_the_same() -> None:
    method = asha(trials=400, brackets=3)
    searched = simulate(method, lambda proposal, _step: drawn(1)[proposal.trial], workers=4)
    firsts = [trial.reports[0][0] for trial in searched.trials.values()]
    assert set(firsts) == {1, 4, 16}
    assert firsts.count(1) > 2 * firsts.count(4) > 4 * firsts.count(16)


def test_a_trial_is_stopped_once_it_cannot_be_promoted_any_more() -> None:
    method = asha(trials=8)
    searched = simulate(method, lambda proposal, _step: float(proposal.trial == 0), workers=1)
    stopped = [
        (number, trial)
        for number, call in enumerate(searched.calls)
        if call.name == "released"
        for trial, decision in call.answer
        if type(decision).__name__ == "Stop"
    ]
    asked = [number for number, call in enumerate(searched.calls) if call.name == "ask"]
    assert stopped[0][0] < asked[-1], "those that can only be worse are held till the end"


class Pairs(Method):
    """A method that proposes two trials and waits for both to end, as a generation does."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.asked = self.told = 0

    def ask(self) -> Proposal | None:
        if self.asked - self.told >= 2 or (self.asked % 2 == 0 and self.told < self.asked):
            return None
        self.asked += 1
        return Proposal(self.asked - 1, {"x": 0.5})

    def tell(self, finished: Finished) -> None:
        self.told += 1

    @property
    def is_done(self) -> bool:
        return self.asked >= (self.trials or 0)


def test_a_proposer_that_waits_for_ends_is_not_kept_waiting_by_held_trials() -> None:
    method = asha(trials=10)
    method.proposer = Pairs(space=SPACE, trials=10, steps_per_trial=64)
    searched = simulate(method, lambda proposal, _step: float(proposal.trial), workers=4)
    assert len(searched.trials) == 10
    assert all(trial.status in ("succeeded", "stopped") for trial in searched.trials.values())


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize(
    "proposals",
    [
        {"type": "random"},
        {"type": "bayesian", "initial": 4},
        {"type": "bayesian", "initial": 4, "model": "tpe"},
        {"type": "particle_swarm", "population": 4},
        {"type": "regularized_evolution", "population": 4},
        {"type": "hierarchical_evolution", "population": 4, "initial_mutations": 2},
        {"type": "reinforce", "children": 4, "repeats": 50},
        {"type": "q_learning"},
        {"type": "tree_search"},
        {"type": "progressive", "beam": 4},
    ],
    ids=lambda proposals: "-".join(map(str, proposals.values())),
)
def test_nobody_waits_for_ever_when_the_proposer_finds_that_it_has_no_more_points(
    proposals: dict[str, Any], workers: int
) -> None:
    dimensions: dict[str, Dimension] = {"x": Choice((1, 2, 3)), "y": Choice(("a", "b", "c"))}
    space = Space(dimensions, is_refused=lambda values: values["x"] == 2 and values["y"] == "b")
    is_of_networks = proposals["type"] == "hierarchical_evolution"
    given: dict[str, Any] = {"space": {}, "architecture": Layers(1)} if is_of_networks else {"space": space}
    method = asha(**given, eta=3, proposals=proposals)
    searched = simulate(method, lambda proposal, _step: drawn(3)[proposal.trial], workers=workers)
    assert {trial.status for trial in searched.trials.values()} <= {"succeeded", "stopped"}
    assert method.is_done


class Points(Method):
    """A method of some points; it may know at once that they are all, or find out where it looks for another one."""

    def __init__(self, num_points: int, *, knows: bool) -> None:
        super().__init__(space=SPACE, steps_per_trial=64)
        self.left, self._knows, self._looked = num_points, knows, False

    def ask(self) -> Proposal | None:
        if self.left == 0:
            self._looked = True
            return None
        self.left -= 1
        return Proposal(self.left, {"x": 0.5})

    def tell(self, finished: Finished) -> None:
        """Learn nothing."""

    @property
    def is_done(self) -> bool:
        return self.left == 0 and (self._knows or self._looked)


@pytest.mark.parametrize("num_points", [1, 2, 5, 9, 20])
def test_trials_end_alike_if_the_proposer_has_no_more_points_and_if_it_finds_that_only_then(num_points: int) -> None:
    steps = []
    for knows in (True, False):
        method = asha()
        method.proposer = Points(num_points, knows=knows)
        searched = simulate(method, lambda proposal, _step: float(proposal.trial * 7 % 5))
        assert method.is_done
        steps.append({number: (trial.status, trial.step) for number, trial in searched.trials.items()})
    assert steps[0] == steps[1]


def test_a_killed_search_goes_on_as_if_it_had_not_been() -> None:
    scores = drawn(5)
    calls = simulate(
        asha(proposals={"type": "bayesian", "initial": 4}, trials=24),
        lambda proposal, step: scores[proposal.trial] + step / 100,
        workers=3,
    ).calls
    replay(asha(proposals={"type": "bayesian", "initial": 4}, trials=24), calls)


def test_by_default_one_trial_at_least_comes_to_its_end() -> None:
    for trials in (1, 3, 4, 9, 16, 100):
        method = Asha(space=SPACE, trials=trials, steps_per_trial=640)
        searched = simulate(method, lambda proposal, _step: drawn(2)[proposal.trial], workers=2)
        if trials >= 4:
            assert any(trial.status == "succeeded" for trial in searched.trials.values())


def test_with_too_few_trials_for_one_to_come_through_all_rungs_it_says_so_and_what_helps() -> None:
    few = asha(trials=10)
    assert len(few.brackets[0]) == 3
    [caution] = few.cautions()
    assert "from each of 3 rungs, so of 10 perhaps none is trained for all 64 steps" in caution
    assert caution.endswith("raise search.budget.trials to 64 or search.method.grace_steps to 16")
    for enough in (asha(trials=64), asha(trials=10, grace_steps=16), asha(trials=10, grace_steps=None)):
        assert enough.cautions() == ()
    [of_one] = asha(trials=3).cautions()
    assert of_one.endswith("raise search.budget.trials to 64"), "no trial is promoted, whatever the rungs"


@pytest.mark.parametrize(("eta", "trials"), [(5, 124), (5, 25), (5, 24), (5, 5), (3, 243), (3, 242)])
def test_what_a_caution_advises_leaves_nothing_to_caution_of(eta: int, trials: int) -> None:
    given: dict[str, Any] = {"trials": trials, "eta": eta, "steps_per_trial": 730}
    [caution] = asha(**given).cautions()
    enough, grace_steps = re.findall(r" to (\d+)", caution)
    assert asha(**given | {"trials": int(enough)}).cautions() == ()
    assert asha(**given, grace_steps=int(grace_steps)).cautions() == ()
    assert asha(**given, grace_steps=int(grace_steps) // eta).cautions(), "no more than that"


def test_cautions_of_the_proposer_are_among_those_of_asha() -> None:
    inner = {"type": "q_learning"}
    [of_inner] = asha(trials=64, proposals=inner).cautions()
    assert of_inner.startswith("q_learning tries")
    few = asha(trials=10, proposals=inner).cautions()
    assert len(few) == 2
    assert few[0] == of_inner


def test_a_range_without_rungs_is_refused() -> None:
    with pytest.raises(ConfigError, match="grace_steps"):
        asha(grace_steps=64)
    with pytest.raises(ConfigError, match="eta"):
        asha(eta=1)
    with pytest.raises(ConfigError, match="brackets"):
        asha(brackets=4)
    with pytest.raises(ConfigError, match="no method"):
        asha(proposals={"type": "clairvoyance"})


@pytest.mark.parametrize(
    ("steps", "grace", "eta", "rungs"),
    [
        (81, 5, 4, [5, 20]),
        (64, 1, 4, [1, 4, 16]),
        (65, 1, 4, [1, 4, 16]),
        (100, 5, 4, [5, 20, 80]),
        (99, 5, 4, [5, 20]),
        (96, 1, 2, [1, 2, 4, 8, 16, 32, 64]),
        (95, 1, 2, [1, 2, 4, 8, 16, 32]),
        (81, 80, 4, [80]),
    ],
)
def test_no_rung_but_the_first_is_all_but_at_the_end(steps: int, grace: int, eta: int, rungs: list[int]) -> None:
    method = asha(steps_per_trial=steps, grace_steps=grace, eta=eta)
    assert [rung.steps for rung in method.brackets[0]] == rungs


def test_the_best_of_16_is_trained_to_the_end_of_a_budget_one_step_beyond_a_power() -> None:
    searched = simulate(
        asha(trials=16, steps_per_trial=81, grace_steps=5), lambda proposal, _step: float(proposal.trial), workers=1
    )
    assert searched.trials[15].status == "succeeded"
    assert searched.trials[15].reports[-1][0] == 81
