"""The comparison of samplers: its losses, trials at once, and the cells that it keeps."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

from searches.bayesian import Compared, Kept  # noqa: E402
from searches.bayesian_cases import CASES, Outcome, drive  # noqa: E402


@pytest.mark.parametrize("name", CASES)
def test_no_trial_is_better_than_the_best_of_a_function_and_random_ones_lose_something(name: str) -> None:
    case, rng = CASES[name], np.random.default_rng(0)
    outcomes = [case.evaluate(case.from_units(rng.random(len(case.space)))) for _ in range(300)]
    for outcome in outcomes:
        assert all(score <= best for score, best in zip(outcome.scores, case.best, strict=True))
    assert 0 < case.loss(outcomes) <= case.loss(outcomes[:30])


def test_the_best_points_have_no_regret_and_keep_the_bounds() -> None:
    origin = dict.fromkeys(CASES["Ackley-10"].space, 0.0)
    known = {"Branin": {"x": np.pi, "y": 2.275}, "Ackley-10": origin}
    for name, values in known.items():
        for case in (CASES[name], CASES[f"{name}, bound"]):
            assert case.loss([case.evaluate(values)]) == pytest.approx(0, abs=1e-6)


def test_an_infeasible_trial_counts_as_none() -> None:
    case = CASES["Branin, bound"]
    better, kept = Outcome((-0.4,), 0.1), Outcome((-3.0,), -0.1)
    assert case.loss([better]) > 300
    assert case.loss([better, kept]) == pytest.approx(3.0 - 0.39789, abs=1e-4)


def test_the_loss_of_two_objectives_is_the_area_that_no_trial_dominates() -> None:
    case = CASES["DTLZ2-6"]
    assert case.loss([Outcome((-1.1, -1.1))]) == 1
    assert case.loss([Outcome((0.0, -0.55)), Outcome((-0.55, 0.0)), Outcome((-0.8, -0.8))]) == pytest.approx(0.25)


@pytest.mark.parametrize("workers", [1, 8])
def test_as_many_trials_run_at_once_as_there_are_workers_and_the_oldest_ends_first(workers: int) -> None:
    case = CASES["Branin"]
    asked, told = 0, []
    most = 0

    def ask() -> tuple[int, Any]:
        nonlocal asked, most
        asked += 1
        most = max(most, asked - len(told))
        return asked - 1, {"x": 0.0, "y": 0.0}

    drive(case, ask, lambda name, _outcome: told.append(name), workers)
    assert (most, told) == (workers, list(range(case.trials)))


def test_cells_are_kept_between_runs_and_those_of_another_version_are_not_used(tmp_path: Path) -> None:
    Kept(tmp_path, {"tpe": "a"}).add(("Branin", "tpe", 1, 0), 0.5, 1.0)
    assert Kept(tmp_path, {"tpe": "a"}).losses() == {("Branin", "tpe", 1, 0): 0.5}
    assert Kept(tmp_path, {"tpe": "b"}).losses() == {}


def test_losses_are_compared_over_the_seeds_of_both() -> None:
    found = Compared.of("row", "tpe", "TPESampler", {0: 1.0, 1: 2.0, 2: 9.0}, {0: 2.0, 1: 4.0, 5: 0.0})
    assert found is not None
    assert found.ratio == 0.5
    assert found.cells()[3:] == ["2", "1.5 (1.2 to 1.8)", "3 (2.5 to 3.5)", "2, 0", "1"]
