"""Bounds of metrics: the best trial is a feasible one, whatever its method; without one the nearest is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from orchestray.platform.errors import ConfigError
from orchestray.platform.run.metrics import read_lines
from orchestray.search.api import result_of
from orchestray.search.config.load import load_search_config
from orchestray.search.engine.objective import Bound, Objective, Objectives, objectives_of
from orchestray.search.engine.session import MemoryJournal, MethodSession
from orchestray.search.methods.base import Report
from orchestray.search.registry.check import method_of
from orchestray.search.registry.methods import make_method
from orchestray.search.results.schema import SearchOutcome
from orchestray.search.results.writer import SearchRecords
from orchestray.search.spaces.dimensions import make_dimension
from support.search_loop import Loop, loop_of

HIDDEN = [[2], [4], [8], [16]]
PARAMETERS = [64 * n + n + 10 * n + 10 for (n,) in HIDDEN]
"""Sizes of the networks: 64 inputs, 10 classes."""


def config(most: float, **search: Any) -> Any:
    return load_search_config(
        {
            "name": "small",
            "base": {
                "task": {"type": "digits"},
                "train": {"batch_size": 8, "steps": 2, "optimizer": {"type": "sgd", "lr": 0.3}},
            },
            "search": {
                "method": {"type": "grid"},
                # the largest network is the best, so that the bound decides
                "objective": [
                    {"metric": "parameters", "mode": "max", "subject_to": {"parameters": {"max": most}}},
                    {"metric": "accuracy"},
                ],
                "space": {"task.hidden": {"type": "choice", "values": HIDDEN}},
                **search,
            },
        }
    )


@pytest.fixture
def searched(tmp_path: Path) -> Any:
    def run(made: Any, **rules: Any) -> tuple[Loop, dict[str, Any]]:
        with SearchRecords.create(tmp_path, made.name) as records:
            loop = loop_of(made, records, **rules)
            loop.run()
            loop.close()
            best = loop.conductor.best()
            assert best is not None
            return loop, result_of(made, records, SearchOutcome("succeeded", best=best.trial))

    return run


def test_the_best_trial_is_the_best_of_the_feasible_ones_and_its_state_is_kept(searched: Any) -> None:
    loop, result = searched(config(PARAMETERS[1]), save_every_s=100.0)
    assert [line["feasible"] for _, line in sorted(loop.records.lines.items())] == [True, True, False, False]
    assert loop.records.lines[3]["constraints"] == {"parameters": PARAMETERS[3]}
    best = loop.conductor.best()
    assert (best.trial, best.is_lost) == (1, False)
    assert loop.files.is_whole(best.at)
    assert (result["best"]["trial"], result["best"]["feasible"]) == (1, True)
    assert "infeasible" not in result


def test_a_network_over_a_bound_of_its_size_is_not_trained_and_is_infeasible_not_failed(searched: Any) -> None:
    loop, result = searched(config(PARAMETERS[1]))
    assert result["untrained"] == 2
    lines = [line for _, line in sorted(loop.records.lines.items())]
    assert [line["steps"] for line in lines] == [2, 2, 0, 0]
    assert [line["status"] for line in lines] == ["succeeded"] * 4
    assert [line["violation"] > 0 for line in lines] == [False, False, True, True]


def test_a_feasible_state_is_kept_after_infeasible_ones_with_better_scores(searched: Any) -> None:
    space = {"task.hidden": {"type": "choice", "values": HIDDEN[::-1]}}
    loop, _ = searched(config(PARAMETERS[0], space=space), save_every_s=100.0)
    best = loop.conductor.best()
    assert (best.trial, best.is_lost) == (3, False)
    assert loop.files.is_whole(best.at)


def test_without_a_feasible_trial_that_with_the_least_violation_is_named(searched: Any) -> None:
    loop, result = searched(config(PARAMETERS[0] - 1))
    assert result["untrained"] == 4
    assert loop.conductor.best().trial == result["best"]["trial"] == 0
    assert result["infeasible"] == (
        f"no trial is feasible, with parameters at most {PARAMETERS[0] - 1}; the best is that with the least "
        f"violation, trial 0: parameters {PARAMETERS[0]}"
    )


def test_a_replayed_journal_has_the_same_feasible_best(searched: Any, tmp_path: Path) -> None:
    made = config(PARAMETERS[1])
    loop, _ = searched(made)
    again = MethodSession(method_of(made), MemoryJournal(read_lines(tmp_path / made.name / "journal.jsonl")))
    assert {trial: one.violations for trial, one in again.trials.items()} == {
        trial: one.violations for trial, one in loop.conductor.session.trials.items()
    }
    assert [bool(one.violation) for _, one in sorted(again.trials.items())] == [False, False, True, True]


def test_a_violation_is_relative_and_gives_the_value_back() -> None:
    most, least, at_zero = Bound("a", 200.0), Bound("a", 0.5, is_most=False), Bound("a", 0.0)
    assert (most.violation(300.0), most.violation(100.0)) == (0.5, -0.5)
    assert least.violation(0.25) == 0.5
    assert at_zero.violation(3.0) == 3.0
    for bound in (most, least, at_zero):
        assert [bound.value(bound.violation(value)) for value in (0.1, 7.0, 123456.0)] == [0.1, 7.0, 123456.0]


def test_a_metric_with_bounds_has_to_be_reported_as_an_objective_has() -> None:
    objectives = Objectives([Objective("accuracy")], [Bound("parameters", 10.0), Bound("f1", 0.5, is_most=False)])
    assert objectives.are_of_network
    assert objectives.of_task == ["accuracy", "f1"]
    with pytest.raises(ConfigError, match=r"^search.objective.subject_to.f1: no trial reports 'f1'"):
        objectives.scores({"accuracy": 0.5, "parameters": 3.0})


def test_a_feasible_report_of_a_trial_counts_before_a_better_infeasible_one() -> None:
    space = {"x": make_dimension("choice", values=[1])}
    session = MethodSession(make_method("median_stopping", space=space, trials=1, steps_per_trial=4), MemoryJournal())
    session.ask()
    for step, score, violation in ((1, 0.9, 0.3), (2, 0.5, -0.1), (3, 0.8, 0.1)):
        session.report(Report(0, step, score, violations=(violation,)))
    standing = session.trials[0]
    assert (standing.score, standing.best_step, standing.violation) == (0.5, 2, 0.0)


def test_bounds_of_a_config_are_those_of_all_objectives() -> None:
    made = config(50, objective={"metric": "accuracy", "subject_to": {"loss": {"max": 2}, "accuracy": {"min": 0.1}}})
    assert objectives_of(made).bounds == (Bound("loss", 2.0), Bound("accuracy", 0.1, is_most=False))


@pytest.mark.parametrize(
    ("search", "expected"),
    [
        (
            {"objective": {"metric": "accuracy", "subject_to": {"loss": {}}}},
            "search.objective.subject_to.loss: must have a bound, got none: say max, the most, or min, the least",
        ),
        (
            {"objective": {"metric": "accuracy", "subject_to": {"loss": {"min": 2, "max": 1}}}},
            "search.objective.subject_to.loss.min: must be at most max (1), got 2; are the two reversed?",
        ),
        (
            {
                "objective": [
                    {"metric": "accuracy", "subject_to": {"loss": {"min": 2}}},
                    {"metric": "parameters", "subject_to": {"loss": {"max": 3}}},
                ]
            },
            (
                "search.objective.1.subject_to.loss: has bounds in search.objective.0 as well: write all bounds of a "
                "metric in one place"
            ),
        ),
        (
            {
                "objective": {"metric": "accuracy", "subject_to": {"loss": {"max": 2}}},
                "method": {"type": "population_based_training", "population": 2, "interval_steps": 2, "packed": True},
                "budget": {"trials": 2},
                "space": {"train.optimizer.lr": {"type": "uniform", "low": 0.1, "high": 0.2}},
            },
            (
                "search.objective.subject_to: is not for population_based_training in one process, which compares by "
                "one number itself; use packed: false"
            ),
        ),
    ],
)
def test_bounds_that_cannot_be_kept_are_refused(search: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config(50, **search)
    assert [problem.removeprefix("config: ") for problem in caught.value.problems] == [expected]
