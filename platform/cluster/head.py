"""A head node of our own, without the parts of Ray that a single run never uses.

`ray.init()` starts a dashboard server, an autoscaler monitor and a log monitor, and waits for them. That is about 2 s
of the 4 s until a driver can work, on two cores. A run that starts its own Ray needs none of the three. Ray has no
public switch for all of them, so only this file uses Ray's private API. `start` returns None if a future Ray looks
different, and the caller falls back to plain `ray.init()`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestray.platform.cluster import forking, ray_internals, sessions
from orchestray.platform.process.sockets import free_ports

if TYPE_CHECKING:
    import psutil

_REGISTER_TIMEOUT_S = 120.0
"""Time a node has to register on a busy machine; Ray itself would give up after 30 s."""
_POLL_S = 0.02
_ATTEMPTS = 3
_PATIENCE = {
    "RAY_raylet_start_wait_time_s": "120",
    "RAY_worker_register_timeout_seconds": "120",
    "RAY_agent_register_timeout_ms": "120000",
}
"""Timeouts for busy machines, where imports take long; Ray's own: 30 s for a node, 60 for a worker, 30 for an agent."""
_POPEN = "ray._private.services:ConsolePopen"
_DASHBOARD_ERROR = "ray._private.utils:get_dashboard_dependency_error"
_AUTHENTICATION = "ray._private.authentication.authentication_token_setup:ensure_token_if_auth_enabled"


class ServerEndedError(RuntimeError):
    """Raised when a process that Ray needs has ended."""


class Head:
    """The processes of one head node; they also end by themselves when this process dies."""

    def __init__(self, node: Any) -> None:
        self._node = node
        self.address: str = node.gcs_address
        self._session = Path(node.get_session_dir_path())
        self._lock = sessions.hold(self._session)
        self._watch = _watch([process.pid for process in self._processes()])

    def kill(self) -> None:
        """Kill every process of the node at once, including workers (SIGKILL; nothing of value is in them)."""
        import psutil

        self._watch.kill()  # first: it must never kill by a process id that was reused meanwhile
        self._watch.communicate()
        for process in self._processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        for infos in self._node.all_processes.values():
            for info in infos:
                with contextlib.suppress(Exception):
                    info.process.wait(timeout=1)
        self._node.all_processes.clear()
        if self._lock is not None:
            self._lock.close()
        sessions.tidy(self._session.parent)

    def _processes(self) -> list[psutil.Process]:
        """Return the node's processes and all their descendants."""
        import psutil

        found = []
        for info in (info for infos in self._node.all_processes.values() for info in infos):
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(info.process.pid)
                found += [process, *process.children(recursive=True)]
        return found


def _watch(process_ids: list[int]) -> subprocess.Popen[bytes]:
    """Start a process that outlives this one just long enough to kill the given processes.

    If this process is killed, the kernel ends Ray's servers with it, but not the helpers they have started. Those would
    look for the dead head for another minute.
    """
    kill = 'read -r _; kill -9 "$@" 2>/dev/null'
    arguments = ["/bin/sh", "-c", kill, "sh", *map(str, process_ids)]
    return subprocess.Popen(arguments, stdin=subprocess.PIPE, start_new_session=True)


def silence() -> None:
    """Keep Ray from printing messages about its workers: the driver reports them in its own words."""
    import ray  # noqa: F401 - its modules are there only then

    with contextlib.suppress(AttributeError):  # only more notices would be printed
        ray_internals.replace("ray._private.worker:_worker_logs_enabled", False)


def read_environment() -> None:
    """Make Ray read its settings from the environment again.

    It keeps what it read first. RAY_AUTH_MODE may have been set since, as `prepare` does: the servers that this process
    starts would want a token, and it would send none.
    """
    with contextlib.suppress(ImportError, AttributeError):
        ray_internals.find("ray._raylet:Config").initialize("")


def start(num_cpus: int) -> Head | None:
    """Start a head node with `num_cpus` logical CPUs; return None if this version of Ray is not built as expected."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ray's default is 15, for machines that others use too; our user is waiting for these workers.
    os.environ.setdefault("RAY_worker_niceness", "0")
    for attempts_left in reversed(range(_ATTEMPTS)):
        try:
            return Head(_slim_node(num_cpus))
        except (ImportError, AttributeError, TypeError):
            return None
        except ServerEndedError:  # another process may have taken a port
            if attempts_left == 0:
                raise
    return None


@contextlib.contextmanager
def _groups_of_their_own() -> Iterator[None]:
    """Give Ray's servers process groups of their own.

    `timeout`, batch schedulers and systemd send SIGTERM to the whole group of a command. It is meant for the command
    alone, which first saves a checkpoint, and it needs Ray's servers to do so.
    """
    popen = ray_internals.find(_POPEN)
    ray_internals.replace(_POPEN, partial(popen, process_group=0))
    try:
        yield
    finally:
        ray_internals.replace(_POPEN, popen)


@contextlib.contextmanager
def _minimal_agent() -> Iterator[None]:
    """Make the node's agent serve no dashboard and export no metrics: they are unused, and cost a second of imports.

    Ray starts such an agent if the packages of its dashboard are not installed; the driver need not look for them.
    """
    find_error = ray_internals.find(_DASHBOARD_ERROR)
    ray_internals.replace(_DASHBOARD_ERROR, lambda: ImportError("no dashboard is wanted"))
    try:
        yield
    finally:
        ray_internals.replace(_DASHBOARD_ERROR, find_error)


def has_lost_a_server(processes: Mapping[str, Sequence[Any]]) -> bool:
    """Return True if a process that Ray needs has ended; it works without the workers' template."""
    servers = (info.process for name, infos in processes.items() if name != forking.NAME for info in infos)
    return any(server.poll() is not None for server in servers)


@contextlib.contextmanager
def ended_if_its_start_fails(node: Any) -> Iterator[None]:
    """End the processes of a node whose start fails: Ray leaves them, and a lost one is worth another attempt.

    Raises:
        ServerEndedError: one of them has ended.
    """
    try:
        yield
    except Exception as error:
        has_ended = has_lost_a_server(node.all_processes)
        node.kill_all_processes(check_alive=False, allow_graceful=False)
        if has_ended:
            raise ServerEndedError("one of Ray's own processes ended while it started.") from error
        raise


def _slim_node(num_cpus: int) -> Any:
    node_class: Any = ray_internals.find("ray._private.node:Node")
    persist_port = ray_internals.find("ray._raylet:persist_port")
    agent_port_name = ray_internals.find("ray._raylet:DASHBOARD_AGENT_LISTEN_PORT_NAME")

    # The raylet waits at most 15 s for its agents to report the ports they chose, unless the ports are given. The one
    # port that cannot be given is read from the file in which the agent would write it.
    agent_grpc, agent_http, runtime_env, metrics = free_ports(4)

    class SlimNode(node_class):  # type: ignore[misc]  # Ray's class is found by its name
        def start_head_processes(self) -> None:
            """Start the template of the workers first, so that it imports while the servers start."""
            if forking.is_wanted():
                self.all_processes[forking.NAME] = [forking.start_template(self)]
            with ended_if_its_start_fails(self):
                super().start_head_processes()

        def start_api_server(self, *, include_dashboard: bool | None, raise_on_failure: bool) -> None:
            """Do not start a dashboard: a run has its own displays, and nothing here uses Ray's server."""

        def start_ray_processes(self) -> None:
            """Start the raylet and wait until it is registered; Ray itself would check once a second."""
            persist_port(self._session_dir, self._node_id, agent_port_name, agent_http)
            with ended_if_its_start_fails(self):
                super().start_ray_processes()
                deadline_s = time.monotonic() + _REGISTER_TIMEOUT_S
                gcs: Any = self.get_gcs_client()
                while not gcs.get_all_node_info(timeout=5) and time.monotonic() < deadline_s:
                    if has_lost_a_server(self.all_processes):
                        raise ServerEndedError
                    time.sleep(_POLL_S)

    for name, value in _PATIENCE.items():
        os.environ.setdefault(name, value)  # the raylet reads them
    logging.getLogger("ray").setLevel(logging.CRITICAL)
    os.environ.setdefault("RAY_AUTH_MODE", "token")  # as `ray.init` does: the head is started without it
    read_environment()
    ray_internals.find(_AUTHENTICATION)({}, create_token_if_missing=True)
    parameters = ray_internals.find("ray._private.parameter:RayParams")(
        metrics_agent_port=agent_grpc,
        dashboard_agent_listen_port=agent_http,
        runtime_env_agent_port=runtime_env,
        metrics_export_port=metrics,
        num_cpus=num_cpus,
        no_monitor=True,
        include_log_monitor=False,
        include_dashboard=False,
        dashboard_host="127.0.0.1",
        setup_worker_path=forking.SHIM if forking.is_wanted() else None,
    )
    # spawn_reaper: the kernel ends these processes with this one, even after SIGKILL.
    with _groups_of_their_own(), _minimal_agent():
        return SlimNode(parameters, head=True, shutdown_at_exit=False, spawn_reaper=True, ray_init_cluster=True)
