"""Methods under bounds: feasible trials come before infeasible ones, and less violation before more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from orchestray.search.methods.base import Exploit, Finished, Method, Report
from orchestray.search.methods.conditions import conditions_of
from orchestray.search.methods.fronts import standings_of
from orchestray.search.methods.space import Space
from orchestray.search.registry.methods import make_method
from orchestray.search.spaces.dimensions import Choice, Uniform

SPACE = {"x": Uniform(0.0, 1.0), "y": Uniform(0.0, 1.0)}
MOST = 0.8


def told(method: Method, num_trials: int) -> list[Mapping[str, Any]]:
    """Let a method maximise x + y under a bound of the sum, one trial after the other; return its points."""
    points = []
    for _ in range(num_trials):
        proposal = method.ask()
        assert proposal is not None
        points.append(proposal.changes)
        total = proposal.changes["x"] + proposal.changes["y"]
        method.report(Report(proposal.trial, 1, total, violations=(total / MOST - 1,)))
        method.tell(Finished(proposal.trial, "succeeded", 1, total, violations=(total / MOST - 1,)))
    return points


@pytest.mark.parametrize(
    ("method", "arguments", "least"),
    [
        ("bayesian", {"initial": 6}, 0.78),
        ("bayesian", {"model": "tpe", "initial": 6}, 0.7),
        ("particle_swarm", {"population": 4}, 0.7),
        ("regularized_evolution", {"population": 6, "sample_size": 3}, 0.7),
    ],
)
def test_a_method_that_learns_goes_to_the_bound_and_stays_at_it(
    method: str, arguments: dict[str, Any], least: float
) -> None:
    points = told(make_method(method, space=SPACE, trials=40, **arguments), 40)
    totals = np.array([point["x"] + point["y"] for point in points])
    late = totals[20:]
    assert totals[totals <= MOST].max() > least
    assert np.median(late) < 1.1, "without bounds it would go on towards 2"


def test_a_gaussian_process_without_a_feasible_trial_looks_for_one() -> None:
    method = make_method("bayesian", space=SPACE, trials=30, initial=4)
    for _ in range(12):
        proposal = method.ask()
        assert proposal is not None
        violation = 0.05 + proposal.changes["x"]
        method.tell(Finished(proposal.trial, "succeeded", 1, proposal.changes["x"], violations=(violation,)))
    assert proposal.changes["x"] < 0.1


def test_failed_trials_have_no_violation_and_are_survived() -> None:
    method = make_method("bayesian", space=SPACE, trials=30, initial=2)
    for number in range(8):
        proposal = method.ask()
        assert proposal is not None
        failed = Finished(proposal.trial, "failed")
        good = Finished(proposal.trial, "succeeded", 1, 0.5, violations=(0.1 * number,))
        method.tell(failed if number % 2 else good)


def test_infeasible_rows_stand_below_the_feasible_ones_by_violation_alone() -> None:
    scores, violations = np.array([[5.0], [9.0], [3.0], [7.0]]), np.array([0.0, 2.0, 0.0, 1.0])
    assert np.argsort(-standings_of(scores, violations)).tolist() == [0, 2, 3, 1]
    assert np.array_equal(standings_of(scores, np.zeros(4)), scores[:, 0])
    assert np.argsort(-standings_of(scores, np.array([4.0, 2.0, 3.0, 1.0]))).tolist() == [3, 1, 2, 0]
    fronts = np.array([[1.0, 1.0], [2.0, 0.0], [9.0, 9.0]])
    standing = standings_of(fronts, np.array([0.0, 0.0, 0.5]))
    assert np.array_equal(standing[:2], standings_of(fronts[:2]))
    assert standing[2] < standing[:2].min()


def test_asha_promotes_feasible_trials_first() -> None:
    method = make_method("asha", space=SPACE, trials=4, steps_per_trial=4, eta=2, grace_steps=2)
    proposals = [method.ask() for _ in range(4)]
    assert None not in proposals
    for trial, (score, violation) in enumerate([(0.1, 0.0), (0.9, 0.5), (0.2, 0.0), (0.8, 0.1)]):
        method.report(Report(trial, 2, score, violations=(violation,)))
    released = dict(method.released())
    assert sorted(trial for trial, decision in released.items() if type(decision).__name__ == "Continue") == [0, 2]


def copied(reports: Sequence[tuple[float, float]], exploit: str, **arguments: Any) -> list[tuple[int, int]]:
    """Return which member of a population copies which, over some seeds, by its score and its violation of a bound."""
    copies = []
    for seed in range(6):
        method = make_method(
            "population_based_training",
            space=SPACE,
            trials=4,
            steps_per_trial=8,
            population=4,
            interval_steps=2,
            exploit=exploit,
            synchronous=True,
            seed=seed,
            **arguments,
        )
        for _ in reports:
            method.ask()
        for trial, (score, violation) in enumerate(reports):
            method.report(Report(trial, 2, score, violations=(violation,)))
        copies += [(trial, d.source) for trial, d in method.released() if isinstance(d, Exploit)]
    assert copies
    return copies


@pytest.mark.parametrize("exploit", ["truncation", "binary_tournament", "t_test"])
def test_a_population_copies_its_feasible_members(exploit: str) -> None:
    copies = copied([(0.1, 0.0), (0.9, 0.5), (0.2, 0.0), (0.8, 0.1)], exploit, fraction=0.5)
    assert all(source in (0, 2) or (trial, source) == (1, 3) for trial, source in copies)
    assert any(trial in (1, 3) and source in (0, 2) for trial, source in copies)


@pytest.mark.parametrize("exploit", ["truncation", "binary_tournament", "t_test"])
def test_where_no_member_is_feasible_those_that_violate_more_copy_those_that_violate_less(exploit: str) -> None:
    copies = copied([(1.0, 0.4), (0.9, 0.3), (0.8, 0.2), (0.7, 0.1)], exploit)
    assert all(source > trial for trial, source in copies)


@pytest.mark.parametrize("model", ["gaussian_process", "tpe"])
def test_a_model_knows_the_bounds_of_points_that_lack_a_key(model: str) -> None:
    dimensions = {"kind": Choice(("one", "both")), "x": Uniform(0.0, 1.0), "y": Uniform(0.0, 1.0)}
    space = Space(dimensions, conditions_of({"y": {"kind": "both"}}, {}))
    method = make_method("bayesian", space=space, trials=50, model=model, initial=8)
    totals = []
    for _ in range(50):
        proposal = method.ask()
        assert proposal is not None
        assert ("y" in proposal.changes) == (proposal.changes["kind"] == "both")
        total = proposal.changes["x"] + proposal.changes.get("y", 0.0)
        violations = (total / MOST - 1,)
        method.report(Report(proposal.trial, 1, total, violations=violations))
        method.tell(Finished(proposal.trial, "succeeded", 1, total, violations=violations))
        totals.append(total)
    assert max(total for total in totals if total <= MOST) > 0.7
    assert np.median(totals[25:]) < 1.1, "without bounds it would go on towards 2"


def test_under_the_t_test_a_feasible_member_copies_no_other_by_chance_also_where_some_are_infeasible() -> None:
    for seed in range(8):
        method = make_method(
            "population_based_training",
            space=SPACE,
            steps_per_trial=8,
            population=3,
            interval_steps=2,
            exploit="t_test",
            synchronous=True,
            seed=seed,
        )
        for trial, (evaluations, violation) in enumerate([((0.1, 0.9), 0.0), ((0.2, 0.85), 0.0), ((0.9, 0.9), 0.5)]):
            method.ask()
            method.report(Report(trial, 2, evaluations[-1], evaluations=evaluations, violations=(violation,)))
        copies = {trial for trial, decision in method.released() if isinstance(decision, Exploit)}
        assert not copies & {0, 1}
