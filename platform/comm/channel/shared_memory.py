"""A channel between two processes of one Linux machine: bytes through shared memory, wake-ups through Unix sockets.

Each direction has a ring of slots in an anonymous memory file and a socket pair. The sender fills a slot and writes its
length to the socket; the receiver empties it and answers with a byte. So two cores copy a large message in and out at
the same time, in memory that stays in the cache. Nothing polls, and a peer that dies closes its sockets. Memory and
sockets have no name: they are passed over a Unix socket of the abstract namespace. They vanish with the last process
that has them open, even after SIGKILL.
"""

from __future__ import annotations

import array
import ctypes
import fcntl
import os
import secrets
import socket
import struct
import sys
import termios
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from orchestray.platform.comm.channel.base import (
    DEFAULT_TIMEOUT_S,
    GONE,
    ChannelClosedError,
    ChannelError,
    ChannelMismatchError,
    ChannelTimeoutError,
)
from orchestray.platform.comm.channel.blocks import NUM_SLOTS, SLOT_BYTES, Ring, SharedBlock
from orchestray.platform.comm.channel.lanes import SENT, LaneChannel, TransportLost
from orchestray.platform.comm.channel.wire import PREFIX, Packed, pack_offer

if TYPE_CHECKING:
    from orchestray.platform.comm.channel.blocks import Place

_LENGTH = struct.Struct("<I")
_CREDIT = b"\0"
_SLOTS_AT_ONCE = 2
"""Largest number of slots written by the sender's thread; larger messages are left to the writing thread."""
_HELLO = b"orchestray channel 1"
_PEER_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


class SharedMemoryChannel(LaneChannel):
    """One end of a channel through shared memory, made by SharedMemoryListener.accept and connect_shared_memory."""

    lends = True

    def __init__(
        self,
        outgoing: tuple[int, socket.socket],
        incoming: tuple[int, socket.socket],
        *,
        name: str,
        peer: str,
        timeout_s: float,
    ) -> None:
        super().__init__(name, peer, timeout_s)
        self._out_ring, self._in_ring = Ring(outgoing[0]), Ring(incoming[0])
        self._out, self._in = outgoing[1], incoming[1]
        self._free_slots = NUM_SLOTS
        self._ours: list[SharedBlock] = []
        self._theirs: list[SharedBlock] = []
        """Blocks that each end has offered."""
        # Limit on waiting bytes, as the kernel counts them: the same amount and its overhead must still fit without
        # blocking.
        self._unread_bytes = self._out.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) // 3
        self._start_lanes()

    def offer(self, block: SharedBlock) -> bool:
        self._ours.append(block)
        self._begin(pack_offer(block.file)).result(self.timeout_s)
        return True

    def lend(self, tensor: Tensor) -> Place | None:
        dtype = str(tensor.dtype).removeprefix("torch.")
        for whose, blocks in enumerate((self._ours, self._theirs)):
            for index, block in enumerate(blocks):
                start = 0 if not tensor.numel() else block.find(tensor)
                if start is not None:
                    return [dtype, list(tensor.shape), whose, index, start]
        return None

    def borrow(self, place: Place) -> Tensor:
        name, shape, whose, index, start = place
        blocks, dtype = (self._theirs, self._ours)[int(whose)], getattr(torch, name, None)
        if not isinstance(dtype, torch.dtype) or not 0 <= index < len(blocks):
            raise ChannelMismatchError(f"the peer lent a tensor {name} in block {index}; it has offered {len(blocks)}")
        if not whose:
            blocks[index].see_anew()
        return blocks[index].at(start, dtype, tuple(shape))

    def count_lent(self, *, sent_bytes: int = 0, received_bytes: int = 0) -> None:
        with self._lock:
            self.bytes_sent += sent_bytes
            self.bytes_received += received_bytes

    def _begin_write(self, packed: Packed, *, is_next: bool) -> Any:
        slots = sum(-(-flat.numel() // SLOT_BYTES) for flat in packed.large)
        if not is_next or slots > _SLOTS_AT_ONCE:
            return None
        try:
            self._take_credit(socket.MSG_DONTWAIT)
            if slots > self._free_slots or not self._has_room_for(len(packed.blob) + slots * _LENGTH.size):
                return None
            self._write(packed, None)
        except OSError:
            raise TransportLost(GONE) from None
        return SENT

    def _write(self, packed: Packed, begun: Any) -> None:
        try:
            if packed.file is not None:
                socket.send_fds(self._out, [packed.blob], [packed.file])
                return
            self._out.sendall(packed.blob)
            for flat in packed.large:
                for start in range(0, flat.numel(), SLOT_BYTES):
                    self._fill_slot(flat, start)
        except OSError:
            raise TransportLost(GONE) from None

    def _fill_slot(self, flat: Tensor, start: int) -> None:
        if self._free_slots == 0:
            self._take_credit()
        num_bytes = min(SLOT_BYTES, flat.numel() - start)
        # Without the interpreter's lock, and without torch's thread pool, of which each lane would start one.
        ctypes.memmove(self._out_ring.next_slot(), flat.data_ptr() + start, num_bytes)
        self._free_slots -= 1
        self._out.sendall(_LENGTH.pack(num_bytes))

    def _take_credit(self, flags: int = 0) -> None:
        """Count the slots that the receiver has emptied; without MSG_DONTWAIT, wait for at least one."""
        try:
            answered = len(self._out.recv(NUM_SLOTS, flags))
        except BlockingIOError:
            return
        if not answered:
            raise TransportLost(GONE)
        self._free_slots += answered

    def _has_room_for(self, num_bytes: int) -> bool:
        """Return True if that many bytes can be written to the socket without waiting for the receiver."""
        (unread,) = struct.unpack("i", fcntl.ioctl(self._out, termios.TIOCOUTQ, bytes(4)))
        return int(unread) + num_bytes <= self._unread_bytes

    def _read_blob(self) -> bytearray:
        while True:
            prefix, files = self._receive_prefix()
            blob_bytes, header_bytes, _ = PREFIX.unpack(prefix)
            if header_bytes:
                return prefix + self._receive(blob_bytes - PREFIX.size)
            self._theirs += [SharedBlock(file) for file in files]

    def _receive_prefix(self) -> tuple[bytearray, list[int]]:
        """Return the prefix and the files that came with its first byte."""
        try:
            data, extra, _, _ = self._in.recvmsg(PREFIX.size, socket.CMSG_SPACE(4), socket.MSG_CMSG_CLOEXEC)
        except OSError:
            data, extra = b"", []
        if not data:
            raise TransportLost(GONE)
        files = array.array("i")
        for _, _, descriptors in extra:
            files.frombytes(descriptors)
        return bytearray(data) + self._receive(PREFIX.size - len(data)), list(files)

    def _read_into(self, flat: Tensor) -> None:
        start = 0
        while start < flat.numel():
            (num_bytes,) = _LENGTH.unpack(self._receive(_LENGTH.size))
            ctypes.memmove(flat.data_ptr() + start, self._in_ring.next_slot(), num_bytes)
            start += num_bytes
            # A peer that has gone takes no credit, but its last message may be complete: read on until it ends.
            with suppress(OSError):
                self._in.sendall(_CREDIT)

    def _receive(self, num_bytes: int) -> bytearray:
        data = bytearray(num_bytes)
        view, start = memoryview(data), 0
        while start < num_bytes:
            try:
                got = self._in.recv_into(view[start:])
            except OSError:
                got = 0
            if not got:
                raise TransportLost(GONE)
            start += got
        return data

    def _hang_up(self) -> None:
        for end in (self._out, self._in):
            with suppress(OSError):  # the peer was first
                end.shutdown(socket.SHUT_RDWR)

    def _release(self) -> None:
        for part in (self._out, self._in, self._out_ring, self._in_ring):
            part.close()
        for block in self._theirs:  # tensors that are still referenced stay valid
            block.close()
        self._ours.clear()
        self._theirs.clear()


class SharedMemoryListener:
    """A meeting point for the ends of channels; it is a context manager.

    Any number may connect to `address`, a plain string that is valid on this machine only.
    """

    def __init__(self) -> None:
        _check_linux()
        self.address = f"orchestray-{os.getpid()}-{secrets.token_hex(8)}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind("\0" + self.address)
        self._socket.listen(128)

    def accept(
        self,
        *,
        name: str,
        peer: str,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        connect_timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> SharedMemoryChannel:
        """Wait for the next end that connects, and return a channel to it.

        Args:
            name: this end's name in errors.
            peer: the other end's name in errors.
            timeout_s: default of every wait.
            connect_timeout_s: time the other end has to connect.

        Raises:
            ChannelTimeoutError: no end connected in time.
            ChannelClosedError: the other end died at once, or is not an orchestray channel.
            ChannelError: the process belongs to another user.
        """
        self._socket.settimeout(connect_timeout_s)
        try:
            meeting, _ = self._socket.accept()
        except TimeoutError:
            raise ChannelTimeoutError(
                f"{name} waited {connect_timeout_s:g} s for {peer} to connect to {self.address}"
            ) from None
        with meeting:
            meeting.settimeout(connect_timeout_s)
            _check_same_user(meeting)
            hello, files = _receive_files(meeting)
            try:
                if hello != _HELLO or len(files) != 4:
                    raise ChannelClosedError(
                        f"{name}: what connected to {self.address} as {peer} is no orchestray channel, or died at once"
                    )
                theirs, ours = socket.socket(fileno=os.dup(files[1])), socket.socket(fileno=os.dup(files[3]))
                return SharedMemoryChannel(
                    (files[2], ours), (files[0], theirs), name=name, peer=peer, timeout_s=timeout_s
                )
            finally:
                for file in files:
                    os.close(file)

    def close(self) -> None:
        """Accept no more ends; open channels stay open."""
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def connect_shared_memory(
    address: str,
    *,
    name: str,
    peer: str,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    connect_timeout_s: float = DEFAULT_TIMEOUT_S,
) -> SharedMemoryChannel:
    """Connect to the SharedMemoryListener at `address` on this machine, without waiting for it to accept.

    Args:
        address: address of the listener.
        name: this end's name in errors.
        peer: the other end's name in errors.
        timeout_s: default of every wait.
        connect_timeout_s: time the listener has to answer.

    Raises:
        ChannelTimeoutError: the listener did not answer in time.
        ChannelClosedError: nothing listens there.
    """
    _check_linux()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as meeting:
        meeting.settimeout(connect_timeout_s)
        try:
            meeting.connect("\0" + address)
        except TimeoutError:
            raise ChannelTimeoutError(
                f"{name} waited {connect_timeout_s:g} s for {peer} to accept it at {address}"
            ) from None
        except OSError:
            raise ChannelClosedError(
                f"{name} found nobody at {address}: {peer} has gone, or runs on another machine"
            ) from None
        _check_same_user(meeting)
        out_here, out_there = socket.socketpair()
        in_here, in_there = socket.socketpair()
        rings = [os.memfd_create("orchestray-channel") for _ in range(2)]
        try:
            for ring in rings:
                os.ftruncate(ring, SLOT_BYTES * NUM_SLOTS)
            socket.send_fds(meeting, [_HELLO], [rings[0], out_there.fileno(), rings[1], in_there.fileno()])
            return SharedMemoryChannel(
                (rings[0], out_here), (rings[1], in_here), name=name, peer=peer, timeout_s=timeout_s
            )
        except OSError:
            raise ChannelClosedError(f"{name} found {peer} gone while connecting to {address}") from None
        finally:
            for ring in rings:
                os.close(ring)
            out_there.close()
            in_there.close()


def _receive_files(meeting: socket.socket) -> tuple[bytes, list[int]]:
    try:
        hello, files, _, _ = socket.recv_fds(meeting, len(_HELLO), 4, socket.MSG_CMSG_CLOEXEC)
    except OSError:  # silent for too long, or gone
        return b"", []
    return hello, files


def _check_linux() -> None:
    if sys.platform != "linux":
        raise ChannelError("shared memory channels need Linux; use gloo between processes of this machine")


def _check_same_user(meeting: socket.socket) -> None:
    """Raise an error if the other process has another user: the abstract namespace is open to every user."""
    credentials = meeting.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
    _, user, _ = _PEER_CREDENTIALS.unpack(credentials)
    if user != os.getuid():
        raise ChannelError(
            f"a process of user {user} is at the other end of a shared memory channel; only one's own may be"
        )
