"""Spectral search: sparse polynomials are found, and the bits in them are fixed well."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from orchestray.platform.errors import ConfigError
from orchestray.search.methods.base import Observation, Proposal
from orchestray.search.methods.hyper.boolean_polynomials import Term, best_assignments, parities, sparse_terms
from orchestray.search.methods.hyper.spectral import Spectral
from orchestray.search.simulation.virtual_time import simulate
from orchestray.search.spaces.dimensions import Binary, Choice, Dimension, Uniform
from support.replayed import replay

NUM_BITS = 20
SPACE: dict[str, Dimension] = {f"b{bit}": Binary() for bit in range(NUM_BITS)}


def score(proposal: Proposal, _step: int) -> float:
    """Return a score whose best is: b1 = b7 on or both off, b4 off, and then b9 on."""
    sign = {key: -1 if value else 1 for key, value in proposal.changes.items()}
    return 3.0 * sign["b1"] * sign["b7"] + 2.0 * sign["b4"] - 0.5 * sign["b9"]


def spectral(**arguments: Any) -> Spectral:
    return Spectral(**{"space": SPACE, "trials": 200, "stages": 2, "samples": 60, "degree": 2, "terms": 2} | arguments)


def test_products_are_all_there_are_up_to_the_degree() -> None:
    signs = np.array([[1, -1, -1], [-1, -1, 1]])
    products, supports = parities(signs, 2)
    assert supports == [(0,), (1,), (2,), (0, 1), (0, 2), (1, 2)]
    assert products.tolist() == [[1, -1, -1, -1, -1, 1], [-1, -1, 1, 1, -1, -1]]


def test_the_best_assignments_are_those_of_all() -> None:
    terms = [Term((0, 2), 2.0), Term((1,), -1.0)]
    best = best_assignments(terms, 3)
    assert all(set(assignment) == {0, 1, 2} for assignment in best)
    assert [2 * a[0] * a[2] - a[1] for a in best] == [3, 3, 1]


def test_scores_that_do_not_differ_have_no_terms() -> None:
    signs = np.random.default_rng(0).choice([-1, 1], (20, 5))
    assert sparse_terms(signs, np.ones(20), 2, 3) == []
    assert best_assignments([], 3) == [{}]


def test_stage_by_stage_the_bits_that_matter_are_found_and_fixed_to_their_best() -> None:
    method = spectral(keep=1)
    searched = simulate(method, score)
    assert {term.bits for term in method.terms[0]} == {(1, 7), (4,)}
    assert (9,) in {term.bits for term in method.terms[1]}
    assert all(trial.score == 5.5 for number, trial in searched.trials.items() if number >= 120)


def test_proposals_are_the_same_at_any_concurrency_and_after_a_resume() -> None:
    one = simulate(spectral(), score)
    eight = simulate(spectral(), score, workers=8, seconds_per_step=lambda proposal: 1 + proposal.trial % 4)
    assert [t.proposal for t in one.trials.values()] == [t.proposal for t in eight.trials.values()]
    replay(spectral(), eight.calls)


def test_a_stage_ends_also_when_trials_fail() -> None:
    def evaluate(proposal: Proposal, step: int) -> float:
        if proposal.trial % 3 == 0:
            raise RuntimeError("diverged")
        return score(proposal, step)

    searched = simulate(spectral(), evaluate)
    assert len(searched.trials) == 200
    assert searched.best.score == 5.5


def test_no_point_comes_twice_and_a_small_space_is_exhausted() -> None:
    space: dict[str, Dimension] = {"a": Binary(), "b": Choice(("x", "y")), "c": Binary()}
    searched = simulate(Spectral(space=space, trials=100, stages=1, samples=4, keep=8), lambda _p, _s: 0.0)
    points = [tuple(trial.proposal.changes.values()) for trial in searched.trials.values()]
    assert len(points) == len(set(points)) == 8


def test_a_dimension_of_more_values_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"search\.space\.x: .*two values"):
        spectral(space={"x": Uniform(0, 1)})
    with pytest.raises(ConfigError, match="lower degree"):
        spectral(space={f"b{bit}": Binary() for bit in range(200)}, degree=4)


def test_a_stage_of_learnt_samples_ends_before_the_first_trial() -> None:
    keys = [f"bit{number}" for number in range(5)]
    method = Spectral(space={key: Binary() for key in keys}, trials=9, samples=16, degree=1, terms=2, keep=1, stages=1)
    draws = np.random.default_rng(0).integers(2, size=(20, 5)).astype(bool)
    points = [dict(zip(keys, map(bool, row), strict=True)) for row in draws]
    assert method.learn([Observation(point, None, 2.0 * point["bit1"] - point["bit3"]) for point in points])
    proposal = method.ask()
    assert proposal is not None
    assert (proposal.trial, proposal.changes["bit1"], proposal.changes["bit3"]) == (0, True, False)


def test_samples_whose_scores_are_no_finite_numbers_say_nothing_as_those_that_failed() -> None:
    def found(*, fails: bool) -> list[list[Term]]:
        def some(proposal: Proposal, step: int) -> float:
            if proposal.trial % 5 == 0:
                if fails:
                    raise RuntimeError("diverged")
                return -np.inf
            return score(proposal, step)

        method = spectral()
        simulate(method, some)
        return method.terms

    assert found(fails=False) == found(fails=True)
    assert any(found(fails=False))
