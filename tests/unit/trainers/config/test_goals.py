"""Goals on the metrics of validations."""

from __future__ import annotations

import math
from typing import Any

import pytest

from orchestray.platform.errors import ConfigError
from orchestray.trainers.config.goals import Best, EarlyStop


def test_the_best_value_is_that_of_the_mode_and_small_gains_do_not_count() -> None:
    stop = EarlyStop("accuracy", patience=2, min_delta=0.1, mode="max")
    best, worse = None, 0
    seen = []
    for value in (0.5, 0.55, 0.7, 0.4, 0.79):
        best, worse = stop.after(best, worse, {"accuracy": value})
        seen.append((best, worse))
    assert seen == [(0.5, 0), (0.5, 1), (0.7, 0), (0.7, 1), (0.7, 2)]
    with pytest.raises(ConfigError, match=r"train\.early_stopping\.metric: the task has no metric 'accuracy'"):
        stop.after(None, 0, {"loss": 1.0})


def test_a_run_whose_first_value_is_not_a_number_ends_only_if_it_stays_so() -> None:
    stop = EarlyStop("loss", patience=3, min_delta=0.0, mode="min")
    assert stop.after(None, 0, {"loss": math.nan}) == (None, 1)
    assert stop.after(None, 1, {"loss": 7.0}) == (7.0, 0)
    assert stop.after(7.0, 0, {"loss": math.nan}) == (7.0, 1)


@pytest.mark.parametrize(("mode", "steps"), [("max", [1, 1, 3, 3, 5]), ("min", [1, 2, 2, 2, 2])])
def test_the_best_checkpoint_is_the_first_with_the_best_value(mode: str, steps: list[int]) -> None:
    best: dict[str, Any] | None = None
    seen = []
    for step, value in enumerate((0.5, 0.3, 0.7, 0.7, 0.9), start=1):
        best = Best("accuracy", mode).after(best, step, {"accuracy": value, "loss": -value})
        assert best is not None
        seen.append(best["step"])
    assert seen == steps
    assert best == {"step": steps[-1], "metric": "accuracy", "mode": mode, "value": 0.9 if mode == "max" else 0.3}


def test_no_value_that_is_not_a_number_is_the_best() -> None:
    rule = Best("loss", "min")
    assert rule.after(None, 1, {"loss": math.nan}) is None
    known = rule.after(None, 1, {"loss": 1.0})
    assert rule.after(known, 2, {"loss": math.nan}) == known


def test_the_best_by_another_metric_or_mode_does_not_count() -> None:
    known = Best("loss", "min").after(None, 1, {"loss": 0.1})
    for rule in (Best("loss", "max"), Best("error", "min")):
        found = rule.after(known, 2, {"loss": 0.01, "error": 5.0})
        assert found is not None
        assert found["step"] == 2


def test_a_best_checkpoint_by_a_metric_that_there_is_not_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"checkpoint\.best\.metric: the task has no metric 'acuracy'; did you mean"):
        Best("acuracy", "max").after(None, 1, {"accuracy": 1.0, "loss": 0.0})
