"""The channel that suits two ends: through shared memory where they are processes of one machine, else over gloo."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from torch.distributed.distributed_c10d import Store

from orchestray.platform.channel.base import DEFAULT_TIMEOUT_S, Channel, ChannelClosedError, ChannelTimeoutError
from orchestray.platform.channel.gloo import GlooChannel, address_towards, rendezvous
from orchestray.platform.channel.shared_memory import SharedMemoryListener, connect_shared_memory
from orchestray.platform.listening import listens

if TYPE_CHECKING:
    from collections.abc import Callable

_ELSEWHERE = "-"
"""A machine of which shared memory is not to be had: it is nobody's."""


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
    """One end of a pair that shares `store` with nobody else: give it a prefix that was never used before.

    Returns when both ends are there; `local_host` is as in GlooChannel.

    Raises:
        ChannelTimeoutError: the other end does not come within `connect_timeout_s`.
        ChannelClosedError: it came, and is gone.
    """
    timeout = timedelta(seconds=connect_timeout_s)

    def told(key: str) -> str:
        try:
            store.wait([key], timeout)
            return str(store.get(key).decode())
        except RuntimeError:
            raise ChannelTimeoutError(
                f"{name} waited {connect_timeout_s:g} s for {peer} to open its end of the channel."
            ) from None

    machine = this_machine()
    store.set(f"machine-{rank}", machine)
    if machine == _ELSEWHERE or told(f"machine-{1 - rank}") != machine:
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
    return _through_memory(store, rank, told, ends, limits)


def _through_memory(
    store: Store, rank: int, told: Callable[[str], str], ends: dict[str, str], limits: dict[str, float]
) -> Channel:
    if rank == 1:
        return connect_shared_memory(told("address"), **ends, **limits)  # type: ignore[arg-type]
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
    """As `connect_gloo`: `open_channel` by way of the TCPStore served at `host`:`port`, under a prefix never used
    there before.

    Raises:
        ChannelClosedError: nobody serves there any more.
    """
    if not listens(host, port, connect_timeout_s):
        raise ChannelClosedError(f"{name} found nobody at {host}:{port}: {peer} has gone, or cannot be reached")
    return open_channel(
        rendezvous(host, port, prefix, name=name, timeout_s=connect_timeout_s),
        rank,
        name=name,
        peer=peer,
        timeout_s=timeout_s,
        connect_timeout_s=connect_timeout_s,
        local_host=local_host or address_towards(host, port),
    )


def this_machine() -> str:
    """Tells apart what shared memory cannot connect: machines that are up at the same time, containers, users."""
    if sys.platform != "linux":
        return _ELSEWHERE
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        network = os.stat("/proc/self/ns/net").st_ino  # noqa: PTH116 - a link to what is no file
    except OSError:  # hidden, as some containers do
        return _ELSEWHERE
    return f"{boot}/{network}/{os.getuid()}"
