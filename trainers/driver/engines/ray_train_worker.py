"""The function that Ray Train runs in each of its workers: a replica that reports to the driver's mailbox."""

from __future__ import annotations

import contextlib
import os
import threading
import uuid
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

from orchestray.platform.actors.gpus import own_gpu
from orchestray.platform.actors.member import Failure, Identity, as_data, keep_freed_memory
from orchestray.platform.process.output import join_output
from orchestray.platform.process.pulse import PULSE
from orchestray.platform.process.working_directory import import_torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from orchestray.platform.comm.backend import BackendKind
    from orchestray.trainers.loop.host import ReplicaHost

_PUT_S = 0.1
_DRAIN_TIMEOUT_S = 1.0
_JOIN_TIMEOUT_S = 30.0


class RestartError(RuntimeError):
    """Raised by a healthy worker to have Ray Train restart the group: another was lost, or a node is drained."""


def train_loop(loop_config: dict[str, Any]) -> None:
    """Train as one worker of a Ray Train group.

    Args:
        loop_config: `settings`, `start`, the `mailbox` actor, `num_threads`, the `backend` of the process group, and
            `beat_s`, the seconds between two heartbeats.
    """
    import_torch()
    import ray
    import torch
    import torch.distributed as dist

    from orchestray.platform.comm.process_groups import Backend, adopt_default_group
    from orchestray.trainers.core.outcome import PEER_LOST

    mailbox: Any = loop_config["mailbox"]
    keep_freed_memory()
    torch.set_num_threads(loop_config["num_threads"])
    backend: BackendKind = loop_config["backend"]
    if backend != "gloo":
        adopt_default_group(Backend(backend, own_gpu()))
    rank = dist.get_rank() if dist.is_initialized() else 0
    attempt = _name_of_attempt()
    identity = Identity(os.getpid(), ray.util.get_node_ip_address(), join_output())
    if not ray.get(mailbox.enter.remote(attempt, rank, identity, ray.get_runtime_context().get_node_id())):
        return
    with _Heart(mailbox, attempt, rank, loop_config["beat_s"]) as heart:
        answer = as_data(lambda: _train(loop_config, attempt, rank, heart))
    if answer == PEER_LOST:
        if ray.get(mailbox.lost_touch.remote(attempt, rank)):
            return
        raise RestartError("another worker was lost")
    if ray.get(mailbox.answer.remote(attempt, rank, answer)):
        raise RestartError("a node leaves the cluster")
    if isinstance(answer, Failure) and dist.is_initialized():
        # It may have failed before it joined the others, which wait for it.
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group()


def _name_of_attempt() -> str:
    """Return a name that the workers of one attempt share: every attempt has a store of its own."""
    import torch.distributed as dist

    name = uuid.uuid4().hex
    if not dist.is_initialized():
        return name
    store = dist.distributed_c10d._get_default_store()
    return str(store.compare_set("orchestray-attempt", "", name).decode())


class _Heart:
    """A thread that says to the mailbox, again and again, how the work of this process goes on."""

    def __init__(self, mailbox: Any, attempt: str, rank: int, beat_s: float) -> None:
        self._host: ReplicaHost | None = None
        self._mailbox, self._attempt, self._rank, self._beat_s = mailbox, attempt, rank, beat_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._go_on_beating, name="heart", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()

    def built(self, host: ReplicaHost) -> None:
        """Say that the replica of this process is built: from now on it has less time to answer."""
        self._host = host
        self._beat()

    def _go_on_beating(self) -> None:
        while not self._ended.is_set():
            self._beat()
            self._ended.wait(self._beat_s)

    def _beat(self) -> None:
        import ray
        from ray.exceptions import RayError

        host = self._host
        beat = self._mailbox.beat.remote(self._attempt, self._rank, is_built=host is not None, sign=PULSE.sign())
        with contextlib.suppress(RayError):  # rank 0 notices when the driver is gone
            if ray.get(beat) and host is not None:
                host.abort()


def _train(loop_config: dict[str, Any], attempt: str, rank: int, heart: _Heart) -> Any:
    import ray

    from orchestray.trainers.loop.host import ReplicaHost

    mailbox: Any = loop_config["mailbox"]
    host = ReplicaHost(loop_config["settings"])
    heart.built(host)
    start = replace(loop_config["start"], attempt=ray.get(mailbox.num_kills_over.remote()))
    with contextlib.ExitStack() as while_training:
        if rank == 0:
            ray.get(mailbox.describe.remote(host.describe()))
            while_training.enter_context(_reporting(host, mailbox, attempt))
        while_training.enter_context(PULSE.work())
        return host.train(start)


@contextlib.contextmanager
def _reporting(host: ReplicaHost, mailbox: Any, attempt: str) -> Iterator[None]:
    """Send lines to the mailbox in the background, and all remaining ones at the end."""
    import ray
    from ray.exceptions import RayError

    done = threading.Event()

    def report() -> None:
        ended, written_step = False, 0
        while not ended:
            ended = done.is_set()
            lines = host.drain(0.0 if ended else _DRAIN_TIMEOUT_S, _PUT_S, written_step)
            try:
                stop, written_step = ray.get(mailbox.put.remote(attempt, lines))
            except RayError:  # the driver is gone, so the work is not needed
                host.abort()
                return
            if stop:
                host.request_stop()

    thread = threading.Thread(target=report, name="report", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join(_JOIN_TIMEOUT_S)
