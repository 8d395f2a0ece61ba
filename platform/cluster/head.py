"""A head node of our own, without the parts of Ray that a single run never uses.

`ray.init()` starts a dashboard server, an autoscaler monitor and a log monitor, and waits for them: about 2 s of the
4 s until a driver can work, on two cores. A run that starts its own Ray needs none of the three. Ray has no public
switch for all of them, so this file alone steps below the public API; `start` returns None where a future Ray no
longer looks as it does here, and the caller falls back to plain `ray.init()`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from orchestray.platform.cluster import forking
from orchestray.platform.listening import free_ports

if TYPE_CHECKING:
    import psutil

_REGISTER_TIMEOUT_S = 120.0
"""On a machine that is busy with something else; Ray itself would give up after 30 s."""
_POLL_S = 0.02
_ATTEMPTS = 3
_PATIENCE = {
    "RAY_raylet_start_wait_time_s": "120",
    "RAY_worker_register_timeout_seconds": "120",
    "RAY_agent_register_timeout_ms": "120000",
}
"""Ray itself gives a node 30 s to start, a worker 60, an agent 30: on a busy machine each imports for long."""


class ServerEndedError(RuntimeError):
    """A process ended that Ray needs."""


class Head:
    """The processes of one head node; they also end by themselves when this process dies."""

    def __init__(self, node: Any) -> None:
        self._node = node
        self.address: str = node.gcs_address
        self._watch = _watch([process.pid for process in self._processes()])

    def kill(self) -> None:
        """End every process of the node at once, workers included (SIGKILL; nothing of value lives in them)."""
        import psutil

        self._watch.kill()  # first: it must never kill by a number that another process has got since
        self._watch.communicate()
        for process in self._processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        for infos in self._node.all_processes.values():
            for info in infos:
                with contextlib.suppress(Exception):
                    info.process.wait(timeout=1)
        self._node.all_processes.clear()

    def _processes(self) -> list[psutil.Process]:
        """The node's processes and all that descend from them."""
        import psutil

        found = []
        for info in (info for infos in self._node.all_processes.values() for info in infos):
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(info.process.pid)
                found += [process, *process.children(recursive=True)]
        return found


def _watch(process_ids: list[int]) -> subprocess.Popen[bytes]:
    """A process that outlives this one just long enough to end these.

    If this process is killed, the kernel ends Ray's servers with it, but not the helpers those have started, which
    would look for the dead head for a minute more.
    """
    kill = 'read -r _; kill -9 "$@" 2>/dev/null'
    arguments = ["/bin/sh", "-c", kill, "sh", *map(str, process_ids)]
    return subprocess.Popen(arguments, stdin=subprocess.PIPE, start_new_session=True)


def silence() -> None:
    """Keep Ray from printing what happens to its workers: the driver says it in its own words, where it belongs."""
    import ray

    ray._private.worker._worker_logs_enabled = False


def start(num_cpus: int) -> Head | None:
    """Start a head node with `num_cpus` logical CPUs, or return None if this Ray is not built as expected."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ray's own is 15, for machines that others use too; these workers are what the user waits for.
    os.environ.setdefault("RAY_worker_niceness", "0")
    for attempts_left in reversed(range(_ATTEMPTS)):
        try:
            return Head(_slim_node(num_cpus))
        except (ImportError, AttributeError, TypeError):
            return None
        except ServerEndedError:  # somebody may have taken a port
            if attempts_left == 0:
                raise
    return None


@contextlib.contextmanager
def _groups_of_their_own() -> Iterator[None]:
    """Ray's servers get process groups of their own.

    `timeout`, batch schedulers and systemd send SIGTERM to the whole group of a command. That is for the command alone,
    which has a checkpoint saved first; without Ray's servers nobody would be there to save it.
    """
    from ray._private import services

    popen = services.ConsolePopen
    services.ConsolePopen = partial(popen, process_group=0)  # type: ignore[assignment, misc]
    try:
        yield
    finally:
        services.ConsolePopen = popen  # type: ignore[misc]


@contextlib.contextmanager
def _minimal_agent() -> Iterator[None]:
    """The node's agent serves no dashboard and exports no metrics: nobody asks it, and it imports for a second less.

    It is what Ray starts where the packages of its dashboard are not installed; the driver need not look for them.
    """
    from ray._private import utils

    find_error = utils.get_dashboard_dependency_error
    utils.get_dashboard_dependency_error = lambda: ImportError("no dashboard is wanted")
    try:
        yield
    finally:
        utils.get_dashboard_dependency_error = find_error


def has_lost_a_server(processes: Mapping[str, Sequence[Any]]) -> bool:
    """Whether one of these processes has ended that Ray needs: without the template of workers these start plainly."""
    servers = (info.process for name, infos in processes.items() if name != forking.NAME for info in infos)
    return any(server.poll() is not None for server in servers)


def _slim_node(num_cpus: int) -> Any:
    from ray._private.authentication.authentication_token_setup import (
        enable_token_auth_by_default,
        ensure_token_if_auth_enabled,
    )
    from ray._private.node import Node
    from ray._private.parameter import RayParams
    from ray._raylet import DASHBOARD_AGENT_LISTEN_PORT_NAME, persist_port  # type: ignore[attr-defined]

    # The raylet waits 15 s, and no longer, for agents to tell it the ports they have found; not where it is told. Of
    # one it is not told, but looks into the file where the agent will write it.
    agent_grpc, agent_http, runtime_env, metrics = free_ports(4)

    class SlimNode(Node):
        def start_head_processes(self) -> None:
            """Start what workers are forked from first: it imports while the servers start."""
            if forking.is_wanted():
                self.all_processes[forking.NAME] = [forking.start_template(self)]
            super().start_head_processes()  # type: ignore[no-untyped-call]

        def start_api_server(self, *, include_dashboard: bool | None, raise_on_failure: bool) -> None:
            """No dashboard: a run has its own displays, and nothing here talks to its server."""

        def start_ray_processes(self) -> None:
            """Start the raylet and wait until it is known: Ray itself would look once a second."""
            persist_port(self._session_dir, self._node_id, DASHBOARD_AGENT_LISTEN_PORT_NAME, agent_http)
            super().start_ray_processes()  # type: ignore[no-untyped-call]
            deadline_s = time.monotonic() + _REGISTER_TIMEOUT_S
            gcs: Any = self.get_gcs_client()  # type: ignore[no-untyped-call]
            while not gcs.get_all_node_info(timeout=5) and time.monotonic() < deadline_s:
                if has_lost_a_server(self.all_processes):
                    self.kill_all_processes(check_alive=False, allow_graceful=False)
                    raise ServerEndedError("one of Ray's own processes ended while it started.")
                time.sleep(_POLL_S)

    for name, value in _PATIENCE.items():
        os.environ.setdefault(name, value)  # the raylet reads them
    logging.getLogger("ray").setLevel(logging.CRITICAL)
    enable_token_auth_by_default()
    ensure_token_if_auth_enabled({}, create_token_if_missing=True)
    parameters = RayParams(
        metrics_agent_port=agent_grpc,
        dashboard_agent_listen_port=agent_http,
        runtime_env_agent_port=runtime_env,
        metrics_export_port=metrics,
        num_cpus=num_cpus,
        no_monitor=True,
        include_log_monitor=False,  # type: ignore[arg-type]  # Ray annotates this switch as a text
        include_dashboard=False,
        dashboard_host="127.0.0.1",
        setup_worker_path=forking.SHIM if forking.is_wanted() else None,
    )
    # spawn_reaper: the kernel ends these processes with this one, even after SIGKILL.
    with _groups_of_their_own(), _minimal_agent():
        return SlimNode(parameters, head=True, shutdown_at_exit=False, spawn_reaper=True, ray_init_cluster=True)
