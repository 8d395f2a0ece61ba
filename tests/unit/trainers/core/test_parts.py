"""The classes of a run are those of its live objects, and not what its config asked for."""

from __future__ import annotations

import torch
from torch import nn

from orchestray.trainers.aggregation.base import make_aggregation
from orchestray.trainers.core.parts import parts_of, reports_of
from orchestray.trainers.optim.factory import make_optimizer
from orchestray.trainers.optim.params import Sgd


def test_the_parts_are_the_classes_of_what_objects_hold_in_containers_and_models() -> None:
    held = {"rules": [make_aggregation("krum", byzantine=1)], "optimizer": (make_optimizer("sgd", lr=0.1),)}
    assert parts_of(held) == ["trainers.aggregation.Aggregation", "trainers.aggregation.Krum", "trainers.optim.SGD"]


def test_a_section_of_a_config_is_no_part() -> None:
    assert parts_of([Sgd(type="sgd", lr=0.1)]) == []


def test_objects_that_hold_each_other_are_each_looked_at_once() -> None:
    held = [make_optimizer("sgd", lr=0.1)]
    held.append(held)  # type: ignore[arg-type]
    assert parts_of(held, held) == ["trainers.optim.SGD"]


def test_containers_of_data_are_not_looked_through() -> None:
    assert parts_of([make_optimizer("sgd", lr=0.1)] * 1_001) == []


def test_only_the_folders_that_are_asked_for_count() -> None:
    held = [make_aggregation("multi_krum", byzantine=1), nn.Linear(2, 2), make_optimizer("sgd", lr=0.1)]
    assert parts_of(held, folders=("trainers.aggregation",)) == [
        "trainers.aggregation.Aggregation",
        "trainers.aggregation.multi_krum",
    ]


def test_objects_say_what_they_did_by_their_class_and_nothing_before_they_did_it() -> None:
    optimizers = [make_optimizer("sgd", lr=0.1, momentum=0.9), make_optimizer("sgd", lr=0.1)]
    parameter = torch.zeros(3)
    for optimizer in optimizers:
        optimizer.init([("a", parameter)])
    assert reports_of(optimizers) == {}
    optimizers[0].step([parameter], [torch.ones(3)], 0.1)
    assert reports_of(optimizers) == {"SGD": [{"momentum": 0.9, "nesterov": False}]}
