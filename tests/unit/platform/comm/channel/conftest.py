"""A pair of channel ends of each kind, and a way to run one program at each end."""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta

import pytest
from torch._C._distributed_c10d import HashStore, TCPStore

from orchestray.platform.comm.channel import (
    Channel,
    GlooChannel,
    SharedMemoryListener,
    connect_shared_memory,
    thread_pair,
)
from orchestray.platform.sim.network import Link, SimulatedNetwork
from support.channel_pair import TIMEOUT_S, Pair


@pytest.fixture(scope="session")
def store() -> TCPStore:
    """Return the store where gloo pairs meet."""
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=TIMEOUT_S))


@pytest.fixture
def gloo_pair() -> Iterator[tuple[Channel, Channel]]:
    store = HashStore()

    def open_end(rank: int) -> Channel:
        name, peer = ("left", "right") if rank == 0 else ("right", "left")
        return GlooChannel(store, rank, name=name, peer=peer, timeout_s=TIMEOUT_S, connect_timeout_s=TIMEOUT_S)

    with ThreadPoolExecutor(2) as pool, ExitStack() as stack:
        ends = list(pool.map(open_end, (0, 1)))
        for end in ends:
            stack.enter_context(end)
        yield ends[0], ends[1]


@pytest.fixture
def shared_memory_pair() -> Iterator[tuple[Channel, Channel]]:
    with (
        SharedMemoryListener() as listener,
        connect_shared_memory(listener.address, name="left", peer="right", timeout_s=TIMEOUT_S) as left,
        listener.accept(name="right", peer="left", timeout_s=TIMEOUT_S) as right,
    ):
        yield left, right


@pytest.fixture(params=["gloo", "shared_memory", "threads", "simulated"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    if request.param in ("gloo", "shared_memory"):
        left, right = request.getfixturevalue(f"{request.param}_pair")
        yield Pair(request.param, left, right)
    elif request.param == "threads":
        left, right = thread_pair(timeout_s=TIMEOUT_S)
        with left, right:
            yield Pair(request.param, left, right)
    else:
        network = SimulatedNetwork(Link(latency_s=1e-3, bandwidth_bytes_per_s=1e9))
        yield Pair(request.param, *network.pair("left", "right", timeout_s=math.inf), network)
