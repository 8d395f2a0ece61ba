"""Our replicated parameter server in plain processes, each connection over TCP as between machines, and a flood.

Usage: replicated_server.py server SPEC.json PORT, or replicated_server.py copy SPEC.json PORT NAME. The store at the
port is the measuring process's, which is the worker.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore

from harness.peers.ray_parameter_server import make_model
from orchestray.platform.actors.member import keep_freed_memory
from orchestray.platform.comm.channel.base import Channel, ChannelClosedError
from orchestray.platform.comm.channel.gloo import GlooChannel
from orchestray.trainers.optim.factory import make_optimizer
from orchestray.trainers.ps.durability.replication import Backup, Replicator
from orchestray.trainers.ps.protocol.messages import SNAPSHOT, finish, flat_state, start
from orchestray.trainers.ps.protocol.partition import FlatModel, Partition
from orchestray.trainers.ps.protocol.requests import State
from orchestray.trainers.ps.server.server import ShardServer
from orchestray.trainers.ps.server.shard import Rates, Shard
from orchestray.trainers.ps.server.state_machine import Machine

HOST = "127.0.0.1"
END = "end"
COPY, OTHER_COPY, WORKER = "copy", "other copy", "worker"
"""The server's peers, and so its connections."""


def channel_of(store: TCPStore, peer: str, rank: int) -> Channel:
    """Return the server's end (rank 0) or the peer's of the connection between them."""
    named = {"name": "server", "peer": peer} if rank == 0 else {"name": peer, "peer": "server"}
    return GlooChannel(PrefixStore(peer, store), rank, local_host=HOST, **named)


def machine_of(spec: dict[str, Any]) -> Machine:
    model = make_model(spec)
    values = FlatModel(model).values.detach().clone()
    return Machine(Shard(Partition.of(model).slices(0), values, make_optimizer("sgd"), Rates(spec["lr"])))


class Flood:
    """Copies of the state, sent over a connection one after the other until `stop`.

    Args:
        channel: the connection.
        lock: held while a copy is sent, so that its two messages follow each other.
        state: the state, as a new copy of the server is sent it.
        in_flight: number of copies that are on their way at any time.
    """

    def __init__(self, channel: Channel, lock: Any, state: tuple[State, list[Tensor]], in_flight: int) -> None:
        self.num_bytes = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._send, args=(channel, lock, state, in_flight))
        self._thread.start()

    def stop(self) -> int:
        """Stop once what is on its way has arrived; return the bytes sent."""
        self._stopped.set()
        self._thread.join()
        return self.num_bytes

    def _send(self, channel: Channel, lock: Any, state: tuple[State, list[Tensor]], in_flight: int) -> None:
        under_way: deque[Any] = deque()
        while not self._stopped.is_set():
            with lock:
                under_way.append(start(channel, SNAPSHOT, *state))
            self.num_bytes += sum(tensor.nbytes for tensor in state[1])
            if len(under_way) >= in_flight:
                finish(under_way.popleft())
        for handles in under_way:
            finish(handles)


def serve(spec: dict[str, Any], store: TCPStore) -> None:
    """Run the server's process: serve the worker, and flood the connections that it names, in turn."""
    copies = [
        subprocess.Popen([sys.executable, __file__, "copy", sys.argv[2], sys.argv[3], name])
        for name in (COPY, OTHER_COPY)
    ]
    machine = machine_of(spec)
    names, tensors = flat_state(machine.state()[1])
    state = State(json.dumps(machine.state()[0]), names), tensors
    server = ShardServer(machine)
    channels = {name: channel_of(store, name, 0) for name in (COPY, OTHER_COPY, WORKER)}
    server.follow(Replicator(channels[COPY]))
    # What else is sent to the copy and to the worker is sent while the server is locked.
    locks: dict[str, Any] = {COPY: server._changed, OTHER_COPY: threading.Lock(), WORKER: threading.Lock()}
    serving = threading.Thread(target=server.serve, args=(channels[WORKER],))
    serving.start()
    flood: Flood | None = None
    number = 0
    while (named := store.get(f"flood-{number}").decode()) != END:
        num_bytes = 0 if flood is None else flood.stop()
        flood = Flood(channels[named], locks[named], state, spec["in_flight"]) if named else None
        store.set(f"flooded-{number}", str(num_bytes))
        number += 1
    serving.join()
    server.close()
    channels[OTHER_COPY].close()
    for process in copies:
        process.wait()


def follow(spec: dict[str, Any], store: TCPStore, name: str) -> None:
    """Run a copy's process."""
    Backup(machine_of(spec)).follow(channel_of(store, name, 1))


def run(role: Callable[..., None], *arguments: Any) -> None:
    torch.set_num_threads(1)
    keep_freed_memory()
    try:
        role(*arguments)
    except ChannelClosedError:
        os._exit(1)
    os._exit(0)  # gloo's threads abort some regular exits


def main() -> None:
    spec = json.loads(Path(sys.argv[2]).read_text(encoding="utf-8"))
    store = TCPStore(HOST, int(sys.argv[3]), is_master=False)
    if sys.argv[1] == "server":
        run(serve, spec, store)
    run(follow, spec, store, sys.argv[4])


if __name__ == "__main__":
    main()
