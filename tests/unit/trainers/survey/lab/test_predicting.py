"""Models that predict times of training are held against networks that they have not seen."""

from __future__ import annotations

from functools import partial

import pytest
from torch import nn

from orchestray.trainers.survey.cost_models.models import cpu_distributed_s, gemm_lookup_s, paleo_s
from orchestray.trainers.survey.lab import predicting
from orchestray.trainers.survey.lab.predicting import FITTED, HELD_OUT, Case, count
from support.profiles import profile

SMALL = Case(partial(nn.Linear, 16, 8), (4, 16))
WORKERS = Case(partial(nn.Linear, 32, 16), (8, 32), has_workers=True)


def test_an_error_is_the_prediction_over_the_measured_time_less_one(monkeypatch: pytest.MonkeyPatch) -> None:
    taken_s = [4e-3, *[1e-3] * 30, *[2e-3] * 9]
    monkeypatch.setattr(predicting, "two_workers_s", lambda *_: 3e-3)
    found = predicting.errors_of(WORKERS, taken_s, profile(), 0.5)
    counts = count(*WORKERS())
    assert found == {
        "Paleo": paleo_s(counts, profile(), percent_of_peak=0.5) / 1e-3 - 1,
        "table of products": gemm_lookup_s(counts, profile()) / 1e-3 - 1,
        "two workers": cpu_distributed_s(1e-3, counts.parameter_bytes, profile()) / 3e-3 - 1,
        # The first 20 steps are one of 4 ms and 19 of 1 ms: 43 ms. The epoch took 52.
        "whole epoch": pytest.approx(43 / 52 - 1),
    }


def test_ten_networks_or_more_are_predicted_and_none_of_those_is_one_that_a_model_is_fitted_to() -> None:
    assert len(HELD_OUT) >= 10
    assert not {*HELD_OUT} & {*FITTED}
    works = [count(*case()).work for case in (*HELD_OUT.values(), *FITTED.values())]
    assert len(set(works)) == len(works)


def test_an_epoch_has_the_steps_that_are_asked_for_unless_they_take_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(predicting.steps_of(SMALL, 7)) == 7
    assert len(predicting.steps_of(SMALL, 53)) == 53
    monkeypatch.setattr(predicting, "_EPOCH_S", 0.0)
    assert len(predicting.steps_of(SMALL, 53)) == 2 * predicting.FIRST_STEPS
