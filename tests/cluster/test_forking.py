"""A Ray of our own: its workers are forks of a template, but for what must start plainly; no dashboard is there."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import ray

from support.patience import PATIENCE_S

if TYPE_CHECKING:
    from orchestray.platform.cluster.cluster import Cluster


@ray.remote(num_cpus=0)
class Place:
    def tell(self) -> tuple[int, str | None, str]:
        return os.getpid(), os.environ.get("OF_THE_TEST"), str(Path.cwd())


def is_forked(process: int) -> bool:
    parent = psutil.Process(process).parent()
    return parent is not None and any(part.endswith("worker_template.py") for part in parent.cmdline())


def test_a_runtime_environment_is_had_as_asked_and_other_workers_are_forked(cluster: Cluster) -> None:
    actor: Any = Place
    asked = actor.options(runtime_env={"env_vars": {"OF_THE_TEST": "yes"}}).remote()
    plain = actor.remote()
    (one, variable, _), (two, none, directory) = ray.get([asked.tell.remote(), plain.tell.remote()])
    assert (variable, none) == ("yes", None)
    assert (is_forked(one), is_forked(two)) == (False, True)
    assert directory == str(Path.cwd())
    for ended in (asked, plain):
        ray.kill(ended)
    psutil.wait_procs(
        [psutil.Process(process) for process in (one, two) if psutil.pid_exists(process)], timeout=PATIENCE_S
    )


def test_nobody_serves_a_dashboard_on_a_ray_of_our_own(cluster: Cluster) -> None:
    assert cluster.head is not None
    port = cluster.head._node.dashboard_agent_listen_port
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
