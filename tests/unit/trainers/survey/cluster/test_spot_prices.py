"""A training on rented machines: what it pays, and what a cluster that changes its size saves."""

from __future__ import annotations

import numpy as np
import pytest

from orchestray.trainers.survey.cluster.spot_prices import (
    ON_DEMAND,
    Job,
    elastic,
    fixed,
    price_trace,
    rent,
    worth_of_work,
)

SPEEDS = tuple(count / (1 + 0.05 * max(0, count - 1)) for count in range(9))


def test_a_fixed_cluster_pays_each_hour_s_price_and_the_last_in_part() -> None:
    bill = rent(Job(5.0, (0.0, 1.0, 2.0), 10), [0.5, 0.25, 1.0, 9.0], fixed(2))
    assert (bill.cost, bill.hours, bill.resizes) == (2 * 0.5 + 2 * 0.25 + 1.0, 2.5, 1)


def test_a_change_of_the_machines_costs_its_part_of_an_hour() -> None:
    bill = rent(Job(2.0, (0.0, 1.0), 10, resize_hours=0.25), [1.0] * 9, lambda hour, *_: hour % 2)
    assert bill.machines == [0, 1, 0, 1, 0, 1]
    assert (bill.resizes, bill.cost, bill.hours) == (5, pytest.approx(2.75), pytest.approx(5.75))


def test_at_one_price_an_elastic_cluster_keeps_the_size_with_the_cheapest_work() -> None:
    job = Job(20.0, SPEEDS, 40)
    prices = np.full(40, 0.5)
    bill = rent(job, prices, elastic(job, worth_of_work(job, prices)))
    assert set(bill.machines) == {1}
    assert bill.cost == pytest.approx(rent(job, prices, fixed(1)).cost)


@pytest.mark.parametrize("resize_hours", [0.0, 0.1])
def test_an_elastic_cluster_keeps_its_deadline_on_prices_it_has_not_seen_and_saves_on_average(
    resize_hours: float,
) -> None:
    job = Job(100.0, SPEEDS, 72, resize_hours)
    saved, saved_at_most = [], []
    for seed in range(40):
        prices = price_trace(144, np.random.default_rng(seed))
        assert (prices > 0).all()
        assert (prices <= ON_DEMAND).all()
        past, coming = prices[:72], prices[72:]
        bill = rent(job, coming, elastic(job, worth_of_work(job, past)))
        known = rent(job, coming, elastic(job, worth_of_work(job, coming)))
        of_fixed = rent(job, coming, fixed(2)).cost
        assert max(bill.hours, known.hours) <= 72
        saved.append(1 - bill.cost / of_fixed)
        saved_at_most.append(1 - known.cost / of_fixed)
    assert 0.05 < np.mean(saved) < np.mean(saved_at_most)


def test_work_that_no_number_of_machines_does_in_time_is_refused() -> None:
    with pytest.raises(ValueError, match="2 machines do not do 10"):
        Job(10.0, (0.0, 1.0, 2.0), 4)
