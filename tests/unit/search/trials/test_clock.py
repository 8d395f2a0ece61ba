"""Budgets in epochs and samples: trials with other batch sizes see the same data, and report at the same units."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from orchestray.platform.errors import ConfigError
from orchestray.search.config.load import load_search_config
from orchestray.search.config.trial import trial_config
from orchestray.search.results.curve import curve_of
from orchestray.search.results.writer import SearchRecords
from orchestray.search.trials.clock import Clock, steps_per_epoch
from orchestray.search.trials.task_cache import TaskCache
from orchestray.search.trials.training import TrainingTrial
from orchestray.trainers.config.load import load_train_config
from support.search_loop import loop_of

SAMPLES = 64
"""Samples of the tiny task."""


def config(method: dict[str, Any] | None = None, **search: Any) -> Any:
    return load_search_config(
        {
            "name": "batch",
            "base": {
                "task": {"type": "support.tiny_task:TinyTask", "num_samples": SAMPLES},
                "train": {"batch_size": 8, "optimizer": {"type": "sgd", "lr": 0.1}},
            },
            "search": {
                "method": method or {"type": "grid"},
                "objective": {"metric": "accuracy"},
                "space": {"train.batch_size": {"type": "choice", "values": [4, 16, 24]}},
                **search,
            },
        }
    )


def test_units_and_steps_are_each_others_inverse() -> None:
    epochs, samples, steps = Clock.of("epochs", 16, lambda: 23), Clock.of("samples", 16, lambda: 0), Clock()
    assert [epochs.steps(2), samples.steps(33), samples.steps(32), steps.steps(7)] == [46, 3, 2, 7]
    assert [epochs.reached(46, 2), epochs.reached(45, 2), samples.reached(3, 33), samples.reached(2, 33)] == [
        2,
        1,
        33,
        32,
    ]
    for clock in (epochs, samples, steps, Clock.of("samples", 7, lambda: 0)):
        for units in range(1, 60):
            assert clock.reached(clock.steps(units), units) == units
            assert clock.reached(clock.steps(units) - 1, units) < units


def trained(searched: Any, folder: Path) -> tuple[dict[int, Any], list[tuple[int, int]], list[Any]]:
    with SearchRecords.create(folder, searched.name) as records:
        loop = loop_of(searched, records)
        loop.run()
        loop.close()
        reports = [(line["trial"], line["step"]) for line in _lines(records)]
        return dict(records.lines), reports, [order.config for order in loop.begun]


def _lines(records: SearchRecords) -> list[dict[str, Any]]:
    from orchestray.platform.run.metrics import read_lines

    return read_lines(records.paths.reports)


def test_trials_of_some_epochs_are_those_of_plain_trainings_whatever_their_batch_size(tmp_path: Path) -> None:
    searched = config(budget={"epochs_per_trial": 3})
    lines, reports, configs = trained(searched, tmp_path)
    assert reports == [(0, 3), (1, 3), (2, 3)]
    assert [(one.train.epochs, one.train.steps) for one in configs] == [(3, None)] * 3
    for trial, made in enumerate(configs):
        alone = TrainingTrial(made)
        num_steps = 3 * -(-SAMPLES // made.train.batch_size)
        assert alone.advance(num_steps).metrics["accuracy"] == lines[trial]["objective"]
        assert alone.step == num_steps


def test_trials_of_some_samples_have_as_many_steps_as_their_batches_need(tmp_path: Path) -> None:
    lines, _, configs = trained(config(budget={"samples_per_trial": 96}), tmp_path)
    assert [(one.train.epochs, one.train.steps) for one in configs] == [(None, 24), (None, 6), (None, 4)]
    assert [line["steps"] for line in lines.values()] == [96] * 3


@pytest.mark.parametrize(
    ("budget", "unit", "rungs"),
    [
        ({"epochs_per_trial": 4}, {"grace_steps": 1}, {1, 2, 4}),
        ({"samples_per_trial": 80}, {"grace_steps": 20}, {20, 40, 80}),
    ],
)
def test_rungs_count_in_the_unit_of_the_budget(
    tmp_path: Path, budget: dict[str, int], unit: dict[str, int], rungs: set[int]
) -> None:
    method = {"type": "asha", "eta": 2, **unit, "proposals": {"type": "grid"}}
    _, reports, _ = trained(config(method, budget=budget), tmp_path)
    assert {step for _, step in reports} <= rungs
    assert [step for _, step in reports].count(min(rungs)) == 3


def test_a_trial_that_needs_no_step_for_its_next_report_reports_its_state_again() -> None:
    trial = TrainingTrial(
        trial_config(config(budget={"samples_per_trial": 96}), {"train.batch_size": 24}), unit="samples"
    )
    first, second = trial.advance(30), trial.advance(40)
    assert (first.step, second.step, trial.step) == (30, 40, 2)
    assert first.metrics["accuracy"] == second.metrics["accuracy"]


def test_a_trial_that_is_interrupted_has_not_reached_its_unit() -> None:
    trial = TrainingTrial(trial_config(config(budget={"epochs_per_trial": 2}), {"train.batch_size": 4}), unit="epochs")
    trial.request_stop()
    progress = trial.advance(1)
    assert progress.is_interrupted
    assert progress.step == 0
    assert trial.advance(1).step == 1
    assert trial.step == SAMPLES // 4


def test_the_steps_of_an_epoch_are_those_of_the_training() -> None:
    made = load_train_config(trial_config(config(budget={"epochs_per_trial": 2}), {"train.batch_size": 24}))
    assert steps_per_epoch(made, TaskCache()) == 3


def test_the_curve_of_the_best_run_is_in_steps() -> None:
    reports = [{"trial": 0, "step": step, "metrics": {"loss": 1.0}} for step in (1, 2, 3)]
    assert [line["step"] for line in curve_of(reports, 0, 3, 3.0, 69)] == [23, 46, 69]
    assert [line["step"] for line in curve_of(reports, 0, 3, 3.0)] == [1, 2, 3]


@pytest.mark.parametrize(
    ("search", "expected"),
    [
        (
            {"budget": {"epochs_per_trial": 1, "samples_per_trial": 3}},
            "search.budget.samples_per_trial: is given beside epochs_per_trial: say the length of a trial in one unit",
        ),
        ({"budget": {"epochs_per_trial": 1.5}}, "search.budget.epochs_per_trial: must be a whole number, got 1.5"),
        ({"budget": {"trials": 3}}, "is required, and missing: how long is each trial trained"),
        (
            {
                "method": {"type": "population_based_training", "population": 2, "interval_steps": 1},
                "budget": {"epochs_per_trial": 4, "trials": 2},
            },
            "search.space.train.batch_size: must stay as it is while a trial is counted in epochs",
        ),
        (
            {
                "method": {"type": "population_based_training", "population": 2, "interval_steps": 1, "packed": True},
                "space": {"train.optimizer.lr": {"type": "uniform", "low": 0.1, "high": 0.2}},
                "budget": {"epochs_per_trial": 4, "trials": 2},
            },
            "search.budget.epochs_per_trial: is not for population_based_training in one process, which counts steps",
        ),
    ],
)
def test_budgets_that_do_not_fit_are_refused(search: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config(**search)
    *others, problem = caught.value.problems
    assert expected in problem
    assert not others or "trials" in search["budget"], "one mistake is one line"
