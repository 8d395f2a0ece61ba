"""Group A: all-reduces, their costs and bounds, each by the check the survey names for it.

Times are virtual: a message of n bytes takes L + n G on the simulated network, exactly.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestray.platform.comm.allreduce.costs import (
    AlphaBeta,
    cheapest,
    cost_s,
    costs_s,
)
from orchestray.platform.comm.allreduce.measure import HELD_OUT_BYTES, measure
from orchestray.platform.comm.allreduce.placement import crossings, order_by_node
from orchestray.platform.comm.allreduce.schedules import ALGORITHMS, sent_elements
from orchestray.platform.sim.network import Link, SimulatedNetwork
from orchestray.trainers.survey import all_reduces
from orchestray.trainers.survey.all_reduces import weightless
from support.central_run import central_settings, train_central
from support.threads import run_replicas
from support.training import few_digits

L_S, G_S = 1e-3, 1e-6
LINK = Link(latency_s=L_S, bandwidth_bytes_per_s=1 / G_S)
MODEL = AlphaBeta(L_S, G_S)
POWERS = (2, 4, 8, 16)
SMALL, LARGE = 16, 2**20
"""Bytes: where latency is all, and where bandwidth is."""


def simulate(algorithm: str, size: int, num_bytes: int, link: Link = LINK) -> tuple[float, SimulatedNetwork]:
    """Run an all-reduce in virtual time; return the time at which the last rank has the result."""
    return all_reduces.simulate(algorithm, [weightless(num_bytes)] * size, link)


def sent_by(network: SimulatedNetwork) -> dict[str, int]:
    sent: dict[str, int] = {}
    for (sender, _), traffic in network.traffic.items():
        sent[sender] = sent.get(sender, 0) + traffic.num_bytes
    return sent


# -- the model, and the bounds -----------------------------------------------------------------------------------------


def test_simplified_logp_is_fitted_to_a_running_group_and_to_an_exact_one() -> None:
    fits = run_replicas(2, lambda collective: measure(collective, repeats=3))
    assert fits[0] == fits[1]
    assert min(fits[0].message.alpha_s, fits[0].native.alpha_s) > 0
    assert min(fits[0].message.beta_s_per_byte, fits[0].native.beta_s_per_byte) >= 0
    assert tuple(fits[0].held_out_s) == HELD_OUT_BYTES
    assert min(fits[0].held_out_s.values()) > 0

    def ping(num_bytes: int) -> float:
        network = SimulatedNetwork(LINK)
        here, there = network.pair("0", "1")

        def forth() -> Any:
            yield here.isend(weightless(num_bytes)), here.irecv()

        def back() -> Any:
            yield there.irecv()
            yield there.isend(weightless(num_bytes))

        network.start("0", forth)
        network.start("1", back)
        return network.run() / 2

    sizes = [2**k for k in range(4, 20, 3)]
    fitted = AlphaBeta.fit(sizes, [ping(size) for size in sizes])
    for held_out in (1, 5000, 10**7):
        assert fitted.time_s(held_out) == pytest.approx(ping(held_out), rel=1e-9)


@pytest.mark.parametrize("size", POWERS)
def test_no_allreduce_ends_before_log2_p_latencies_and_the_butterfly_is_first_and_ends_then(size: int) -> None:
    least_s = L_S * math.log2(size)
    times_s = {algorithm: simulate(algorithm, size, SMALL)[0] for algorithm in ALGORITHMS}
    assert min(times_s.values()) >= least_s
    # The bytes are next to nothing, and one byte takes a thousandth of a latency.
    assert times_s["butterfly"] == pytest.approx(least_s * (1 + SMALL * G_S / L_S), rel=1e-9)
    assert all(time_s > times_s["butterfly"] for name, time_s in times_s.items() if name != "butterfly")
    assert simulate("butterfly", size, SMALL, Link(latency_s=L_S))[0] == pytest.approx(least_s, rel=1e-12)


@pytest.mark.parametrize("size", POWERS)
def test_allreduce_bandwidth_lower_bound_holds_in_time_and_at_the_busiest_port(size: int) -> None:
    link = Link(bandwidth_bytes_per_s=1 / G_S)
    taken_s = []
    for algorithm in (*ALGORITHMS, "star"):
        finish_s, network = simulate(algorithm, size, LARGE, link)
        taken_s.append(finish_s)
        assert finish_s >= LARGE * G_S * (1 - 1e-12)
        assert max(traffic.num_bytes for traffic in network.traffic.values()) >= LARGE
        assert max(sent_by(network).values()) >= LARGE
    # Two ranks reach the bound; of more, those come nearest that repeat no addition.
    assert min(taken_s) == pytest.approx(LARGE * G_S * 2 * (size - 1) / size, rel=1e-9)


@pytest.mark.parametrize("size", POWERS)
def test_rabenseifner_sends_the_bytes_of_the_strengthened_bound_in_twice_its_latencies(size: int) -> None:
    both_s, network = simulate("rabenseifner", size, LARGE)
    bytes_s, _ = simulate("rabenseifner", size, LARGE, Link(bandwidth_bytes_per_s=1 / G_S))
    latencies_s, _ = simulate("rabenseifner", size, LARGE, Link(latency_s=L_S))
    assert sent_by(network) == {str(rank): 2 * LARGE * (size - 1) // size for rank in range(size)}
    assert bytes_s == pytest.approx(2 * LARGE * G_S * (size - 1) / size, rel=1e-9)
    assert latencies_s == pytest.approx(2 * L_S * math.log2(size), rel=1e-9)
    assert both_s == pytest.approx(bytes_s + latencies_s, rel=1e-9)
    of_others = [max(sent_by(simulate(name, size, LARGE)[1]).values()) for name in ("tree", "ring", "star")]
    assert min(of_others) >= 2 * LARGE * (size - 1) / size


def test_the_exhibit_names_the_all_reduces_that_come_nearest_to_each_bound() -> None:
    found = all_reduces.measured(sizes=(2, 4, 8))
    assert len(found) == 2 * 3 * 4
    soonest, fewest, strengthened = all_reduces.findings(found)
    assert soonest == "0 of 24 take less than L log2 P; the nearest, butterfly on 2 ranks, takes 1.0160 times that."
    assert fewest == (
        "0 of 24 take less than n G, or send less than n bytes from the busiest rank; the nearest, butterfly on 2 "
        "ranks, takes 1.0010 times that."
    )
    assert strengthened == (
        "Rabenseifner's sends 1.000 times 2 n (P - 1)/P bytes from each rank, in 2.000 times L log2 P."
    )
    below = [replace(each, seconds=each.seconds / 4, most_sent=each.most_sent // 4) for each in found]
    assert "0" not in [line.split(" of ")[0] for line in all_reduces.findings(below)[:2]]


# -- choosing, and the parameter server --------------------------------------------------------------------------------


def test_collective_auto_selection_takes_the_one_that_is_fastest_in_virtual_time() -> None:
    for size in (2, 3, 4, 5, 8, 16):
        for num_bytes in (48, 4800, 24_000, 480_480, 7_207_200):
            times_s = {algorithm: simulate(algorithm, size, num_bytes)[0] for algorithm in ALGORITHMS}
            chosen = cheapest(costs_s(size, num_bytes, MODEL))
            if size in POWERS:
                assert times_s[chosen] == pytest.approx(min(times_s.values()), rel=1e-9)
            else:  # folded ranks may be ahead of the formula, which is the longest a schedule can take
                assert times_s[chosen] <= cost_s(chosen, size, num_bytes, MODEL) * (1 + 1e-9)
                assert times_s[chosen] <= 1.5 * min(times_s.values())


@pytest.mark.parametrize("size", [2, 3, 4, 8, 11, 16])
def test_parameter_server_moves_the_messages_and_bytes_of_a_tree_and_takes_its_time_behind_a_tree(size: int) -> None:
    _, server = simulate("star", size, LARGE)  # rank 0 serves: a push and a pull of each of the others
    tree_s, tree = simulate("tree", size, LARGE)
    counted = [
        (sum(t.num_messages for t in network.traffic.values()), sum(t.num_bytes for t in network.traffic.values()))
        for network in (server, tree)
    ]
    assert counted[0] == counted[1] == (2 * (size - 1), 2 * (size - 1) * LARGE)
    assert tree_s <= cost_s("tree", size, LARGE, MODEL) * (1 + 1e-12)
    if size in POWERS:  # the assumption: pushes are combined on their way through a tree to the server, at its root
        assert tree_s == pytest.approx(cost_s("tree", size, LARGE, MODEL))


@pytest.mark.parametrize("num_workers", [1, 3])
def test_a_parameter_server_of_a_run_moves_the_bytes_of_a_tree_over_it_and_its_workers(
    num_workers: int, tmp_path: Path
) -> None:
    moved = [
        train_central(few_digits, central_settings(num_workers, steps=steps), tmp_path / str(steps)).moved
        for steps in (2, 6)
    ]
    num_weights = sum(each.numel() for each in few_digits().build_model().parameters())
    a_step = (sum(moved[1]) - sum(moved[0])) / 4
    assert a_step == 8 * sum(sent_elements("tree", num_workers + 1, num_weights))


# -- on a network of two levels ----------------------------------------------------------------------------------------


def test_topology_mapping_crosses_fewer_slow_links_than_ranks_at_random() -> None:
    found = all_reduces.placements()
    assert {*found} == {*ALGORITHMS}
    for algorithm, (at_random, mapped) in found.items():
        assert len(at_random) == len(mapped) == 20
        # However the ranks lie, the mapping finds the order of the ordered cluster.
        ordered = all_reduces.crossed(algorithm, all_reduces.NODES, range(16))
        for one, other in zip(at_random, mapped, strict=True):
            assert other == ordered
            assert other.messages < one.messages
            assert other.num_bytes < one.num_bytes
        assert ordered[:2] == crossings(algorithm, all_reduces.NODES, range(16), 1600)


def test_topology_mapping_takes_less_virtual_time_where_links_between_nodes_are_slow() -> None:
    nodes = list("abbabaab")  # a partner at any distance 1, 2, 4 is on the other node
    for algorithm in ("tree", "butterfly", "rabenseifner"):
        as_they_lie, mapped = (
            all_reduces.crossed(algorithm, nodes, order, 800) for order in (range(8), order_by_node(nodes))
        )
        assert mapped.seconds < 0.4 * as_they_lie.seconds
