"""Channels that carry tensors between two endpoints: over gloo, shared memory or threads. `base` has the contract."""

from __future__ import annotations

if __name__ != "orchestray.platform.comm.channel":
    raise ImportError("import orchestray.platform.comm.channel, not a copy of it under another name")

from orchestray.platform.comm.channel.base import (
    Channel,
    ChannelClosedError,
    ChannelError,
    ChannelMismatchError,
    ChannelTimeoutError,
    Handle,
    Message,
)
from orchestray.platform.comm.channel.gloo import GlooChannel
from orchestray.platform.comm.channel.nearest import connect, open_channel
from orchestray.platform.comm.channel.shared_memory import SharedMemoryListener, connect_shared_memory
from orchestray.platform.comm.channel.threads import FaultScript, thread_pair

__all__ = [
    "Channel",
    "ChannelClosedError",
    "ChannelError",
    "ChannelMismatchError",
    "ChannelTimeoutError",
    "FaultScript",
    "GlooChannel",
    "Handle",
    "Message",
    "SharedMemoryListener",
    "connect",
    "connect_shared_memory",
    "open_channel",
    "thread_pair",
]
