"""Our parameter server in plain processes: one shard, and workers over a channel each.

Usage: parameter_server.py SPEC.json OUT.json. It starts its workers itself, with their rank and its port behind these.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from harness.peers.ray_parameter_server import gradient_of, make_batch, make_model
from orchestray.platform.actors.member import keep_freed_memory
from orchestray.platform.comm.channel import connect
from orchestray.platform.comm.channel.blocks import SharedBlock, room_for
from orchestray.trainers.optim.factory import make_optimizer
from orchestray.trainers.ps.coordinator.coordinator import Coordinator
from orchestray.trainers.ps.protocol.assignments import Compute, Finish, Order
from orchestray.trainers.ps.protocol.partition import FlatModel, Partition
from orchestray.trainers.ps.protocol.plan import CoordinatorSettings
from orchestray.trainers.ps.protocol.requests import Answer, Entry
from orchestray.trainers.ps.server.server import ShardServer
from orchestray.trainers.ps.server.shard import Rates, Shard
from orchestray.trainers.ps.server.state_machine import Machine
from orchestray.trainers.ps.worker.client import ShardClient
from orchestray.trainers.ps.worker.push_handle import PushHandle

HOST = "127.0.0.1"


def serve(spec: dict[str, Any]) -> dict[str, Any]:
    """Run the server's process; return when each update was made, in seconds from the first."""
    workers = spec["workers"]
    model = make_model(spec)
    partition = Partition.of(model)
    plan = CoordinatorSettings(
        num_samples=workers,
        num_validation_samples=1,
        batch_size=workers,
        num_shares=workers,
        consistency="asynchronous",
        lookahead=2 if spec["overlap"] else 1,
        total_steps=-(-spec["updates"] // workers),
        validate_every_steps=1 << 30,
    )
    optimizer = make_optimizer("sgd")
    shard = Shard(partition.slices(0), FlatModel(model).values.detach().clone(), optimizer, Rates(spec["lr"]))
    machine = Machine(shard, Coordinator(plan))
    times: list[float] = []
    apply = machine.apply

    def timed(entry: Entry, tensors: Any = ()) -> Answer:
        answer = apply(entry, tensors)
        if entry.push is not None:
            times.append(time.perf_counter())
        return answer

    machine.apply = timed  # type: ignore[method-assign]
    server = ShardServer(machine)
    store = torch.distributed.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    started = [subprocess.Popen([sys.executable, *sys.argv[:3], str(rank), str(store.port)]) for rank in range(workers)]
    threads = []
    for rank in range(workers):
        channel = connect(HOST, store.port, f"pair-{rank}", 0, name="server", peer=f"worker {rank}")
        threads.append(threading.Thread(target=server.serve, args=(channel,)))
        threads[-1].start()
    for thread in threads:
        thread.join()
    statuses = [process.wait() for process in started]
    if any(statuses):
        raise SystemExit(f"workers ended with {statuses}")
    return {"times": [at - times[0] for at in times], "norm": float(shard.values.norm())}


def work(spec: dict[str, Any], rank: int, port: int) -> None:
    """Run a worker's process."""
    model = make_model(spec)
    flat, batch = FlatModel(model), make_batch(spec, rank)
    channel = connect(HOST, port, f"pair-{rank}", 1, name=f"worker {rank}", peer="server")
    block = SharedBlock.create(room_for([flat.values] * 3))
    flat.live_in(block.take)
    staged = block.take(flat.values)
    client = ShardClient([channel], Partition.of(model), rank, flat.values, block=block, stays_there=True)
    client.hello()
    client.pull()
    flat.look_at(client.values)
    if not spec["overlap"]:  # there a gradient is on its way while the next one is made
        flat.make_gradients_at_home(model)
    one_by_one = partial(overlapped, staged) if spec["overlap"] else in_turn
    one_by_one(client, flat, lambda: gradient_of(model, batch, flat.begin))
    client.close()


def in_turn(client: ShardClient, flat: FlatModel, compute: Any) -> None:
    """Compute a gradient, then make one round trip for it, the parameters and the next order."""
    order = client.next()
    while isinstance(order, Compute):
        compute()
        done = client.push([order], flat.gradient, loss_sums=[0.0], pull_into=client.home, next_order=True)
        flat.look_at(client.values)
        assert done.order is not None
        order = done.order


def overlapped(staged: Tensor, client: ShardClient, flat: FlatModel, compute: Any) -> None:
    """Make the round trip of a gradient while the next one is computed."""
    orders: list[Order] = [client.next(), client.next(wait=False)]
    flight: PushHandle | None = None
    while isinstance(order := orders.pop(0), Compute):
        compute()
        read = list(client.versions)
        if flight is not None:
            orders.append(flight.wait().order or Finish(""))
            if client.values is client.home:  # it was copied, since the server could not show its own
                flat.values.copy_(staged)
            else:
                flat.look_at(client.values)
        flight = client.start_push(
            [order], flat.gradient, loss_sums=[0.0], versions=read, pull_into=staged, next_order=False
        )
        if not orders or not isinstance(orders[0], Compute):
            flight.wait()
            flight, orders = None, [client.next()]


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    torch.set_num_threads(1)
    keep_freed_memory()
    if len(sys.argv) > 3:
        work(spec, int(sys.argv[3]), int(sys.argv[4]))
        os._exit(0)  # gloo's threads abort some regular exits
    found = serve(spec)
    Path(sys.argv[2]).write_text(json.dumps(found), encoding="utf-8")
    os._exit(0)


if __name__ == "__main__":
    main()
