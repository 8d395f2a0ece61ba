"""A path through hosts costs the sum of its hops."""

from __future__ import annotations

import pytest

from orchestray.platform.comm.allreduce.costs import AlphaBeta
from orchestray.trainers.survey.cluster.copies import (
    direct,
    host_staged,
    path_s,
    through_object_store,
)

BUS, MEMORY, NETWORK = AlphaBeta(10e-6, 1 / 12e9), AlphaBeta(1e-6, 1 / 10e9), AlphaBeta(30e-6, 1 / 1.25e9)


def test_host_staged_copy_path_adds_the_hops_of_both_hosts_to_the_network_s() -> None:
    staged = host_staged(BUS, NETWORK)
    assert [hop.name for hop in staged] == ["GPU to host", "host to host", "host to GPU"]
    for num_bytes in (0, 1000, 10**9):
        assert path_s(staged, num_bytes) == pytest.approx(2 * BUS.time_s(num_bytes) + NETWORK.time_s(num_bytes))
        assert path_s(staged, num_bytes) > path_s(direct(NETWORK), num_bytes)
        through = path_s(through_object_store(BUS, MEMORY, NETWORK), num_bytes)
        assert through == pytest.approx(path_s(staged, num_bytes) + MEMORY.time_s(num_bytes))


def test_in_many_chunks_it_takes_little_more_than_its_slowest_hop() -> None:
    staged, num_bytes = host_staged(BUS, NETWORK), 10**9
    assert path_s(staged, num_bytes, 64) == pytest.approx(path_s(direct(NETWORK), num_bytes), rel=0.02)
    assert path_s(staged, num_bytes, 64) < path_s(staged, num_bytes)
    assert path_s(staged, 1000, 64) > path_s(staged, 1000)  # each chunk has its latencies
