"""Layers are measured one by one, and convolutions by each algorithm that is written for them."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from orchestray.trainers.planning import measured
from orchestray.trainers.planning.analyse import PassCost, analyse
from orchestray.trainers.planning.measured import Ceilings, measure
from orchestray.trainers.planning.subject import Subject
from orchestray.trainers.survey.operators.autotuner import ALGORITHMS


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
    assert {*found.forward_s} == {"0", "1", "2", "3", "5"}  # flattening is a view
    assert {*found.convolutions} == {"0", "2"}
    assert {*found.convolutions["0"]} == {*ALGORITHMS}
    assert all(math.isfinite(seconds) for seconds in found.convolutions["0"].values())
    assert math.isinf(found.convolutions["2"]["Winograd F(2)"])  # its kernels are not square
    assert found.to_json()["convolutions"]["2"]["Winograd F(2)"] is None
    assert found.limit_share("5", counted.layers[-1].forward) > 0


def test_an_algorithm_that_needs_too_much_memory_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured, "_CEILING_S", 0.01)
    monkeypatch.setattr(measured, "_LIMIT_BYTES", 10_000)
    counted = analyse(Subject("model", model().to("meta"), torch.empty(2, 2, 8, 8, device="meta"), 2))
    run: list[str] = []

    def hungry(x: Tensor, weight: Tensor) -> Tensor:
        if not x.is_meta:
            run.append("hungry")
        return functional.conv2d(x, weight) + torch.zeros(100_000, device=x.device)[0]

    monkeypatch.setattr(measured, "ALGORITHMS", {"torch": functional.conv2d, "hungry": hungry})
    found = measure(Subject("model", model(), torch.zeros(2, 2, 8, 8), 2), counted)
    assert math.isinf(found.convolutions["0"]["hungry"])
    assert run == []
    assert math.isfinite(found.convolutions["0"]["torch"])


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
