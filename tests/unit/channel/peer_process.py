"""The other end of a channel, as a process of its own: started by path with what it needs to find the first end.

It sends its pid, then does what each message's tag says: `echo`, `flood` (sends without end), `compute` (says so, then
never touches the channel again), `lend` (memory of its own, full of threes), `quit` (ends without closing).
"""

from __future__ import annotations

import sys
import threading

import torch

from orchestray.platform.channel import Channel, connect_gloo, connect_shared_memory
from orchestray.platform.channel.blocks import SharedBlock


def connect(kind: str, *where: str) -> Channel:
    """A channel whose waits end when the test's would."""
    if kind == "gloo":
        host, port, prefix = where
        return connect_gloo(host, int(port), prefix, 1, name="child", peer="test", timeout_s=600)
    return connect_shared_memory(where[0], name="child", peer="test", timeout_s=600)


def serve(channel: Channel) -> None:
    """Until told to quit."""
    while True:
        message = channel.recv()
        if message.tag == "echo":
            channel.send(message.tensors, tag="echo")
        elif message.tag == "flood":
            while True:
                channel.send(torch.ones(10_000_000), tag="flood")
        elif message.tag == "compute":
            channel.send([], tag="computing")
            threading.Event().wait()
        elif message.tag == "lend":
            block = SharedBlock.create(4000)
            channel.offer(block)
            channel.send([], tag="lent", meta={"place": channel.lend(block.take(torch.empty(1000)).fill_(3.0))})
        elif message.tag == "quit":
            return


if __name__ == "__main__":
    serve(connect(*sys.argv[1:]))
