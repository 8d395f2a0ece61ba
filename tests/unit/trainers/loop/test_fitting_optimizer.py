"""Optimizers refused where the model has not what they name."""

from __future__ import annotations

import pytest

from orchestray.platform.errors import ConfigError
from orchestray.trainers.loop.replica import Replica
from support.layouts import layout_settings
from support.training import few_digits, stream_of


def test_a_group_of_an_outer_optimizer_that_matches_no_parameter_is_refused_before_the_first_step() -> None:
    outer = {"type": "sgd", "lr": 0.7, "groups": [{"match": "*.biass", "weight_decay": 0.0}]}
    settings = layout_settings({"data": 2}, {"type": "averaging", "every": 2, "outer_optimizer": outer})
    task = few_digits()
    with pytest.raises(ConfigError, match=r"exchange\.outer_optimizer\.groups\.0\.match: no parameter .*'\*\.biass'"):
        Replica(task, settings, stream_of(task, settings))
