"""The other end of a channel, as a process of its own: started by path with what it needs to find the first end.

It sends its pid, then does what each message's tag says:

- `echo`: sends the tensors back
- `flood`: sends without end
- `compute`: says so, then never touches the channel again
- `lend`: lends memory of its own, full of threes
- `quit`: ends without closing
"""

from __future__ import annotations

import sys
import threading

import torch

from orchestray.platform.comm.channel import Channel, GlooChannel, connect_shared_memory
from orchestray.platform.comm.channel.blocks import SharedBlock
from orchestray.platform.comm.channel.gloo import address_towards, rendezvous


def connect(kind: str, *where: str) -> Channel:
    """Connect this end of the channel, with a timeout of ten minutes."""
    if kind == "gloo":
        host, port, prefix = where
        store = rendezvous(host, int(port), prefix, name="child", timeout_s=600)
        local_host = address_towards(host, int(port))
        return GlooChannel(store, 1, name="child", peer="test", timeout_s=600, local_host=local_host)
    return connect_shared_memory(where[0], name="child", peer="test", timeout_s=600)


def serve(channel: Channel) -> None:
    """Serve requests until the tag `quit`."""
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
