"""Bases of the hosts of processes to which others connect, and of those that connect to servers."""

from __future__ import annotations

import contextlib
import threading
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch.distributed as dist

from orchestray.platform.comm.channel.base import ChannelClosedError, ChannelError
from orchestray.platform.comm.channel.nearest import call_off, connect
from orchestray.platform.process import torch_threads

if TYPE_CHECKING:
    from collections.abc import Callable

    from orchestray.platform.comm.channel.base import Channel
    from orchestray.trainers.ps.protocol.address import Address

_CONNECT_TIMEOUT_S = 60.0
_TAKEOVER_TIMEOUT_S = 60.0


def dial(server: Address, name: str, peer: str) -> Channel:
    """Connect to a server that expects this process.

    Args:
        server: address of the server.
        name: this end's name in errors.
        peer: the server's name in errors.

    Raises:
        ChannelError: the server cannot be reached.
    """
    return connect(server.host, server.port, server.name, 1, name=name, peer=peer, connect_timeout_s=_CONNECT_TIMEOUT_S)


class AcceptingHost:
    """The base of hosts to which others connect, each under a name and served in a thread of its own."""

    def __init__(self, role: str) -> None:
        """
        Args:
            role: name of the role in errors.
        """
        self._role = role
        self._store: dist.TCPStore | None = None
        self._rank, self._address = 0, ""
        self._threads: list[threading.Thread] = []
        self._expected: set[str] = set()
        """Names under which nobody has come yet."""
        self._channels: list[Channel] = []
        """Channels to those that have come."""
        self._bytes_of_earlier = 0

    def _listen(self) -> dist.TCPStore:
        """Open the store at which others meet this process, and return it."""
        self._store = dist.TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False)  # noqa: S104 - workers of other nodes must reach it
        return self._store

    def _meet(self, name: str, peer: str, serve: Callable[[Channel], object]) -> None:
        """Expect a peer under this name, and serve it in a thread of its own."""
        store = self._store
        assert store is not None

        def meet() -> None:
            with contextlib.suppress(ChannelError):  # it never came
                channel = connect(
                    self._address,
                    store.port,
                    name,
                    0,
                    name=f"{self._role} {self._rank}",
                    peer=peer,
                    connect_timeout_s=_CONNECT_TIMEOUT_S,
                    local_host=self._address,
                )
                self._expected.discard(name)
                self._channels.append(channel)
                serve(channel)

        self._expected.add(name)
        self._start(meet, f"serve {name}")

    def _start(self, body: Callable[[], object], name: str) -> None:
        def work() -> None:
            torch_threads.take_up()  # or the last bits of an update would depend on which thread makes it
            body()

        thread = threading.Thread(target=work, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _bytes_moved(self) -> int:
        """Return the bytes that went over its channels, both ways."""
        return self._bytes_of_earlier + sum(channel.bytes_moved for channel in list(self._channels))

    def _expect_nobody(self) -> None:
        """Have those that are expected and have not come stop waiting."""
        if (store := self._store) is not None:
            for name in self._expected.copy():
                call_off(dist.PrefixStore(name, store), 0)

    def _hang_up(self) -> None:
        """End the channels and their threads, and keep the count of bytes."""
        for channel in list(self._channels):
            channel.close()
        for thread in self._threads:
            thread.join(_CONNECT_TIMEOUT_S)
        self._expected.clear()
        self._bytes_of_earlier = self._bytes_moved()
        self._threads, self._channels = [], []
        self._store = None


class ReroutedHost(ABC):
    """The base of hosts that connect to servers, whose places other servers may take."""

    def __init__(self) -> None:
        self._moved = threading.Condition()
        self._servers: dict[int, Address] = {}
        """Servers that replaced others and are not connected yet, by shard."""
        self._aborted = False

    @abstractmethod
    def _connect(self, server: Address, shard: int) -> Channel:
        """Return a channel to the server of a shard."""

    def reroute(self, shard: int, server: Address) -> None:
        """Use another server, which has taken over a shard."""
        with self._moved:
            self._servers[shard] = server
            self._moved.notify_all()

    def abort(self) -> None:
        """End every wait for the servers."""
        with self._moved:
            self._aborted = True
            self._moved.notify_all()

    def _await_server(self, shard: int, error: Exception) -> Channel:
        """Return a channel to the server that has replaced a shard's lost one."""
        with self._moved:
            there = self._moved.wait_for(lambda: shard in self._servers or self._aborted, _TAKEOVER_TIMEOUT_S)
            if self._aborted or not there:
                raise ChannelClosedError(f"nobody took the place of parameter server {shard}: {error}")
            server = self._servers.pop(shard)
        return self._connect(server, shard)
