"""Channels between real processes, one of which is killed."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

import pytest
import torch

from orchestray.platform.comm.channel import (
    Channel,
    ChannelClosedError,
    SharedMemoryListener,
)
from support.channel_pair import connect_gloo
from support.forked import Forked
from support.patience import PATIENCE_S

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

PEER = Path(__file__).with_name("peer_process.py")
# Far below the channels' own timeout: a test that waits for that one fails.
PROMPT_S = 120.0


@dataclass
class Child:
    """A channel and the process at its other end."""

    channel: Channel
    process: Forked


@contextmanager
def child(kind: str, store: TCPStore) -> Iterator[Child]:
    with ExitStack() as stack:
        prefix = uuid4().hex
        listener = stack.enter_context(SharedMemoryListener())
        where = ["127.0.0.1", str(store.port), prefix] if kind == "gloo" else [listener.address]
        process = stack.enter_context(Forked(PEER, kind, *where))
        if kind == "gloo":
            channel: Channel = connect_gloo(
                "127.0.0.1", store.port, prefix, 0, name="test", peer="child", timeout_s=PATIENCE_S
            )
        else:
            channel = listener.accept(name="test", peer="child", timeout_s=PATIENCE_S)
        yield Child(stack.enter_context(channel), process)


def receive_what_was_on_the_way(channel: Channel, target: torch.Tensor) -> None:
    """Receive what a dead peer may still have sent whole; it is not more than this."""
    for _ in range(10):
        channel.recv(into=target, timeout_s=PROMPT_S)


@pytest.fixture(params=["gloo", "shared_memory"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_tensors_cross_processes_and_back(kind: str, store: TCPStore) -> None:
    with child(kind, store) as peer:
        for size in (0, 5, 1_000_000, 5_000_000):
            sent = torch.rand(size)
            peer.channel.send(sent, tag="echo")
            assert torch.equal(peer.channel.recv(tag="echo").tensor, sent)


def test_sigkill_of_the_peer_ends_a_pending_receive(kind: str, store: TCPStore) -> None:
    with child(kind, store) as peer:
        peer.channel.send([], tag="compute")
        peer.channel.recv(tag="computing")
        pending = peer.channel.irecv()
        peer.process.kill()
        with pytest.raises(ChannelClosedError, match="test to child is closed: the peer closed it or died"):
            pending.wait(PROMPT_S)


def test_sigkill_of_the_peer_ends_a_send_that_it_does_not_take(kind: str, store: TCPStore) -> None:
    with child(kind, store) as peer:
        peer.channel.send([], tag="compute")
        peer.channel.recv(tag="computing")
        sending = [peer.channel.isend(torch.ones(10_000_000)) for _ in range(2)]
        peer.process.kill()
        for handle in sending:
            with pytest.raises(ChannelClosedError):
                handle.wait(PROMPT_S)
        with pytest.raises(ChannelClosedError):
            peer.channel.send(torch.ones(1))


def test_sigkill_in_the_middle_of_a_stream_of_large_messages_ends_it(kind: str, store: TCPStore) -> None:
    target = torch.zeros(10_000_000)
    with child(kind, store) as peer:
        peer.channel.send([], tag="flood")
        peer.channel.recv(into=target, tag="flood")
        peer.process.kill()
        with pytest.raises(ChannelClosedError):
            receive_what_was_on_the_way(peer.channel, target)


def test_a_peer_that_exits_without_closing_ends_with_status_0_and_closes_the_channel(
    kind: str, store: TCPStore
) -> None:
    with child(kind, store) as peer:
        peer.channel.send([], tag="quit")
        with pytest.raises(ChannelClosedError):
            peer.channel.recv(timeout_s=PROMPT_S)
        assert peer.process.wait() == 0


def test_the_death_of_one_peer_leaves_the_other_pair_working(kind: str, store: TCPStore) -> None:
    with child(kind, store) as dying, child(kind, store) as living:
        dying.process.kill()
        with pytest.raises(ChannelClosedError):
            dying.channel.recv(timeout_s=PROMPT_S)
        living.channel.send(torch.ones(1_000_000), tag="echo")
        assert living.channel.recv(tag="echo").tensor.all()


def test_after_sigkill_no_shared_memory_socket_or_file_is_left(store: TCPStore) -> None:
    def traces() -> tuple[set[str], list[str], list[str], int]:
        return (
            {
                path.name
                for path in Path("/dev/shm").iterdir()  # noqa: S108 - where named shared memory would be
            },
            [line for line in Path("/proc/net/unix").read_text().splitlines() if f"orchestray-{own_pid}-" in line],
            [line for line in Path("/proc/self/maps").read_text().splitlines() if "orchestray-channel" in line],
            len(list(Path("/proc/self/fd").iterdir())),
        )

    own_pid = Path("/proc/self").resolve().name
    with child("shared_memory", store):
        pass  # what all processes are forked from is there now
    before = traces()
    with child("shared_memory", store) as peer:
        peer.channel.send([], tag="flood")
        peer.channel.recv(tag="flood")
        during = traces()
        peer.process.kill()
        with pytest.raises(ChannelClosedError):
            receive_what_was_on_the_way(peer.channel, torch.zeros(10_000_000))
    assert during[0] - before[0] == set(), "the rings have no name in /dev/shm even while in use"
    assert len(during[2]) == len(before[2]) + 2, "the test looks for what a ring's mapping is called"
    assert traces()[1:] == before[1:]


def test_what_a_killed_process_has_lent_stays_and_vanishes_with_the_last_that_refers_to_it(store: TCPStore) -> None:
    def num_mapped() -> int:
        gc.collect()
        return Path("/proc/self/maps").read_text().count("orchestray-block")

    others = num_mapped()
    with child("shared_memory", store) as other:
        other.channel.send([], tag="lend")
        lent = other.channel.borrow(other.channel.recv(tag="lent").meta["place"])
        other.process.kill()
        with pytest.raises(ChannelClosedError):
            other.channel.recv(timeout_s=PROMPT_S)
        assert torch.equal(lent, torch.full((1000,), 3.0))
        lent.add_(1.0)
        other.channel.close()
        assert num_mapped() == others + 1
    del lent
    assert num_mapped() == others
