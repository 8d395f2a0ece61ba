"""The choice of a channel for two ends: shared memory between processes of one machine, otherwise gloo."""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from torch.distributed.distributed_c10d import Store

from orchestray.platform.comm.channel.base import DEFAULT_TIMEOUT_S, Channel, ChannelClosedError, ChannelTimeoutError
from orchestray.platform.comm.channel.gloo import GlooChannel, address_towards, rendezvous
from orchestray.platform.comm.channel.shared_memory import SharedMemoryListener, connect_shared_memory
from orchestray.platform.process.sockets import listens

if TYPE_CHECKING:
    from collections.abc import Callable

_ELSEWHERE = "-"
"""Name of a machine without usable shared memory, which equals no other machine."""
_TRY_S = 2.0
"""Seconds after which a server whose store does not answer is looked for again."""
_CALLED_OFF = "called off"
"""Value instead of a machine's name: the other end will not come."""


def open_channel(
    store: Store,
    rank: int,
    *,
    name: str,
    peer: str,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    connect_timeout_s: float = DEFAULT_TIMEOUT_S,
    local_host: str | None = None,
) -> Channel:
    """Open one end of a channel; return when both ends are connected.

    Args:
        store: shared by the two ends only: give it a prefix that was never used before.
        rank: 0 or 1.
        name: this end's name in errors.
        peer: the other end's name in errors.
        timeout_s: default of every wait.
        connect_timeout_s: time the other end has to connect.
        local_host: same as in `GlooChannel`.

    Raises:
        ChannelTimeoutError: the other end does not come within `connect_timeout_s`.
        ChannelClosedError: the other end came, and is gone; or `call_off` was called.
    """
    timeout = timedelta(seconds=connect_timeout_s)

    def value_of(key: str) -> str:
        try:
            store.wait([key], timeout)
            return str(store.get(key).decode())
        except RuntimeError:
            raise ChannelTimeoutError(
                f"{name} waited {connect_timeout_s:g} s for {peer} to open its end of the channel."
            ) from None

    machine = this_machine()
    store.set(f"machine-{rank}", machine)
    other = value_of(f"machine-{1 - rank}")
    if other == _CALLED_OFF:
        raise ChannelClosedError(f"{name} does not wait for {peer} any more: the meeting was called off")
    if machine == _ELSEWHERE or other != machine:
        return GlooChannel(
            store,
            rank,
            name=name,
            peer=peer,
            timeout_s=timeout_s,
            connect_timeout_s=connect_timeout_s,
            local_host=local_host,
        )
    ends = {"name": name, "peer": peer}
    limits = {"timeout_s": timeout_s, "connect_timeout_s": connect_timeout_s}
    return _through_memory(store, rank, value_of, ends, limits)


def call_off(store: Store, rank: int) -> None:
    """Have end `rank` of the pair that meets at `store` stop waiting, unless the other end has come already."""
    store.compare_set(f"machine-{1 - rank}", "", _CALLED_OFF)


def _through_memory(
    store: Store, rank: int, value_of: Callable[[str], str], ends: dict[str, str], limits: dict[str, float]
) -> Channel:
    if rank == 1:
        return connect_shared_memory(value_of("address"), **ends, **limits)  # type: ignore[arg-type]
    with SharedMemoryListener() as listener:
        store.set("address", listener.address)
        return listener.accept(**ends, **limits)  # type: ignore[arg-type]


def connect(
    host: str,
    port: int,
    prefix: str,
    rank: int,
    *,
    name: str,
    peer: str,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    connect_timeout_s: float = DEFAULT_TIMEOUT_S,
    local_host: str | None = None,
) -> Channel:
    """Open one end of a channel through the TCPStore served at `host`:`port`; see `open_channel`.

    Args:
        host: host of the store.
        port: port of the store.
        prefix: a name never used in this store before.
        rank: 0 or 1.
        name: this end's name in errors.
        peer: the other end's name in errors.
        timeout_s: default of every wait.
        connect_timeout_s: time that the store and the other end have to answer.
        local_host: default: the address from which this machine reaches `host`.

    Raises:
        ChannelTimeoutError: the store or the other end did not answer within `connect_timeout_s`.
        ChannelClosedError: nothing serves there any more.
    """
    return open_channel(
        _store_at(host, port, prefix, name, peer, connect_timeout_s),
        rank,
        name=name,
        peer=peer,
        timeout_s=timeout_s,
        connect_timeout_s=connect_timeout_s,
        local_host=local_host or address_towards(host, port),
    )


def _store_at(host: str, port: int, prefix: str, name: str, peer: str, timeout_s: float) -> Store:
    """Return the store served there, by short tries: a store's client does not notice that a server died meanwhile."""
    by_s = time.monotonic() + timeout_s
    while listens(host, port, timeout_s):
        try:
            store = rendezvous(host, port, prefix, name=name, timeout_s=min(timeout_s, _TRY_S))
        except ChannelTimeoutError:
            if time.monotonic() >= by_s:
                raise
        else:
            store.set_timeout(timedelta(seconds=timeout_s))
            return store
    raise ChannelClosedError(f"{name} found nobody at {host}:{port}: {peer} has gone, or cannot be reached")


def this_machine() -> str:
    """Return a name that differs wherever shared memory cannot connect: between machines, containers and users."""
    if sys.platform != "linux":
        return _ELSEWHERE
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        network = os.stat("/proc/self/ns/net").st_ino  # noqa: PTH116 - the link's target is not a file
    except OSError:  # hidden, as in some containers
        return _ELSEWHERE
    return f"{boot}/{network}/{os.getuid()}"
