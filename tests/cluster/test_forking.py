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
        return os.getpid(), os.environ.get("OF_THE_TEST", os.environ.get("RAY_OF_THE_TEST")), str(Path.cwd())


def is_forked(process: int) -> bool:
    parent = psutil.Process(process).parent()
    return parent is not None and any(part.endswith("worker_template.py") for part in parent.cmdline())


def test_a_runtime_environment_is_had_as_asked_and_other_workers_are_forked(cluster: Cluster) -> None:
    actor: Any = Place
    of_ray = {"RAY_OF_THE_TEST": "yes", "PL_DISABLE_FORK": "1"}  # Tune sets the second for what is not loaded
    environments = [{"env_vars": {"OF_THE_TEST": "yes"}}, {"env_vars": of_ray}, None]
    actors = [actor.options(runtime_env=environment).remote() for environment in environments]
    processes, variables, directories = zip(*ray.get([each.tell.remote() for each in actors]), strict=True)
    assert variables == ("yes", "yes", None)
    assert list(map(is_forked, processes)) == [False, True, True], "only Ray reads what is called RAY_…"
    assert set(directories) == {str(Path.cwd())}
    for ended in actors:
        ray.kill(ended)
    psutil.wait_procs(
        [psutil.Process(process) for process in processes if psutil.pid_exists(process)], timeout=PATIENCE_S
    )


def test_nobody_serves_a_dashboard_on_a_ray_of_our_own(cluster: Cluster) -> None:
    assert cluster.head is not None
    port = cluster.head._node.dashboard_agent_listen_port
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
