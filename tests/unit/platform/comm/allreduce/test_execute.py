"""Schedules carried out over process groups, channels and the simulated network."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from orchestray.platform.comm.allreduce.costs import AlphaBeta, cost_s
from orchestray.platform.comm.allreduce.execute import Lane, Reducer, all_reduce, exchanges
from orchestray.platform.comm.allreduce.measure import measure
from orchestray.platform.comm.allreduce.schedules import ALGORITHMS, Step, num_rounds, schedule, sent_elements
from orchestray.platform.comm.channel import ChannelClosedError, thread_pair
from orchestray.platform.comm.collective import Collective, PeerLostError
from orchestray.platform.sim.network import Link, SimulatedNetwork
from support.patience import PATIENCE_S
from support.threads import make_gloo_threads, run_replicas

Channels = dict[int, Any]


def all_reduce_over(channels: Channels, tensor: Tensor, steps: list[Step]) -> None:
    """Carry it out over one channel to each rank that the steps name."""
    for handles in exchanges(channels, tensor, steps):
        for handle in handles:
            handle.wait()


def drawn(rank: int, num_elements: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(num_elements, generator=torch.Generator().manual_seed(rank), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_over_a_process_group_every_rank_ends_with_the_same_bits_and_has_sent_what_the_schedule_says(size: int) -> None:
    cases = [(a, n, d) for a in ALGORITHMS for n in (0, 1, size + 1, 1000) for d in (torch.float32, torch.float64)]

    def replica(collective: Collective) -> list[tuple[Tensor, int]]:
        found = []
        for algorithm, num_elements, dtype in cases:
            tensor = drawn(collective.rank, num_elements, dtype)
            before = collective.own_bytes_sent
            all_reduce(collective, tensor, schedule(algorithm, collective.rank, size, num_elements))
            found.append((tensor, collective.own_bytes_sent - before))
        return found

    ranks = run_replicas(size, replica)
    for (algorithm, num_elements, _), *results in zip(cases, *ranks, strict=True):
        expected = torch.stack([drawn(rank, num_elements, torch.float64) for rank in range(size)]).sum(0)
        sent = sent_elements(algorithm, size, num_elements)
        for rank, (tensor, num_bytes) in enumerate(results):
            assert torch.equal(tensor, results[0][0])
            assert num_bytes == sent[rank] * tensor.element_size()
        torch.testing.assert_close(results[0][0].double(), expected, rtol=1e-5, atol=1e-5)


def test_several_all_reduces_under_way_are_each_their_own_sum_whatever_the_caller_does_meanwhile() -> None:
    size, numels = 3, [5, 4000, 1, 333]

    def replica(collective: Collective) -> tuple[list[Tensor], Tensor]:
        reducer = Reducer(collective.sibling("schedules"))
        tensors = [drawn(10 * n + collective.rank, numel) for n, numel in enumerate(numels)]
        pending = [reducer.start(tensor, algorithm) for tensor, algorithm in zip(tensors, ALGORITHMS, strict=True)]
        beside = torch.ones(3) * collective.rank
        collective.all_reduce(beside)
        for work in reversed(pending):
            work.wait()
            work.wait()  # a second time changes nothing
        return tensors, beside

    ranks = run_replicas(size, replica)
    for n, numel in enumerate(numels):
        expected = sum(drawn(10 * n + rank, numel) for rank in range(size))
        for tensors, beside in ranks:
            assert torch.equal(tensors[n], ranks[0][0][n])
            torch.testing.assert_close(tensors[n], expected)
            assert beside.tolist() == [3, 3, 3]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_lost_peer_is_a_peer_lost_error_on_every_other_rank_and_for_all_that_is_under_way(algorithm: str) -> None:
    size, lost = 4, 2
    all_have_met = threading.Barrier(size)

    def replica(collective: Collective) -> int:
        sibling = collective.sibling("schedules")
        all_have_met.wait(PATIENCE_S)  # one that is gone before would keep the others from meeting
        if collective.rank == lost:
            collective.abort()
            return 0
        reducer = Reducer(sibling)
        pending = [reducer.start(torch.ones(1000), algorithm) for _ in range(3)]
        raised = 0
        for work in pending:
            try:
                work.wait()
            except PeerLostError:
                collective.abort()  # as the replica's loop does, so that others need not wait for this one
                raised += 1
        return raised

    raised = run_replicas(size, replica)
    assert [count for rank, count in enumerate(raised) if rank != lost] == [3, 3, 3]


def test_a_lane_does_its_jobs_in_order_and_its_thread_ends_with_them() -> None:
    lane, done = Lane("lane of a test"), []
    works = [lane.start(lambda n=n: done.append(n)) for n in range(50)]  # type: ignore[misc]

    def fail() -> None:
        raise PeerLostError("gone")

    failed, after = lane.start(fail), lane.start(lambda: done.append(50))
    for work in (*works, after):
        work.wait()
    assert done == list(range(51))
    with pytest.raises(PeerLostError, match="gone"):
        failed.wait()
    for thread in threading.enumerate():
        if thread.name == "lane of a test":
            thread.join(PATIENCE_S)
            assert not thread.is_alive()


def meshed(size: int, pair: Callable[[int, int], tuple[Any, Any]]) -> list[Channels]:
    """Return a channel between every two ranks, by rank and peer."""
    ends: list[Channels] = [{} for _ in range(size)]
    for left in range(size):
        for right in range(left + 1, size):
            ends[left][right], ends[right][left] = pair(left, right)
    return ends


@pytest.mark.parametrize("size", [2, 5])
def test_over_channels_the_bits_are_those_of_the_process_group(size: int) -> None:
    numel = 101

    def replica(collective: Collective) -> list[Tensor]:
        found = []
        for algorithm in ALGORITHMS:
            tensor = drawn(collective.rank, numel)
            all_reduce(collective, tensor, schedule(algorithm, collective.rank, size, numel))
            found.append(tensor)
        return found

    expected = run_replicas(size, replica)[0]
    for algorithm, wanted in zip(ALGORITHMS, expected, strict=True):
        ends = meshed(size, lambda left, right: thread_pair(str(left), str(right), timeout_s=PATIENCE_S))
        tensors = [drawn(rank, numel) for rank in range(size)]
        steps = [schedule(algorithm, rank, size, numel) for rank in range(size)]
        arguments = zip(ends, tensors, steps, strict=True)
        threads = [threading.Thread(target=all_reduce_over, args=given) for given in arguments]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        assert all(torch.equal(tensor, wanted) for tensor in tensors)
        sent = [sum(end.bytes_sent for end in of_rank.values()) for of_rank in ends]
        assert sent == [4 * n for n in sent_elements(algorithm, size, numel)]


def test_over_channels_a_lost_peer_is_a_closed_channel() -> None:
    here, there = thread_pair("0", "1", timeout_s=PATIENCE_S)
    there.close()
    with pytest.raises(ChannelClosedError):
        all_reduce_over({1: here}, torch.ones(4), schedule("ring", 0, 2, 4))


def simulated(algorithm: str, size: int, tensors: list[Tensor], link: Link) -> tuple[float, SimulatedNetwork]:
    """Carry it out in virtual time; return the finish time."""
    network = SimulatedNetwork(link)
    ends = meshed(size, lambda left, right: network.pair(str(left), str(right)))
    for rank, tensor in enumerate(tensors):
        steps = schedule(algorithm, rank, size, tensor.numel())

        def program(rank: int = rank, tensor: Tensor = tensor, steps: Any = steps) -> Any:
            yield from exchanges(ends[rank], tensor, steps)

        network.start(str(rank), program)
    return network.run(), network


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_in_virtual_time_each_takes_its_formula_and_gives_the_sum(algorithm: str) -> None:
    link = Link(latency_s=1e-3, bandwidth_bytes_per_s=1e6)
    model = AlphaBeta(1e-3, 1e-6)
    for size in (2, 4, 8, 16):
        tensors = [drawn(rank, 480) for rank in range(size)]
        finish_s, _ = simulated(algorithm, size, tensors, link)
        assert finish_s == pytest.approx(cost_s(algorithm, size, tensors[0].nbytes, model), rel=1e-12)
        assert all(torch.equal(tensor, tensors[0]) for tensor in tensors)
        torch.testing.assert_close(tensors[0], torch.stack([drawn(rank, 480) for rank in range(size)]).sum(0))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_in_virtual_time_any_number_of_ranks_is_as_fast_as_its_formula_or_faster(algorithm: str) -> None:
    link = Link(latency_s=1)
    for size in (3, 5, 6, 7, 9, 12):
        weightless = [torch.empty(720_720, dtype=torch.uint8, device="meta") for _ in range(size)]
        rounds, network = simulated(algorithm, size, weightless, link)
        # A rank with nothing to do in a round is ahead: what it sends next has arrived when it is looked for.
        assert rounds <= num_rounds(algorithm, size)
        if algorithm == "ring":
            assert rounds == num_rounds(algorithm, size)
        assert sum(t.num_bytes for t in network.traffic.values()) == sum(sent_elements(algorithm, size, 720_720))


def test_all_ranks_are_told_the_same_fit() -> None:
    fits = run_replicas(3, lambda collective: measure(collective, repeats=2))
    assert fits[0] == fits[1] == fits[2]
    assert fits[0].message.alpha_s > 0
    assert fits[0].native.alpha_s > 0


def test_a_rank_that_leaves_while_it_is_measured_is_lost() -> None:
    members = make_gloo_threads(2)
    try:
        members[1].abort()
        with pytest.raises(PeerLostError):
            measure(members[0])
    finally:
        for member in members:
            member.close()
