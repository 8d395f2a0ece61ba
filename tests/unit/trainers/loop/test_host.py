"""The host of a gang's member, between two attempts and at its end."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from orchestray.platform.comm.collective import Collective, PeerLostError
from orchestray.platform.run.checkpoint import CheckpointWriter
from orchestray.platform.run.store import OpenForWriting
from orchestray.trainers.config.settings import Start
from orchestray.trainers.loop.host import ReplicaHost
from support.layouts import layout_settings
from support.patience import PATIENCE_S
from support.threads import make_gloo_threads


class Hosted(ReplicaHost):
    """A host that is given its group: here no process has one of its own."""

    def __init__(self, settings: Any, collective: Collective) -> None:
        super().__init__(settings)
        self.given = collective

    def _join(self) -> Collective:
        self._collective = self.given
        return self.given


@pytest.mark.parametrize(
    ("network", "exchange"),
    [
        ({"data": 2}, {}),
        ({"pipeline": 2}, {}),
        ({"data": 2}, {"shard": "optimizer"}),
        ({"data": 2}, {"type": "elastic_averaging", "every": 2}),
    ],
    ids=["replicas", "stages", "shards", "a served centre"],
)
def test_a_host_that_is_closed_keeps_no_connection_and_no_thread(
    network: dict[str, int], exchange: dict[str, Any]
) -> None:
    before = set(threading.enumerate())
    members = make_gloo_threads(2)
    settings = replace(layout_settings(network, exchange), checkpoint_storage=None)
    hosts = [Hosted(settings, collective) for collective in members]
    threads = [threading.Thread(target=host.train, args=(Start(time.time(), None, 0),)) for host in hosts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    for host in hosts:
        host.close()
    for collective in members:
        with pytest.raises(PeerLostError, match="left its group"):
            collective.barrier()
    deadline_s = time.monotonic() + PATIENCE_S
    while (left := set(threading.enumerate()) - before) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert not left


class Watched(threading.Event):
    """An event that shows when a thread waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self.is_waited_for = threading.Event()

    def wait(self, timeout: float | None = None) -> bool:
        self.is_waited_for.set()
        return super().wait(timeout)


def test_a_host_goes_on_from_the_checkpoint_under_way_and_not_from_one_that_it_removes(tmp_path: Path) -> None:
    settings = replace(layout_settings(), checkpoint_storage=str(tmp_path), checkpoint_keep=1)
    host = ReplicaHost(settings)
    writer = host._checkpoints = CheckpointWriter(tmp_path, keep=1)
    tensors = {"weight": torch.ones(3)}
    writer.save_async(10, tensors, {}, {"position": {"step": 10}})
    writer.wait()
    create, go_on = writer._store.create, threading.Event()

    @contextlib.contextmanager
    def slowly(name: str) -> Iterator[OpenForWriting]:
        assert go_on.wait(PATIENCE_S)
        with create(name) as open_file:
            yield open_file

    writer._store.create = slowly  # type: ignore[method-assign]
    writer.save_async(20, tensors, {}, {"position": {"step": 20}})
    idle = writer._idle = Watched()  # of the save that is under way
    found: list[Any] = []
    loading = threading.Thread(target=lambda: found.append(host._load(Start(time.time(), None, 1))))
    loading.start()
    while loading.is_alive() and not idle.is_waited_for.wait(0.01):
        pass
    go_on.set()
    loading.join(PATIENCE_S)
    host.close()
    assert found[0].state["position"] == {"step": 20}
    model = found[0].model().tensors
    assert torch.equal(model["weight"], tensors["weight"])
