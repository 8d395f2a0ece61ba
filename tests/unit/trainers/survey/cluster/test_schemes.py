"""Schemes on the simulated cluster: closed forms, stragglers, failures, and ten thousand workers."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from orchestray.platform.comm.allreduce.costs import AlphaBeta, cost_s
from orchestray.platform.sim.network import Link
from orchestray.trainers.survey.cluster.failures import Failures, restarting_goodput
from orchestray.trainers.survey.cluster.gossip import gossip
from orchestray.trainers.survey.cluster.network import Network
from orchestray.trainers.survey.cluster.schemes import SCHEMES, Options, Setting, simulate
from orchestray.trainers.survey.cluster.server import parameter_server_s
from orchestray.trainers.survey.cluster.stragglers import Compute
from orchestray.trainers.survey.simulated_training import Load
from orchestray.trainers.survey.simulated_training import gossip as gossip_by_messages

LINK = AlphaBeta(1e-3, 1e-9)
UNEVEN = Compute(0.1, speed_spread=0.1, slow_probability=0.02, slow_factor=8.0)


def setting(num_workers: int = 16, compute: Compute | None = None, **more: Any) -> Setting:
    network = Network(num_workers, AlphaBeta(1e-5, 1e-10), LINK, workers_per_node=4)
    return Setting(network, 4e6, compute or Compute(0.1), **{"num_steps": 24, **more})


@pytest.mark.parametrize("algorithm", ["ring", "butterfly", "rabenseifner", "tree"])
def test_a_step_of_replicas_is_its_computation_and_the_closed_form_of_the_exchange(algorithm: str) -> None:
    one_level = replace(setting(), network=Network(16, LINK))
    found = simulate(algorithm, one_level)
    assert found.step_s == pytest.approx(0.1 + cost_s(algorithm, 16, 4e6, LINK), rel=1e-9)
    assert (found.goodput, found.staleness, found.far_bytes) == (1.0, 0.0, 0.0)


def test_sharded_parameters_take_and_send_half_as_much_again_as_a_ring() -> None:
    one_level = replace(setting(), network=Network(16, LINK))
    ring, shard = simulate("ring", one_level), simulate("shard", one_level)
    assert shard.step_s - 0.1 == pytest.approx(3 * 15 * LINK.time_s(4e6 / 16), rel=1e-9)
    assert shard.step_s - 0.1 == pytest.approx(1.5 * (ring.step_s - 0.1), rel=1e-9)
    assert (shard.near_bytes, shard.far_bytes) == (pytest.approx(1.5 * ring.near_bytes), 0.0)
    assert simulate("shard", replace(one_level, network=Network(1, LINK))).step_s == pytest.approx(0.1)


def test_local_sgd_sends_once_in_its_steps() -> None:
    one_level = replace(setting(options=Options(local_steps=8)), network=Network(16, LINK))
    every_step, local = simulate("ring", one_level), simulate("local", one_level)
    assert local.near_bytes == pytest.approx(every_step.near_bytes / 8)
    assert local.step_s - 0.1 == pytest.approx((every_step.step_s - 0.1) / 8)


def test_servers_take_their_closed_form_and_only_the_synchronous_one_is_not_stale() -> None:
    found = {name: simulate(name, setting()) for name in ("server", "stale", "async")}
    assert found["async"].step_s * 24 == pytest.approx(parameter_server_s(24, 16, 0.1, 4e6, LINK))
    assert found["server"].staleness == 0
    assert found["stale"].staleness > 0
    assert found["async"].far_bytes == 2 * 16 * 4e6


def test_gossip_takes_what_its_simulation_message_by_message_takes_and_does_not_grow_with_the_workers() -> None:
    load = Load(num_workers=20, num_steps=9, num_bytes=10**6, compute_s=0.05)
    expected_s = gossip_by_messages(load, Link(LINK.alpha_s, 1 / LINK.beta_s_per_byte)).finish_s
    done_s, sent = gossip(np.full((9, 20), 0.05), 10**6, Network(20, LINK))
    assert done_s.max() == pytest.approx(expected_s)
    assert sent.near == 20 * 10**6
    assert simulate("gossip", replace(setting(), network=Network(640, LINK))).step_s == pytest.approx(0.105)


def test_pipelines_wait_for_their_bubble_and_send_a_part_of_the_gradients_each() -> None:
    options = Options(schedule="gpipe", stages=4, micro_batches=12, activation_bytes=6e4)
    found = simulate("pipeline", setting(options=options))
    within = AlphaBeta(1e-5, 1e-10).time_s(6e4 * 4 / 12)
    bubble_s = 0.1 * (12 + 3) / 12 + 2 * 3 * within
    gradient_s = cost_s("ring", 4, 1e6, AlphaBeta(1e-3, 4e-9))  # the four stages of a node share its port
    assert found.step_s == pytest.approx(bubble_s + gradient_s, rel=1e-3)
    assert found.far_bytes == pytest.approx(2 * 3 * 1e6 * 4)
    assert found.near_bytes == pytest.approx(4 * 3 * 2 * 6e4 * 4)


def test_steps_of_pipelines_follow_one_another_and_stragglers_make_them_longer() -> None:
    one_level = replace(setting(compute=UNEVEN, options=Options(stages=4)), network=Network(16, AlphaBeta(0.0, 0.0)))
    longer = replace(one_level, num_steps=2 * one_level.num_steps)
    step_s = simulate("pipeline", one_level).step_s
    assert step_s > simulate("pipeline", replace(one_level, compute=Compute(0.1))).step_s
    assert simulate("pipeline", longer).step_s == pytest.approx(step_s, rel=0.15)


def test_with_stragglers_who_waits_for_fewer_takes_less() -> None:
    found = {name: simulate(name, setting(64, UNEVEN, num_steps=60)).step_s for name in SCHEMES}
    assert found["local"] < found["ring"]
    assert found["gossip"] < 0.7 * found["ring"]  # a slow step reaches the others one after the other
    server = replace(setting(64, UNEVEN, num_steps=60), num_bytes=1e4)
    waits = [simulate(name, server).step_s for name in ("server", "stale", "async")]
    assert waits == sorted(waits, reverse=True)
    assert waits[0] > 2 * waits[2]


def test_failures_cost_those_that_restart_together_what_daly_says_and_those_that_go_on_far_less() -> None:
    failures = Failures(rate_per_s=1e-5, checkpoint_s=2.0, restart_s=60.0)
    failing = setting(256, failures=failures, checkpoint_every=300)
    ring = simulate("ring", failing)
    expected = restarting_goodput(300 * ring.step_s, 256, failures)
    assert ring.goodput == pytest.approx(expected, rel=0.02)
    by_itself = simulate("ring", replace(failing, checkpoint_every=None))
    assert by_itself.goodput > simulate("ring", replace(failing, checkpoint_every=3)).goodput
    assert by_itself.goodput > simulate("ring", replace(failing, checkpoint_every=3000)).goodput
    for name in ("gossip", "async"):
        assert simulate(name, failing).goodput == pytest.approx(1 / (1 + 60e-5))
        assert simulate(name, failing).checkpoint_every is None
    assert ring.useful_step_s == pytest.approx(ring.step_s / ring.goodput)


def test_a_cluster_that_fails_sooner_than_it_saves_never_comes_to_an_end() -> None:
    found = simulate("ring", setting(256, failures=Failures(1.0, 1.0, 1.0), checkpoint_every=100))
    assert (found.goodput, found.to_json()["useful_step_s"]) == (0.0, None)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_ten_thousand_workers_with_stragglers_take_seconds(scheme: str) -> None:
    network = Network(10_000, AlphaBeta(5e-6, 1e-11), AlphaBeta(3e-5, 8e-11), workers_per_node=8)
    began_s = time.process_time()
    found = simulate(scheme, Setting(network, 4e7, UNEVEN, num_steps=8))
    assert time.process_time() - began_s < 60 * 8 / 100
    assert found.step_s > found.compute_s > 0.1


def test_what_there_is_not_is_refused() -> None:
    with pytest.raises(ValueError, match="there is no scheme 'rings'; there are ring, "):
        simulate("rings", setting())
    with pytest.raises(ValueError, match="pipelines of 5 workers each do not divide 16"):
        simulate("pipeline", setting(options=Options(stages=5)))
