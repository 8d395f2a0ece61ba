"""A dry run of a worker of parameter servers: the product's own worker and servers, in processes of their own.

One worker is measured with its servers on this machine. What more workers cost each other is added by a model of the
queue in front of the servers (`trainers.planning.servers`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from math import ceil, lcm
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from torch.distributed import FileStore

from orchestray.trainers.config.settings import ReplicaSettings, Start
from orchestray.trainers.layout.degrees import Layout
from orchestray.trainers.planning.dry_run import ENDLESS, peak_memory, resident_memory, without_ends
from orchestray.trainers.planning.record import measured_step_s
from orchestray.trainers.ps.hosts.server_host import ServerHost
from orchestray.trainers.ps.hosts.worker_host import WorkerHost
from orchestray.trainers.ps.protocol.address import Address

if TYPE_CHECKING:
    from torch import Tensor

    from orchestray.trainers.ps.protocol.requests import Answer, Entry
    from orchestray.trainers.ps.server.state_machine import Machine

_HOST, _NAME = "127.0.0.1", "dry-run-0"
_WARM_UP_STEPS, _LEAST_STEPS = 6, 12
_AIM_S, _POLL_S, _TIMEOUT_S = 0.8, 0.05, 120.0
_DONE = "done"


def of_one_worker(settings: ReplicaSettings, folder: Path) -> ReplicaSettings:
    """Return the settings of one worker with its share of the batch, and its servers without copies.

    The run keeps a checkpoint at its end: that is when its processes need most memory.

    Args:
        settings: settings of the run.
        folder: folder for what the run keeps.
    """
    share = ceil(settings.batch_size / settings.layout.data)
    exchange = {**settings.exchange, "replicas": 1, "groups": 1, "backup_workers": 0, "persist": False}
    alone = replace(settings, layout=Layout(), batch_size=share, exchange=exchange, recompute="none")
    return replace(without_ends(alone), checkpoint_every_steps=ENDLESS, checkpoint_storage=str(folder / "checkpoints"))


def serve(settings: ReplicaSettings, rank: int, meeting: Path, start: Callable[[], None]) -> dict[str, Any]:
    """Run the server of a shard until the worker is done.

    Args:
        settings: result of `of_one_worker`.
        rank: number of the shard; the first is the lead, which ends the run once it has seen enough steps.
        meeting: file through which the processes meet.
        start: called once all is built; it waits for the others.

    Returns:
        Seconds for which it applied a push (the median), the number of pushes, the bytes of a share, sent and received,
        its CPU seconds, what its memory grew by, and of the lead the seconds of a step.

    Raises:
        OrchestrayError: the config does not fit the task.
    """
    before = resident_memory()
    store = FileStore(str(meeting), -1)
    host = _Server(settings)
    port = host.begin(rank, Start(time.time()), _HOST)
    host.accept(0, _NAME)
    store.set(f"port-{rank}", str(port))
    start()
    cpu_s, step_s = time.process_time(), None
    if rank == 0:
        step_s = _lead(host)
    store.wait([_DONE], timedelta(seconds=_TIMEOUT_S))
    cpu_s = time.process_time() - cpu_s
    host.close()
    pushes = host.applied_s
    applied_s = median(pushes[_WARM_UP_STEPS:] or pushes or [0.0])
    push_every, fetch_every = int(settings.exchange["push_every"]), int(settings.exchange["fetch_every"])
    return {
        "step_s": step_s,
        "applied_s": applied_s,
        "num_pushes": len(pushes),
        "bytes": bytes_a_share(host.moved_bytes[_WARM_UP_STEPS:], push_every, fetch_every),
        "cpu_s": cpu_s,
        "grown_bytes": max(0, peak_memory() - before),
    }


def bytes_a_share(moved_bytes: Sequence[int], push_every: int, fetch_every: int) -> float:
    """Return the bytes of a share by what a server had sent and received at each push.

    Args:
        moved_bytes: bytes at each push.
        push_every: shares between two pushes of a worker.
        fetch_every: shares between two fetches.
    """
    period = lcm(push_every, fetch_every) // push_every
    over = [after - before for before, after in zip(moved_bytes, moved_bytes[period:], strict=False)]
    return median(over) / (period * push_every) if over else 0.0


def _lead(host: ServerHost) -> float | None:
    """Watch the steps, and end the run after enough of them; return the seconds of one."""
    began_s, lines, step_s = time.perf_counter(), [], None
    while step_s is None or time.perf_counter() - began_s < _AIM_S:
        if time.perf_counter() - began_s > _TIMEOUT_S:
            break
        lines += host.drain(_POLL_S, _POLL_S, 0)
        step_s = measured_step_s(lines, warm_up=_WARM_UP_STEPS, least=_LEAST_STEPS)
    host.request_stop()
    return step_s


def work(settings: ReplicaSettings, meeting: Path, start: Callable[[], None]) -> dict[str, Any]:
    """Work for the servers until the lead ends the run.

    Args:
        settings: result of `of_one_worker`.
        meeting: file through which the processes meet.
        start: called once all is built; it waits for the others.

    Returns:
        Seconds in which it computed its shares, their number, its CPU seconds, and what its memory grew by.

    Raises:
        OrchestrayError: the config does not fit the task, or the task's code failed.
    """
    before = resident_memory()
    store = FileStore(str(meeting), -1)
    host = WorkerHost(settings)
    start()
    try:
        shards = range(int(settings.exchange["shards"]))
        servers = [Address(_HOST, int(store.get(f"port-{shard}")), _NAME) for shard in shards]
        cpu_s = time.process_time()
        host.train(0, 0, servers)
        cpu_s = time.process_time() - cpu_s
        usage = host.usage()
        host.close()
    finally:
        store.set(_DONE, "")
    grown = max(0, peak_memory() - before)
    return {"busy_s": usage["busy_s"], "shares": usage["shares"], "cpu_s": cpu_s, "grown_bytes": grown}


class _Server(ServerHost):
    """A host whose server times the pushes that it applies."""

    def __init__(self, settings: ReplicaSettings) -> None:
        super().__init__(settings)
        self.applied_s: list[float] = []
        self.moved_bytes: list[int] = []

    def _machine(self, *of_checkpoint: Any) -> Machine:
        machine = super()._machine(*of_checkpoint)
        apply = machine.apply

        def timed(entry: Entry, tensors: Sequence[Tensor] = ()) -> Answer:
            began_s = time.perf_counter()
            try:
                return apply(entry, tensors)
            finally:
                if entry.push is not None:
                    self.applied_s.append(time.perf_counter() - began_s)
                    self.moved_bytes.append(self._bytes_moved())

        setattr(machine, "apply", timed)  # noqa: B010 - a method, on this object alone
        return machine
