"""Which channel two ends get, and that the short way of a small message keeps the order of the long one."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from orchestray.platform.channel import (
    Channel,
    ChannelClosedError,
    ChannelTimeoutError,
    GlooChannel,
    connect,
    nearest,
    open_channel,
)
from orchestray.platform.channel.ring import SLOT_BYTES
from orchestray.platform.channel.shared_memory import SharedMemoryChannel
from support.channel_pair import TIMEOUT_S


@contextmanager
def ends() -> Iterator[list[Channel]]:
    store = HashStore()

    def open_end(rank: int) -> Channel:
        return open_channel(store, rank, name=f"worker {rank}", peer=f"worker {1 - rank}", connect_timeout_s=TIMEOUT_S)

    with ThreadPoolExecutor(2) as pool:
        opened = list(pool.map(open_end, (0, 1)))
    yield opened
    for end in opened:
        end.close()


def test_ends_on_one_machine_share_memory() -> None:
    with ends() as (left, right):
        assert isinstance(left, SharedMemoryChannel)
        left.send(torch.arange(5))
        assert right.recv().tensor.tolist() == [0, 1, 2, 3, 4]


def test_ends_on_two_machines_talk_over_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    machines = iter(["this", "that"])
    monkeypatch.setattr(nearest, "this_machine", lambda: next(machines))
    with ends() as (left, right):
        assert isinstance(left, GlooChannel)
        left.send(torch.arange(5))
        assert right.recv().tensor.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("machine", ["this", nearest._ELSEWHERE])
def test_an_end_that_nobody_meets_says_so(machine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nearest, "this_machine", lambda: machine)
    with pytest.raises(ChannelTimeoutError, match=r"worker 0 waited 0\.2 s for worker 1 to open its end"):
        open_channel(HashStore(), 0, name="worker 0", peer="worker 1", connect_timeout_s=0.2)


def test_messages_of_every_size_arrive_in_order_when_nobody_reads_meanwhile() -> None:
    sizes = [1, 100, SLOT_BYTES, 10_000, 3 * SLOT_BYTES, 40_000, 5, 9 * SLOT_BYTES, *range(1, 400), 2 * SLOT_BYTES]
    with ends() as (left, right):
        sent = [left.isend(torch.full((size,), index % 251, dtype=torch.uint8)) for index, size in enumerate(sizes)]
        for index, size in enumerate(sizes):
            assert torch.equal(right.recv().tensor, torch.full((size,), index % 251, dtype=torch.uint8))
        for handle in sent:
            handle.wait()
        assert left.bytes_sent == right.bytes_received == sum(sizes)
        assert left.messages_sent == len(sizes)


def test_an_end_whose_meeting_place_has_gone_says_so_at_once() -> None:
    with socket.socket() as unheard:
        unheard.bind(("127.0.0.1", 0))
        port = unheard.getsockname()[1]
        with pytest.raises(ChannelClosedError, match=rf"0 found nobody at 127\.0\.0\.1:{port}: server 1 has gone"):
            connect("127.0.0.1", port, "p", 1, name="worker 0", peer="server 1", connect_timeout_s=600.0)
