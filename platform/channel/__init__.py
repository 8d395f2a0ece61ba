"""Tensors between two endpoints: over gloo, shared memory, threads, or a simulated network. `base` has the contract."""

from __future__ import annotations

if __name__ != "orchestray.platform.channel":
    raise ImportError("import orchestray.platform.channel, not a copy of it under another name")

from orchestray.platform.channel.base import (
    Channel,
    ChannelClosedError,
    ChannelError,
    ChannelMismatchError,
    ChannelTimeoutError,
    Handle,
    Message,
)
from orchestray.platform.channel.gloo import GlooChannel, connect_gloo
from orchestray.platform.channel.nearest import connect, open_channel
from orchestray.platform.channel.shared_memory import SharedMemoryListener, connect_shared_memory
from orchestray.platform.channel.simulated import Link, SimulatedNetwork, lockstep_round
from orchestray.platform.channel.threads import FaultScript, thread_pair

__all__ = [
    "Channel",
    "ChannelClosedError",
    "ChannelError",
    "ChannelMismatchError",
    "ChannelTimeoutError",
    "FaultScript",
    "GlooChannel",
    "Handle",
    "Link",
    "Message",
    "SharedMemoryListener",
    "SimulatedNetwork",
    "connect",
    "connect_gloo",
    "connect_shared_memory",
    "lockstep_round",
    "open_channel",
    "thread_pair",
]
