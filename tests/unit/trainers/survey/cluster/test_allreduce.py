"""Vectorised all-reduces take the time of a simulation message by message, and of the closed forms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from orchestray.platform.comm.allreduce.costs import AlphaBeta, cost_s
from orchestray.platform.comm.allreduce.execute import exchanges
from orchestray.platform.comm.allreduce.placement import crossings
from orchestray.platform.comm.allreduce.schedules import ALGORITHMS, schedule
from orchestray.platform.sim.network import Link, SimulatedNetwork
from orchestray.trainers.survey.cluster.allreduce import ALL_REDUCES, all_reduce, hierarchical_s
from orchestray.trainers.survey.cluster.network import Network, Placement, around_ring

NEAR, FAR = AlphaBeta(1e-3, 1e-6), AlphaBeta(5e-3, 4e-6)
NUM_BYTES = 16 * 9 * 5 * 7 * 11  # every part of 2 to 17 workers is whole, or nearly


def simulated(algorithm: str, network: Network, ready_s: np.ndarray) -> list[float]:
    """Return the time at which each worker is done, simulated message by message; no port is shared."""
    size = network.num_workers

    def link(sender: str, receiver: str) -> Link:
        is_far = network.nodes[int(sender)] != network.nodes[int(receiver)]
        model = network.link(is_far=bool(is_far))
        return Link(model.alpha_s, 1 / model.beta_s_per_byte)

    cluster = SimulatedNetwork(link)
    ends: list[dict[int, Any]] = [{} for _ in range(size)]
    for left in range(size):
        for right in range(left + 1, size):
            ends[left][right], ends[right][left] = cluster.pair(str(left), str(right))
    tensor = torch.empty(NUM_BYTES, dtype=torch.uint8, device="meta")
    done_s = [0.0] * size

    def program(rank: int) -> Callable[[], Any]:
        def steps() -> Any:
            yield cluster.sleep(float(ready_s[rank]))
            yield from exchanges(ends[rank], tensor, schedule(algorithm, rank, size, NUM_BYTES))
            done_s[rank] = cluster.now_s

        return steps

    for rank in range(size):
        cluster.start(str(rank), program(rank))
    cluster.run()
    return done_s


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("size", [2, 3, 5, 8, 11, 16])
@pytest.mark.parametrize("placement", ["packed", "scattered", "random"])
def test_workers_that_begin_at_different_times_are_done_when_the_simulation_of_each_message_is(
    algorithm: str, size: int, placement: Placement
) -> None:
    network = Network(size, NEAR, FAR, workers_per_node=3, placement=placement, shares_port=False)
    ready_s = np.random.default_rng(size).random(size)
    done_s = all_reduce(algorithm, network, NUM_BYTES).after(ready_s)
    assert done_s == pytest.approx(simulated(algorithm, network, ready_s), rel=1e-4)  # parts differ by a byte


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("size", [2, 3, 4, 7, 8, 100, 128])
def test_on_equal_links_it_takes_its_closed_form(algorithm: str, size: int) -> None:
    done_s = all_reduce(algorithm, Network(size, NEAR), NUM_BYTES).after(np.zeros(size)).max()
    expected_s = cost_s(algorithm, size, NUM_BYTES, NEAR)
    if algorithm == "ring" or size & (size - 1) == 0:
        assert done_s == pytest.approx(expected_s, rel=1e-12)
    else:  # workers that are folded in, or sit at a smaller branch, may be ahead of the formula
        assert 0.7 * expected_s < done_s <= expected_s * (1 + 1e-12)


@pytest.mark.parametrize(("num_nodes", "group"), [(1, 4), (4, 1), (2, 8), (5, 3), (16, 8)])
@pytest.mark.parametrize("shares_port", [True, False])
@pytest.mark.parametrize("placement", ["packed", "scattered"])
def test_a_hierarchical_all_reduce_takes_two_rings_within_and_one_between(
    num_nodes: int, group: int, *, shares_port: bool, placement: Placement
) -> None:
    network = Network(num_nodes * group, NEAR, FAR, group, placement, shares_port)
    exchange = all_reduce("hierarchical", network, NUM_BYTES)
    done_s = exchange.after(np.zeros(network.num_workers)).max()
    assert done_s == pytest.approx(hierarchical_s(network, NUM_BYTES), rel=1e-12)
    assert exchange.num_bytes.near == pytest.approx(2 * num_nodes * (group - 1) * NUM_BYTES)
    assert exchange.num_bytes.far == pytest.approx(2 * (num_nodes - 1) * NUM_BYTES)


@pytest.mark.parametrize("size", [2, 3, 10, 12, 31])
@pytest.mark.parametrize("far", [NEAR, FAR, AlphaBeta(1e-6, 4e-6), AlphaBeta(0.9, 1e-7)])
@pytest.mark.parametrize("group", [1, 3, 4])
def test_a_ring_in_one_go_is_its_rounds_one_after_the_other(size: int, far: AlphaBeta, group: int) -> None:
    draw = np.random.default_rng(size)
    one_round = all_reduce("ring", Network(size, NEAR, far, group), size * 1e5).rounds[0][0]
    for count in (1, size - 1, size, size + 1, 2 * (size - 1), 3 * size - 1, 5 * size + 2):
        for scale_s in (0.0, 0.1, 1.0, 10.0):
            done_s = ready_s = draw.random(size) * scale_s
            for _ in range(count):
                done_s = one_round.after(done_s)
            in_one_go = around_ring(ready_s, count, one_round.busy_s, one_round.arrival_s)
            assert in_one_go == pytest.approx(done_s, rel=1e-12)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_bytes_between_nodes_are_those_that_cross_in_the_schedules_and_fewest_when_neighbours_share_a_node(
    algorithm: str,
) -> None:
    far_bytes: dict[str, float] = {}
    for placement in ("packed", "scattered", "random"):
        network = Network(16, NEAR, FAR, 4, placement)  # type: ignore[arg-type]
        _, crossed = crossings(algorithm, [str(node) for node in network.nodes], range(16), NUM_BYTES)
        far_bytes[placement] = all_reduce(algorithm, network, NUM_BYTES).num_bytes.far
        assert far_bytes[placement] == pytest.approx(crossed, rel=1e-3)
    assert far_bytes["packed"] <= far_bytes["scattered"]  # a butterfly's sixteen are alike either way
    assert far_bytes["packed"] < far_bytes["random"]


def test_a_shared_port_sends_the_messages_of_its_workers_in_the_time_of_all_of_them() -> None:
    def butterfly_s(*, shares_port: bool) -> float:
        network = Network(8, NEAR, FAR, 4, "packed", shares_port)
        return float(all_reduce("butterfly", network, NUM_BYTES).after(np.zeros(8)).max())

    within_s, alone_s = 2 * NEAR.time_s(NUM_BYTES), FAR.time_s(NUM_BYTES)
    assert butterfly_s(shares_port=False) == pytest.approx(within_s + alone_s)
    assert butterfly_s(shares_port=True) == pytest.approx(within_s + alone_s + 3 * NUM_BYTES * FAR.beta_s_per_byte)


def test_a_port_that_takes_in_several_messages_takes_the_time_of_all_of_them() -> None:
    network = Network(16, NEAR, FAR, 4)
    senders, receivers = np.asarray([4, 8, 12, 13]), np.asarray([0, 1, 2, 5])  # three into node 0, two out of node 3
    one = network.round(senders, receivers, 1e6)
    assert one.busy_s == pytest.approx(1e6 * FAR.beta_s_per_byte * np.asarray([3, 3, 3, 2]))
    assert one.arrival_s == pytest.approx(FAR.alpha_s + one.busy_s)


def test_a_name_without_rounds_and_uneven_nodes_are_refused() -> None:
    with pytest.raises(ValueError, match="hierarchical"):
        all_reduce("star", Network(4, NEAR), 8)
    with pytest.raises(ValueError, match="7 workers on nodes of 4"):
        all_reduce("hierarchical", Network(7, NEAR, FAR, 4), 8)
    assert len(ALL_REDUCES) == 5
