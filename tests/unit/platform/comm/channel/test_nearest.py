"""Choice of the channel between two ends; the short way of a small message keeps the order of the long one."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from orchestray.platform.comm.channel import (
    Channel,
    ChannelClosedError,
    ChannelTimeoutError,
    GlooChannel,
    connect,
    nearest,
    open_channel,
)
from orchestray.platform.comm.channel.blocks import SLOT_BYTES
from orchestray.platform.comm.channel.shared_memory import SharedMemoryChannel
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


@pytest.mark.parametrize("machine", ["this", nearest._ELSEWHERE])
def test_a_meeting_that_is_called_off_is_waited_for_no_longer(machine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nearest, "this_machine", lambda: machine)
    store = HashStore()
    with ThreadPoolExecutor(1) as waiting:
        waits = waiting.submit(open_channel, store, 0, name="worker 0", peer="worker 1", connect_timeout_s=TIMEOUT_S)
        nearest.call_off(store, 0)
        with pytest.raises(ChannelClosedError, match="worker 0 does not wait for worker 1 any more"):
            waits.result()


def test_a_meeting_to_which_the_other_has_come_is_not_called_off() -> None:
    store = HashStore()
    store.set("machine-1", "that")
    nearest.call_off(store, 0)
    assert store.get("machine-1") == b"that"


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


def test_an_end_whose_meeting_place_goes_as_it_comes_says_so_without_its_time_running_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Notice a server that is there when it is looked for, and dead when its store is asked."""
    monkeypatch.setattr(nearest, "_TRY_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as dying, ThreadPoolExecutor(1) as pool:
        port = dying.getsockname()[1]

        def die() -> None:
            dying.accept()[0].close()
            dying.close()

        dies = pool.submit(die)
        with pytest.raises(ChannelClosedError, match="server 1 has gone"):
            connect("127.0.0.1", port, "p", 1, name="worker 0", peer="server 1", connect_timeout_s=600.0)
        dies.result()
