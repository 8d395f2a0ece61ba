"""Layers are measured one by one, and convolutions by each algorithm that is written for them."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from orchestray.trainers.planning import measured
from orchestray.trainers.planning.analyse import PassCost, analyse
from orchestray.trainers.planning.measured import Ceilings, measure
from orchestray.trainers.planning.subject import Subject
from orchestray.trainers.survey.operators.autotuner import ALGORITHMS, extra_bytes


def model() -> nn.Sequential:
    return nn.Sequential(
        *(nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(), nn.Conv2d(3, 4, (3, 5)), nn.Conv2d(4, 4, 3, stride=2)),
        *(nn.Flatten(), nn.Linear(4 * 2 * 1, 3)),
    )


def test_each_layer_has_a_time_and_each_convolution_with_stride_1_one_for_each_algorithm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(measured, "_CEILING_S", 0.01)
    counted = analyse(Subject("model", model().to("meta"), torch.empty(2, 2, 8, 8, device="meta"), 2))
    found = measure(Subject("model", model(), torch.zeros(2, 2, 8, 8), 2), counted)
    assert {*found.forward_s} == {*found.backward_s} == {"0", "1", "2", "3", "5"}  # flattening is a view
    assert {*found.convolutions} == {"0", "2"}
    assert {*found.convolutions["0"]} == {*ALGORITHMS}
    assert all(math.isfinite(seconds) for seconds in found.convolutions["0"].values())
    assert math.isinf(found.convolutions["2"]["Winograd F(2)"])  # its kernels are not square
    assert found.to_json()["convolutions"]["2"]["Winograd F(2)"] is None
    told = found.to_json()
    assert min(*told["forward_s"].values(), *told["backward_s"].values()) > 0
    last = counted.layers[-1]
    assert told["limits_s"][last.name] == {
        "forward": found.ceilings.limit_s(last.forward),
        "backward": found.ceilings.limit_s(last.backward),
    }


def test_an_algorithm_that_needs_more_memory_than_it_may_has_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured, "_CEILING_S", 0.01)
    counted = analyse(Subject("model", model().to("meta"), torch.empty(2, 2, 8, 8, device="meta"), 2))
    found = measure(Subject("model", model(), torch.zeros(2, 2, 8, 8), 2), counted, limit_bytes=5000)
    needed = {
        name: extra_bytes(one, torch.zeros(2, 2, 10, 10), torch.zeros(3, 2, 3, 3)) for name, one in ALGORITHMS.items()
    }
    assert 0 < sum(num_bytes > 5000 for num_bytes in needed.values()) < len(needed)
    for name, seconds in found.convolutions["0"].items():
        assert math.isfinite(seconds) == (needed[name] <= 5000), name


def test_an_attention_is_measured_whole_though_it_holds_a_layer_that_is_never_called(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(measured, "_CEILING_S", 0.01)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
    counted = analyse(Subject("model", copy.deepcopy(layer).to("meta"), torch.empty(2, 3, 8, device="meta"), 2))
    found = measure(Subject("model", layer, torch.zeros(2, 3, 8), 2), counted)
    assert {"self_attn", "linear1", "linear2", "norm1", "norm2"} <= {*found.forward_s}


def test_the_limit_is_that_of_the_slower_of_computing_and_moving() -> None:
    ceilings = Ceilings(operations_per_s=100.0, bytes_per_s=10.0)
    assert ceilings.limit_s(PassCost(work=200, multiplications=100, depth=1, num_bytes=10)) == 2.0
    assert ceilings.limit_s(PassCost(work=200, multiplications=100, depth=1, num_bytes=50)) == 5.0
    assert ceilings.reached(PassCost(work=200, multiplications=100, depth=1, num_bytes=50), 20.0) == 0.25
