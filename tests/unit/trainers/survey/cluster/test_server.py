"""A parameter server in virtual time takes its closed forms, keeps its bound, and counts staleness."""

from __future__ import annotations

import numpy as np
import pytest

from orchestray.platform.comm.allreduce.costs import AlphaBeta
from orchestray.platform.sim.network import Link
from orchestray.trainers.survey.cluster.server import parameter_server, parameter_server_s, synchronous_server_s
from orchestray.trainers.survey.cluster.stragglers import Compute
from orchestray.trainers.survey.simulated_training import Load
from orchestray.trainers.survey.simulated_training import parameter_server as message_by_message

LINK = AlphaBeta(1e-3, 1e-9)


def even(num_steps: int, num_workers: int, compute_s: float) -> np.ndarray:
    return np.full((num_steps, num_workers), compute_s)


@pytest.mark.parametrize("num_workers", [1, 2, 3, 16, 50])
@pytest.mark.parametrize("compute_s", [0.0, 0.01, 3.0])
@pytest.mark.parametrize("num_servers", [1, 4])
def test_equal_workers_take_the_closed_forms(num_workers: int, compute_s: float, num_servers: int) -> None:
    for num_steps, num_bytes in ((1, 10**6), (7, 10**6), (4, 10)):
        shape = num_steps, num_workers
        asynchronous = parameter_server(even(*shape, compute_s), num_bytes, LINK, num_servers=num_servers)
        expected_s = parameter_server_s(*shape, compute_s, num_bytes, LINK, num_servers)
        assert asynchronous.finish_s == pytest.approx(expected_s, rel=1e-9)
        synchronous = parameter_server(even(*shape, compute_s), num_bytes, LINK, bound=0, num_servers=num_servers)
        expected_s = synchronous_server_s(*shape, compute_s, num_bytes, LINK, num_servers)
        assert synchronous.finish_s == pytest.approx(expected_s, rel=1e-9)


@pytest.mark.parametrize("num_workers", [1, 2, 7, 20])
def test_an_asynchronous_server_takes_what_its_simulation_message_by_message_takes(num_workers: int) -> None:
    load = Load(num_workers, 6, 10**6, 0.004)
    expected_s = message_by_message(load, Link(LINK.alpha_s, 1 / LINK.beta_s_per_byte)).finish_s
    found = parameter_server(even(6, num_workers, 0.004), load.num_bytes, LINK)
    assert found.finish_s == pytest.approx(expected_s, rel=1e-12)


@pytest.mark.parametrize("bound", [0, 1, 3, 8])
def test_no_worker_is_further_ahead_of_the_slowest_than_its_bound_and_one_reaches_it(bound: int) -> None:
    compute_s = Compute(0.1, speed_spread=0.5).draw(60, 12)
    found = parameter_server(compute_s, 1000, LINK, bound=bound)
    assert found.most_ahead == bound
    # In the worst case each of the other 11 pushes for as many clocks as lie between two bounds.
    assert found.staleness.max() <= 11 * (2 * bound + 1)
    assert len(found.staleness) == 60 * 12


def test_a_higher_bound_waits_less_and_is_staler_and_none_waits_least() -> None:
    compute_s = Compute(0.1, slow_probability=0.05, slow_factor=10, seed=3).draw(100, 30)
    found = [parameter_server(compute_s, 1000, LINK, bound=bound) for bound in (0, 1, 4, None)]
    times_s = [each.finish_s for each in found]
    assert times_s == sorted(times_s, reverse=True)
    assert times_s[0] > 2.5 * times_s[-1]  # nearly each step has a slow worker among the thirty
    staleness = [each.staleness.max() for each in found]
    assert staleness == sorted(staleness)


def test_in_turn_each_gradient_of_an_asynchronous_server_is_one_step_of_the_others_old() -> None:
    found = parameter_server(even(20, 5, 1.0), 1000, LINK)
    assert set(found.staleness[5:].tolist()) == {4}


def test_ten_thousand_workers_take_the_closed_form_too() -> None:
    found = parameter_server(even(3, 10_000, 0.1), 16_000_000, LINK)
    assert found.finish_s == pytest.approx(parameter_server_s(3, 10_000, 0.1, 16_000_000, LINK), rel=1e-9)
