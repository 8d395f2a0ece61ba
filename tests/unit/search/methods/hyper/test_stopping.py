"""The median rule, and predicted learning curves."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from orchestray.platform.errors import ConfigError
from orchestray.search.methods.base import (
    Continue,
    Decision,
    Exploit,
    Finished,
    Method,
    Observation,
    Proposal,
    Report,
    Stop,
)
from orchestray.search.methods.hyper.curves import predict
from orchestray.search.methods.hyper.learning_curve import LearningCurve
from orchestray.search.methods.hyper.median_stopping import MedianStopping
from orchestray.search.methods.hyper.stopping import EarlyStopping
from orchestray.search.methods.space import Space
from orchestray.search.simulation.virtual_time import simulate
from orchestray.search.spaces.dimensions import Uniform
from support.learning_curves import draw_curves
from support.replayed import replay

SPACE = {"x": Uniform(0.0, 1.0)}
STEPS = np.arange(1, 101)


# -- the median rule ---------------------------------------------------------------------------------------------------


def median_stopping(**arguments: Any) -> MedianStopping:
    return MedianStopping(
        **{"space": SPACE, "trials": 20, "steps_per_trial": 10, "grace_steps": 2, "every_steps": 1, "min_trials": 3}
        | arguments
    )


def test_a_trial_whose_best_is_below_the_median_of_running_means_is_stopped() -> None:
    method = median_stopping()
    for trial, score in enumerate([1.0, 2.0, 3.0]):
        method.ask()
        for step in (1, 2):
            method.report(Report(trial, step, score))
    for trial, (first, second, expected) in enumerate([(1.9, 1.9, Stop), (2.1, 0.0, Continue)], start=3):
        method.ask()
        assert isinstance(method.report(Report(trial, 1, first)), Continue), "grace"
        assert isinstance(method.report(Report(trial, 2, second)), expected)


@pytest.mark.parametrize("make", [MedianStopping, LearningCurve])
@pytest.mark.parametrize("name", ["grace_steps", "every_steps"])
@pytest.mark.parametrize("steps", [0, 10, 100])
def test_steps_at_which_no_trial_could_be_stopped_are_refused(make: Any, name: str, steps: int) -> None:
    with pytest.raises(ConfigError, match=f"{name}: must be at least 1 and below the 10 steps of a trial, got {steps}"):
        make(space=SPACE, trials=20, steps_per_trial=10, **{name: steps})
    assert getattr(make(space=SPACE, trials=20, steps_per_trial=10, **{name: 9}), name) == 9
    make(space=SPACE, trials=20, steps_per_trial=1)  # by default, a method for short trials stops none


def test_few_others_stop_nobody() -> None:
    method = median_stopping(min_trials=4)
    for trial, score in enumerate([1.0, 2.0, 3.0]):
        method.ask()
        method.report(Report(trial, 2, score))
    method.ask()
    assert isinstance(method.report(Report(3, 2, 0.0)), Continue)


def test_the_median_rule_keeps_one_within_a_hundredth_of_the_best_and_saves_steps_and_can_be_replayed() -> None:
    curves = draw_curves(0, num_trials=40, num_steps=100)
    method = median_stopping(trials=40, steps_per_trial=100, grace_steps=10, every_steps=5)
    searched = simulate(method, lambda proposal, step: float(curves[proposal.trial, step - 1]), workers=4)
    ends = [curves[number, -1] for number, trial in searched.trials.items() if trial.status == "succeeded"]
    assert max(ends) >= curves[:, -1].max() - 0.01
    assert searched.steps < 0.8 * 4000
    replay(median_stopping(trials=40, steps_per_trial=100, grace_steps=10, every_steps=5), searched.calls)


# -- learning curves ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shown", [20, 40])
def test_predictions_are_calibrated_over_curves_of_several_families(shown: int) -> None:
    curves = draw_curves(11, num_trials=200, num_steps=100)
    covered = errors = 0.0
    for curve in curves:
        seen = STEPS[:shown:2]
        prediction = predict(seen, curve[seen - 1], 100, float(curve[0]), 0.98)
        level = prediction.probability_above(float(curve[-1]))
        covered += 0.05 <= level <= 0.95
        errors += abs(prediction.mean - curve[-1])
    assert covered / 200 >= 0.8, "90 % intervals hold the final score in at least 80 %"
    assert errors / 200 < 0.05


def test_the_longer_a_curve_the_surer_its_prediction() -> None:
    curve = 0.9 - 0.8 * np.exp(-STEPS / 15.0) + np.random.default_rng(0).normal(0, 0.003, 100)
    spreads = []
    for shown in (10, 30, 80):
        prediction = predict(STEPS[:shown], curve[:shown], 100, 0.1, 0.9)
        spreads.append(prediction.probability_above(0.85) - prediction.probability_above(0.95))
        levels = [prediction.probability_above(score) for score in (0.85, 0.9, 0.95)]
        assert levels == sorted(levels, reverse=True)
    assert spreads[2] > 0.95
    assert spreads == sorted(spreads)


def test_scores_of_any_scale_are_predicted_alike() -> None:
    curve = 0.9 - 0.8 / np.sqrt(STEPS[:30])
    plain = predict(STEPS[:30], curve, 100, 0.1, 1.0)
    scaled = predict(STEPS[:30], 1000 * curve - 5000, 100, 1000 * 0.1 - 5000, 1000 - 5000)
    assert scaled.mean == pytest.approx(1000 * plain.mean - 5000)
    assert scaled.probability_above(1000 * 0.8 - 5000) == pytest.approx(plain.probability_above(0.8))


def test_the_proposer_hears_the_predicted_score_of_a_stopped_trial() -> None:
    method = LearningCurve(space=SPACE, trials=5, steps_per_trial=100, every_steps=1, grace_steps=5)
    heard: list[Finished] = []
    method.proposer.tell = heard.append  # type: ignore[method-assign]
    best, poor = 0.9 - 0.8 / STEPS, 0.6 - 0.5 / STEPS
    for trial in range(4):
        method.ask()
        for step in (STEPS if trial < 3 else STEPS[:40]).tolist():
            decision = method.report(Report(trial, step, float((best if trial < 3 else poor)[step - 1])))
            if isinstance(decision, Stop):
                break
        status = "stopped" if isinstance(decision, Stop) else "succeeded"
        method.tell(Finished(trial, status, step, float(poor[step - 1]) if trial == 3 else 0.9))
    assert heard[-1].status == "stopped"
    assert step < 40
    assert heard[-1].score == pytest.approx(poor[-1], abs=0.06)


def test_a_curve_that_has_diverged_is_stopped_and_says_nothing_of_the_others() -> None:
    method = LearningCurve(space=SPACE, trials=8, steps_per_trial=100, every_steps=1, grace_steps=5)
    for trial in range(8):
        method.ask()
        for step in STEPS[:90].tolist():
            diverges = trial % 2 == 0
            decision = method.report(Report(trial, step, -np.inf if diverges else 0.9 - 0.8 / step))
            assert isinstance(decision, Stop) == (diverges and step >= 5)
            if isinstance(decision, Stop):
                break


def test_learning_curves_can_be_replayed() -> None:
    curves = draw_curves(1, num_trials=12, num_steps=100)
    make = lambda: LearningCurve(space=SPACE, trials=12, steps_per_trial=100)  # noqa: E731
    searched = simulate(make(), lambda proposal, step: float(curves[proposal.trial, step - 1]), workers=3)
    assert any(trial.status == "stopped" for trial in searched.trials.values())
    replay(make(), searched.calls)


def test_a_probability_of_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="probability"):
        LearningCurve(space=SPACE, probability=1.0)


# -- around another method ---------------------------------------------------------------------------------------


class Inner(Method):
    """A method whose every answer differs from that of `Method`, and which notes what it is given."""

    def __init__(self) -> None:
        super().__init__(space=SPACE)
        self.given: list[Any] = []

    def ask(self) -> Proposal | None:
        return Proposal(0, {"x": 0.5}, steps=7)

    def tell(self, finished: Finished) -> None:
        self.given.append(finished)

    def begin_with(self, start: Sequence[Mapping[str, Any]]) -> bool:
        self.given.append(start)
        return True

    def learn(self, observations: Sequence[Observation]) -> bool:
        self.given.append(observations)
        return True

    def widen(self, space: Space) -> bool:
        self.given.append(space)
        return True

    def next_report(self, trial: int, step: int) -> int:
        return step + 3

    def report(self, report: Report) -> Decision:
        return Exploit(1, {"x": 0.1}, "copied 1") if report.step == 6 else Continue()

    def released(self) -> Sequence[tuple[int, Decision]]:
        return [(3, Continue())]

    def genome_of(self, proposal: Proposal) -> Any:
        return "found"

    def tally(self) -> Mapping[str, Any]:
        return {"found": 1}

    def cautions(self) -> Sequence[str]:
        return ("be careful",)

    def parents(self) -> Collection[int]:
        return {4}

    hands_on = has_program = is_done = True


def test_early_stopping_is_to_its_users_what_the_method_inside_is() -> None:
    inner = Inner()
    method = EarlyStopping(space=SPACE, steps_per_trial=20, trials=9, proposer=inner)
    proposal = method.ask()
    assert proposal is not None
    assert method.budget(0) == 7, "as long as the inner method wants it"
    assert [method.next_report(0, step) for step in (0, 3, 6)] == [3, 6, 7]
    assert isinstance(method.report(Report(0, 3, 0.5)), Continue)
    assert isinstance(method.report(Report(0, 6, 0.5)), Exploit)
    start, observations, end = [{"x": 0.1}], [Observation({"x": 0.2}, None, 1.0)], Finished(0, "succeeded", 7, 0.5)
    wider = Space.of({"x": Uniform(0.0, 2.0)})
    assert method.begin_with(start)
    assert method.learn(observations)
    assert method.widen(wider)
    method.tell(end)
    assert inner.given == [start, observations, wider, end]
    assert method.space is wider
    method.allow(12)
    assert method.trials == inner.trials == 12
    assert (method.genome_of(proposal), method.tally(), method.cautions()) == ("found", {"found": 1}, ("be careful",))
    assert method.parents() == {4}
    assert method.released() == [(3, Continue())]
    assert method.hands_on
    assert method.has_program
    assert method.is_done
