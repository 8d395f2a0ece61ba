"""A channel over a process group of its own: two gloo ranks, so that the failure of one pair does not affect others.

It works between any two machines that reach each other over TCP. The two ends meet by plain values (host, port,
prefix), which an actor can receive as data. Facts about gloo that this file is built around (torch 2.13):

- A send waits for the matching receive.
- A receive may be larger than the message that arrives.
- A `wait` that times out destroys the connection on both sides, and nothing else does (`abort` leaves waits hanging).

So waits here never time out, and closing is a wait that does.
"""

from __future__ import annotations

import os
import re
import socket
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import TCPStore  # torch.distributed.TCPStore, where type checkers find it
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroupGloo, Store, Work

from orchestray.platform.comm.channel.base import DEFAULT_TIMEOUT_S, GONE, ChannelTimeoutError
from orchestray.platform.comm.channel.lanes import LaneChannel, TransportLost
from orchestray.platform.comm.channel.wire import PREFIX, Packed

_FRAME_BYTES = 32 * 1024  # the part of a blob that goes in one operation; most blobs fit
_FOR_EVER = timedelta(days=365)
_MESSAGES, _CLOSING = 0, 1  # gloo tags


class GlooChannel(LaneChannel):
    """One end of a gloo pair; the constructor returns when both ends are connected.

    Args:
        store: shared by the two ends only: give it a prefix that was never used before.
        rank: 0 or 1.
        name: this end's name in errors.
        peer: the other end's name in errors.
        timeout_s: default of every wait.
        connect_timeout_s: time the other end has to connect.
        local_host: address at which the peer reaches this machine; default: GLOO_SOCKET_IFNAME, else the address of
            this machine's own name.

    Raises:
        ChannelTimeoutError: the other end did not connect within `connect_timeout_s`.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        *,
        name: str,
        peer: str,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        connect_timeout_s: float = DEFAULT_TIMEOUT_S,
        local_host: str | None = None,
    ) -> None:
        if rank not in (0, 1):
            raise ValueError(f"a channel has ranks 0 and 1, got {rank}")
        super().__init__(name, peer, timeout_s)
        self._peer_rank = 1 - rank
        try:
            self._group: Any = _new_group(store, rank, timedelta(seconds=connect_timeout_s), local_host)
        except RuntimeError as error:
            raise ChannelTimeoutError(
                f"{name} waited {connect_timeout_s:g} s for {peer} to open its end of the channel: {_brief(error)}"
            ) from None
        self._frame = torch.empty(_FRAME_BYTES, dtype=torch.uint8)
        self._start_lanes()

    def _begin_write(self, packed: Packed, *, is_next: bool) -> list[Work]:
        blob = torch.frombuffer(packed.blob, dtype=torch.uint8)
        parts = [blob[:_FRAME_BYTES], blob[_FRAME_BYTES:], *packed.large]
        # All are posted before the first is waited for: one round trip instead of one per tensor.
        return [self._post_send(part) for part in parts if part.numel()]

    def _write(self, packed: Packed, begun: list[Work]) -> None:
        for work in begun:
            _wait(work)

    def _read_blob(self) -> bytearray:
        self._read_into(self._frame)
        (blob_bytes, *_) = PREFIX.unpack_from(self._frame.numpy().data)
        blob = bytearray(blob_bytes)
        whole = torch.frombuffer(blob, dtype=torch.uint8)
        whole[:_FRAME_BYTES].copy_(self._frame[:blob_bytes])
        if blob_bytes > _FRAME_BYTES:
            self._read_into(whole[_FRAME_BYTES:])
        return blob

    def _read_into(self, flat: Tensor) -> None:
        try:
            work = self._live_group().recv([flat], self._peer_rank, _MESSAGES)
        except RuntimeError as error:
            raise TransportLost(_brief(error)) from None
        _wait(work)

    def _post_send(self, flat: Tensor) -> Work:
        try:
            work: Work = self._live_group().send([flat], self._peer_rank, _MESSAGES)
        except RuntimeError as error:
            raise TransportLost(_brief(error)) from None
        return work

    def _live_group(self) -> Any:
        if self._group is None:
            raise TransportLost("it was closed")
        return self._group

    def _hang_up(self) -> None:
        try:
            nothing = self._live_group().recv([torch.empty(1, dtype=torch.uint8)], self._peer_rank, _CLOSING)
            nothing.wait(timedelta(milliseconds=1))
        except RuntimeError:
            pass  # the timeout that closes the connection, or a connection that was closed already

    def _release(self) -> None:
        self._group = None


def rendezvous(host: str, port: int, prefix: str, *, name: str, timeout_s: float) -> Store:
    """Return the TCPStore served at `host`:`port`, under a prefix; `name` is the caller's name in errors.

    Raises:
        ChannelTimeoutError: the store does not answer within `timeout_s`.
    """
    try:
        served = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s))
    except RuntimeError as error:
        raise ChannelTimeoutError(
            f"{name} found no rendezvous store at {host}:{port} within {timeout_s:g} s: {_brief(error)}"
        ) from None
    return PrefixStore(prefix, served)


def address_towards(host: str, port: int) -> str | None:
    """Return the address from which this machine reaches `host`; None to let gloo follow GLOO_SOCKET_IFNAME.

    Gloo would use the address of the machine's own name, often a loopback address that other machines cannot reach.
    """
    if os.environ.get("GLOO_SOCKET_IFNAME"):
        return None
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # sends nothing: asks the routing table
        return str(probe.getsockname()[0])


def _new_group(store: Store, rank: int, connect_timeout: timedelta, local_host: str | None) -> Any:
    """Return a gloo group; `Any`, as torch's type stubs lack its send and recv and the choice of an address."""
    if local_host is None:
        return ProcessGroupGloo(store, rank, 2, connect_timeout)
    gloo: Any = ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=local_host)]
    options._timeout = connect_timeout
    return gloo(store, rank, 2, options)


def _wait(work: Work) -> None:
    try:
        work.wait(_FOR_EVER)
    except RuntimeError as error:
        raise TransportLost(_brief(error)) from None


def _brief(error: RuntimeError) -> str:
    """Return the first sentence of gloo's message, without its source file."""
    text = re.sub(r"^\[[^\]]*\] ", "", str(error)).split(". ")[0].strip()
    return GONE if re.search(r"(closed|reset) by peer|broken pipe|pair closure", text, re.IGNORECASE) else text
