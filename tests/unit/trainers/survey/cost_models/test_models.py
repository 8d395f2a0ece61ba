"""Each model gives the time of its formula, on a machine whose times are closed forms."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orchestray.trainers.analysis.products import Product
from orchestray.trainers.machine.gemm import GemmTable, shapes
from orchestray.trainers.machine.profile import Compute, Contention
from orchestray.trainers.machine.transfers import ring_s
from orchestray.trainers.survey.cost_models.counted import Counted
from orchestray.trainers.survey.cost_models.models import (
    cpu_distributed_s,
    epoch_s,
    fitted_percent_of_peak,
    gemm_lookup_s,
    paleo_s,
)
from support.profiles import FLOPS_PER_S, LINK, profile

STEP = Counted(10**9, 10**6, (Product(100, 50, 30), Product(10, 20, 30, 4)), 1 << 20)


def test_paleo_divides_the_operations_by_the_speed_and_adds_the_ring() -> None:
    assert paleo_s(STEP, profile()) == pytest.approx(10**9 / FLOPS_PER_S)
    assert paleo_s(STEP, profile(), percent_of_peak=0.5, threads=2) == pytest.approx(10**9 / FLOPS_PER_S)
    ring = ring_s("all_reduce", 4, 1 << 20, LINK)
    assert paleo_s(STEP, profile(), ranks=4) == pytest.approx(10**9 / FLOPS_PER_S + ring)


def test_the_percent_of_peak_is_that_of_the_measured_steps() -> None:
    share = fitted_percent_of_peak([(STEP, 10**9 / FLOPS_PER_S / part) for part in (0.2, 0.3, 0.9)], profile())
    assert share == pytest.approx(0.3)
    assert paleo_s(STEP, profile(), percent_of_peak=share) == pytest.approx(10**9 / FLOPS_PER_S / 0.3)


def test_the_table_adds_up_each_product_as_often_as_it_occurs() -> None:
    flops = 2 * (100 * 50 * 30 + 4 * 10 * 20 * 30)
    assert gemm_lookup_s(STEP, profile()) == pytest.approx(flops / FLOPS_PER_S)
    assert gemm_lookup_s(STEP, profile(), dtype="bfloat16") == pytest.approx(flops / FLOPS_PER_S / 8)
    # Each has the time of its own shape, whatever the number of its operations.
    sizes = (1, 16, 256)
    table = GemmTable(sizes, tuple(1e-9 * m**0.5 * n**0.9 for m, n, _ in shapes(sizes)))
    machine = replace(profile(), compute={1: Compute({"float32": table}, 1e10, 1e-6)})
    taken_s = 1e-9 * (100**0.5 * 50**0.9 + 4 * 10**0.5 * 20**0.9)
    assert gemm_lookup_s(STEP, machine) == pytest.approx(taken_s)


def test_data_parallel_workers_compute_and_then_reduce() -> None:
    machine = replace(profile(), contention=Contention({1: 1.0, 2: 1.5}, {1: 1.0, 2: 2.0}), cores=2)
    reduce_s = ring_s("all_reduce", 2, 1 << 20, LINK)
    assert cpu_distributed_s(0.01, 1 << 20, machine) == pytest.approx(0.015 + reduce_s)


def test_an_epoch_is_its_first_step_and_the_median_of_the_others_for_the_rest() -> None:
    assert epoch_s([9.0, 1.0, 2.0, 3.0], 101) == pytest.approx(9.0 + 100 * 2.0)
    with pytest.raises(ValueError, match="two steps"):
        epoch_s([1.0], 10)
