"""Particulars of gloo, of shared memory, and of threads."""

from __future__ import annotations

import pickle
import socket
from typing import TYPE_CHECKING

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from orchestray.platform.comm.channel import (
    Channel,
    ChannelClosedError,
    ChannelError,
    ChannelTimeoutError,
    FaultScript,
    GlooChannel,
    SharedMemoryListener,
    connect_shared_memory,
    thread_pair,
)
from orchestray.platform.comm.channel.blocks import NUM_SLOTS, SLOT_BYTES
from orchestray.platform.errors import OrchestrayError
from support.channel_pair import connect_gloo

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore


def test_gloo_says_that_the_other_end_did_not_come(store: TCPStore) -> None:
    with pytest.raises(ChannelTimeoutError, match=r"worker/0 waited 2 s for server/1 to open its end"):
        connect_gloo("127.0.0.1", store.port, "alone", 0, name="worker/0", peer="server/1", connect_timeout_s=2.0)


def test_gloo_says_that_no_store_answers() -> None:
    with socket.socket() as unheard:
        unheard.bind(("127.0.0.1", 0))
        port = unheard.getsockname()[1]
        with pytest.raises(ChannelTimeoutError, match=rf"worker/0 found no rendezvous store at 127.0.0.1:{port}"):
            connect_gloo("127.0.0.1", port, "p", 0, name="worker/0", peer="server/1", connect_timeout_s=0.2)


def test_gloo_refuses_a_third_rank() -> None:
    with pytest.raises(ValueError, match="ranks 0 and 1, got 2"):
        GlooChannel(HashStore(), 2, name="a", peer="b")


def test_a_gloo_send_nobody_takes_times_out_and_closes_the_channel(gloo_pair: tuple[Channel, Channel]) -> None:
    left, right = gloo_pair
    with pytest.raises(
        ChannelTimeoutError, match=r"left waited for right to take message 'big': nothing within 0\.05 s"
    ):
        left.send(torch.ones(1_000_000), tag="big", timeout_s=0.05)
    with pytest.raises(ChannelClosedError):
        left.send(torch.ones(1))
    with pytest.raises(ChannelClosedError):
        right.recv()


def test_a_shared_memory_send_nobody_takes_times_out_and_closes_the_channel(
    shared_memory_pair: tuple[Channel, Channel],
) -> None:
    left, right = shared_memory_pair
    with pytest.raises(ChannelTimeoutError):
        left.send(torch.ones(SLOT_BYTES * (NUM_SLOTS + 1), dtype=torch.uint8), timeout_s=0.05)
    with pytest.raises(ChannelClosedError):
        right.recv()


def test_a_message_that_fits_the_ring_leaves_before_anyone_receives(
    shared_memory_pair: tuple[Channel, Channel],
) -> None:
    left, right = shared_memory_pair
    left.send(torch.ones(SLOT_BYTES * NUM_SLOTS, dtype=torch.uint8))
    assert right.recv().tensor.all()


def test_one_listener_serves_many_ends() -> None:
    with SharedMemoryListener() as listener:
        theirs = [connect_shared_memory(listener.address, name=f"worker/{i}", peer="server") for i in range(5)]
        ours = [listener.accept(name="server", peer=f"worker/{i}") for i in range(5)]
    for i, (worker, server) in enumerate(zip(theirs, ours, strict=True)):
        worker.send(torch.tensor(i))
        assert server.recv().tensor == i
        worker.close()
        server.close()


def test_shared_memory_says_that_nobody_listens_or_comes() -> None:
    with SharedMemoryListener() as listener:
        address = listener.address
        with pytest.raises(ChannelTimeoutError, match=rf"server waited 0\.01 s for worker to connect to {address}"):
            listener.accept(name="server", peer="worker", connect_timeout_s=0.01)
    with pytest.raises(ChannelClosedError, match=f"worker found nobody at {address}"):
        connect_shared_memory(address, name="worker", peer="server")


def test_an_end_that_is_never_accepted_is_closed_with_the_listener() -> None:
    with SharedMemoryListener() as listener:
        channel = connect_shared_memory(listener.address, name="worker", peer="server")
    with channel, pytest.raises(ChannelClosedError):
        channel.recv()


def test_a_stranger_at_the_listener_is_refused_and_the_next_end_is_accepted() -> None:
    with SharedMemoryListener() as listener:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
            stranger.connect("\0" + listener.address)
            stranger.sendall(b"GET / HTTP/1.1")
            with pytest.raises(ChannelClosedError, match="no orchestray channel"):
                listener.accept(name="server", peer="worker")
        with (
            connect_shared_memory(listener.address, name="worker", peer="server") as worker,
            listener.accept(name="server", peer="worker") as server,
        ):
            worker.send(torch.ones(1))
            assert server.recv().tensor == 1


def test_dropped_messages_never_arrive_and_count_as_sent() -> None:
    left, right = thread_pair(left_faults=FaultScript().drop(1, 2))
    for i in range(4):
        left.send(torch.tensor(i))
    assert [int(right.recv().tensor) for _ in range(2)] == [0, 3]
    assert (left.messages_sent, right.messages_received) == (4, 2)


def test_delayed_messages_hold_back_those_behind_them_until_released() -> None:
    left, right = thread_pair(left_faults=FaultScript().delay(1, 3))
    for i in range(5):
        left.send(torch.tensor(i))
    assert right.recv().tensor == 0
    pending = right.irecv()
    assert not pending.done()
    left.release()
    assert (int(pending.wait().tensor), int(right.recv().tensor)) == (1, 2)
    assert not right.irecv().done()
    left.release()
    assert right.recv().tensor == 4


def test_a_script_kills_the_sender_at_its_message() -> None:
    left, right = thread_pair("worker/0", "server/0", left_faults=FaultScript().fail_at(2))
    for i in range(2):
        left.send(torch.tensor(i))
    with pytest.raises(
        ChannelClosedError, match="channel of worker/0 to server/0 is closed: its fault script ended it"
    ):
        left.send(torch.tensor(2))
    assert [int(right.recv().tensor) for _ in range(2)] == [0, 1]
    with pytest.raises(ChannelClosedError, match="channel of server/0 to worker/0 is closed: the peer"):
        right.recv()


@pytest.mark.parametrize("error", [ChannelTimeoutError("late"), ChannelClosedError("gone")])
def test_errors_cross_processes_and_are_of_the_kinds_python_knows(error: ChannelError) -> None:
    copy = pickle.loads(pickle.dumps(error))  # noqa: S301 - as Ray does
    assert (type(copy), str(copy)) == (type(error), str(error))
    assert isinstance(error, OrchestrayError)
    assert isinstance(error, TimeoutError | ConnectionError)
