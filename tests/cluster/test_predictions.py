"""Models that predict times of training, held against networks that run, two of them as actors of Ray."""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from orchestray.platform.errors import TrainingError
from orchestray.trainers.survey.lab import predicting
from orchestray.trainers.survey.lab.predicting import PUBLISHED, Case, predictions
from support.profiles import profile

if TYPE_CHECKING:
    from orchestray.platform.cluster.cluster import Cluster

SMALL = Case(partial(nn.Linear, 16, 8), (4, 16))
WORKERS = Case(partial(nn.Linear, 32, 16), (8, 32), has_workers=True)


def test_networks_are_run_some_by_two_actors_and_each_error_is_in_the_table_and_in_a_sentence(
    cluster: Cluster,
) -> None:
    exhibit = predictions(6, {"small": SMALL, "workers": WORKERS}, {"fitted": SMALL}, profile())
    rows: list[dict[str, Any]] = [dict(zip(exhibit.columns, row, strict=True)) for row in exhibit.rows]
    assert [row["network"] for row in rows] == ["small", "workers"]
    for row in rows:
        assert row["step, ms"] > 0
        missing = {model for model in PUBLISHED if row[f"{model} is off by"] is None}
        assert missing == ({"two workers"} if row["network"] == "small" else set())
    assert [line.split(":")[0] for line in exhibit.findings[:4]] == list(PUBLISHED)
    assert "over 2 networks; the survey names 10 to 30 %" in exhibit.findings[0]
    assert exhibit.findings[4].endswith("is fitted to fitted.")
    assert cluster.alive()


def test_two_actors_run_a_network_of_the_program_itself(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    def made() -> tuple[nn.Module, torch.Tensor]:
        return nn.Linear(4, 2, device="meta"), torch.empty(3, 4, device="meta")

    monkeypatch.setattr(made, "__module__", "__main__")  # as in a script, which the actors cannot import
    assert predicting.two_workers_s(made, 1) > 0
    assert cluster.alive()


def test_workers_that_end_before_they_are_measured_are_told_in_a_sentence(cluster: Cluster) -> None:
    with pytest.raises(TrainingError, match="one ended before, perhaps for want of memory"):
        predicting.two_workers_s(partial(os._exit, 1), 1)
    assert cluster.alive()
