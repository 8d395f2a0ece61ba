"""Advice follows the rules of the surveys."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from orchestray.platform.comm.allreduce.costs import AlphaBeta, cost_s
from orchestray.platform.comm.allreduce.schedules import ALGORITHMS
from orchestray.trainers.planning.advice import (
    Memory,
    Needs,
    centralised_or_not,
    when_to_distribute,
    which_consistency,
)
from orchestray.trainers.planning.advised import sizes_of
from orchestray.trainers.survey.cluster.stragglers import Compute

ROOT = Path(__file__).parents[4]

DEVICE_BYTES = 16e9
MNIST = Memory(model_bytes=16 * 1.2e6, activation_bytes=5e6, data_bytes=60_000 * 784 * 4)
IMAGENET = Memory(model_bytes=16 * 25.6e6, activation_bytes=3e9, data_bytes=1_281_167 * 3 * 224 * 224 * 4)
OVERSIZE = Memory(model_bytes=16 * 7e9, activation_bytes=4e9, data_bytes=1e9)


def test_when_to_distribute_is_never_for_mnist_by_data_for_imagenet_and_by_parts_for_a_model_that_fits_nowhere() -> (
    None
):
    advice = [when_to_distribute(each, DEVICE_BYTES) for each in (MNIST, IMAGENET, OVERSIZE)]
    assert [each.choice for each in advice] == ["single", "data parallel", "split"]
    assert [each.least_parts for each in advice] == [1, 1, 8]
    assert "188 MB of data fit" in advice[0].reason
    both = when_to_distribute(Memory(OVERSIZE.model_bytes, 0.0, IMAGENET.data_bytes), DEVICE_BYTES)
    assert both.choice == "split and data parallel"


def test_data_that_advice_keeps_in_one_process_were_measured_to_be_learned_faster_there() -> None:
    measured = json.loads((ROOT / "benchmarks" / "results" / "small_data.json").read_text(encoding="utf-8"))
    of = {each["name"]: each["values"] for each in measured["measurements"]}
    one, two = (of[f"{side}: first step to last"] for side in ("one process", "two workers"))
    assert len(one) == len(two) >= 3
    assert max(one) < min(two)
    assert of["one process: accuracy"] == of["two workers: accuracy"]  # the same training
    sizes = sizes_of(str(ROOT / measured["settings"]["config"]))
    device_bytes = 1e9 * measured["machine"]["memory_gb"]
    assert when_to_distribute(sizes.memory, device_bytes).choice == "single"
    # On a device that the data do not fit, it advises to distribute the same training.
    assert when_to_distribute(sizes.memory, sizes.memory.data_bytes / 2).choice != "single"


def table() -> list[tuple[int, float, Needs, str]]:
    small, large = 1e3, 1e8
    return [
        (8, small, Needs(), "all-reduce"),
        (8, large, Needs(), "all-reduce"),
        (1000, large, Needs(), "all-reduce"),
        (2, 0.0, Needs(has_no_centre=True), "all-reduce"),
        (8, large, Needs(is_asynchronous=True), "server"),
        (8, large, Needs(is_elastic=True), "server"),
        (8, large, Needs(is_elastic=True, has_no_centre=True), "gossip"),
        (8, large, Needs(is_asynchronous=True, has_no_centre=True), "gossip"),
        (1, large, Needs(), "server"),  # nothing to exchange: no all-reduce costs less
    ]


@pytest.mark.parametrize(("num_workers", "num_bytes", "needs", "choice"), table())
def test_centralised_or_not_is_the_least_cost_unless_asynchrony_or_faults_decide(
    num_workers: int, num_bytes: float, needs: Needs, choice: str
) -> None:
    link = AlphaBeta(3e-5, 8e-10)
    found = centralised_or_not(num_workers, num_bytes, link, needs)
    assert found.choice == choice
    costs = {name: cost_s(name, num_workers, num_bytes, link) for name in ALGORITHMS}
    assert found.all_reduce_s == min(costs.values()) == costs[found.algorithm]
    assert found.server_s == costs["tree"]
    if needs == Needs():
        assert (found.choice == "all-reduce") == (found.all_reduce_s < found.server_s)


def test_what_a_server_and_the_best_all_reduce_cost_is_what_the_survey_s_formulas_come_to() -> None:
    """Compute with 30 us and 0.8 ns/B by hand: a tree of 3 levels there and back, and each of the all-reduces."""
    link = AlphaBeta(3e-5, 8e-10)
    large = centralised_or_not(8, 1e8, link)  # 0.08 s for all bytes at once
    assert large.server_s == pytest.approx(2 * 3 * 0.08003, rel=1e-12)
    assert (large.algorithm, large.all_reduce_s) == ("rabenseifner", pytest.approx(6 * 3e-5 + 0.14, rel=1e-12))
    small = centralised_or_not(8, 1e3, link)  # 0.8 us
    assert small.server_s == pytest.approx(6 * 30.8e-6, rel=1e-12)
    assert (small.algorithm, small.all_reduce_s) == ("butterfly", pytest.approx(3 * 30.8e-6, rel=1e-12))


def test_consistency_follows_the_stragglers() -> None:
    even = which_consistency(Compute(0.1, speed_spread=0.01), 32)
    assert (even.choice, even.bound) == ("synchronous", 0)
    sometimes = which_consistency(Compute(0.1, slow_probability=0.01, slow_factor=4.0), 32)
    assert sometimes.choice == "stale-synchronous"
    assert sometimes.bound is not None
    assert sometimes.slowdowns[-1][1] <= 1.1 < sometimes.slowdowns[-2][1]
    always = which_consistency(Compute(0.1, speed_spread=0.5), 32)
    assert (always.choice, always.bound) == ("asynchronous", None)


def test_frozen_parameters_take_memory_once_and_trained_ones_with_their_gradients_and_moments(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("""
from torch import nn

class Adapted(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(10, 10, bias=False).requires_grad_(False), nn.Linear(10, 1, bias=False))
""")
    sizes = sizes_of(f"{tmp_path}/own.py:Adapted", shapes=["3,10"])
    assert sizes.memory.model_bytes == 4 * (100 + 4 * 10)
