"""A real Ray cluster for tests: `ray start` processes with a job server, on free ports and in a directory of their own.

Other clusters on the machine are neither found nor touched: every port is picked, the temporary directory is private,
and only the processes started here are ended (never `ray stop`, which ends everybody's).
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil

from orchestray.platform.process.sockets import free_ports
from support.patience import PATIENCE_S

_START_TIMEOUT_S = PATIENCE_S
_STOP_TIMEOUT_S = 15.0
_ANSWER_TIMEOUT_S = 30.0
_START = """
from ray.scripts.scripts import main

from orchestray.platform.cluster import forking
from orchestray.platform.cluster.ray_internals import find

Node = find("ray._private.node:Node")
AGENT_PORT = find("ray._raylet:DASHBOARD_AGENT_LISTEN_PORT_NAME")
start = Node.start_ray_processes

def start_ray_processes(self):
    find("ray._raylet:persist_port")(
        self._session_dir, self._node_id, AGENT_PORT, self._ray_params.dashboard_agent_listen_port
    )
    if forking.is_wanted():
        self._ray_params.setup_worker_path = forking.SHIM
    if self.head and forking.is_wanted():
        self.all_processes[forking.NAME] = [forking.start_template(self)]
    start(self)

Node.start_ray_processes = start_ray_processes
Node.start_monitor = Node.start_ray_client_server = lambda self: None
main()
"""
"""A script that does what `ray start` does, with a raylet that waits longer for the port of its agent.

Otherwise the raylet would end after 15 s. Workers that ask for nothing of their own are forked, as on a Ray of our own:
a start costs more than what most do. Those of all nodes are forked from the template of the first: the folder of their
sockets is the same. The node has no autoscaler, and no server of Ray's own client: nothing here asks for them.
"""
_PATIENCE = {
    "RAY_raylet_start_wait_time_s": "300",
    "RAY_worker_register_timeout_seconds": "300",
    "RAY_agent_register_timeout_ms": "300000",
}
"""Ray itself would give up on a node after 30 s."""
_REPORTS = {"RAY_metrics_report_interval_ms": "500"}
"""Ray itself passes on what processes have counted every 10 s."""
_NOTICES_LOSSES = {"RAY_health_check_initial_delay_ms": "500", "RAY_health_check_period_ms": "500"}
"""Ray itself asks a node every 3 s whether it is there, and takes it for lost after five refusals. Who is gone refuses
at once; who is merely slow has 10 s to answer, as in Ray itself."""
_PR_SET_PDEATHSIG = 1
_OBJECT_STORE_BYTES = 100 * 1024 * 1024


class RayCluster:
    """A head node with a dashboard, and nodes added to it; `stop` ends exactly these.

    Args:
        num_cpus: Logical CPUs of the head node.
        environment: The environment its processes get; default: this process's. Token authentication is on if
            a token is found in it (RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH, ~/.ray/auth_token), if RAY_AUTH_MODE is unset.
    """

    def __init__(self, *, num_cpus: int = 2, environment: Mapping[str, str] | None = None) -> None:
        self._environment = _node_environment(os.environ if environment is None else environment)
        # Short: sockets live in it, and their paths may have 107 characters.
        self._directory = Path(tempfile.mkdtemp(prefix="ray-"))
        self._nodes: list[subprocess.Popen[bytes]] = []
        self._metrics_ports: list[int] = []
        self._num_started = 0
        gcs_port, dashboard_port = free_ports(2)
        self.gcs_address = f"127.0.0.1:{gcs_port}"
        self.http_address = f"http://127.0.0.1:{dashboard_port}"
        try:
            self._start_node(
                "--head",
                "--node-ip-address=127.0.0.1",
                f"--port={gcs_port}",
                "--include-dashboard=true",
                "--dashboard-host=127.0.0.1",
                f"--dashboard-port={dashboard_port}",
                f"--num-cpus={num_cpus}",
            )
            self.wait_for_nodes()
        except BaseException:
            self.stop()
            raise

    def add_node(self, *, num_cpus: int = 2) -> None:
        """Start one more node of the cluster on this machine, and wait until the cluster knows it."""
        self._start_node(f"--address={self.gcs_address}", "--node-ip-address=127.0.0.1", f"--num-cpus={num_cpus}")
        self.wait_for_nodes()

    @property
    def num_nodes(self) -> int:
        """Number of nodes that were started and not killed."""
        return len(self._nodes)

    def metrics(self) -> str:
        """Return Ray's metrics of all nodes, in Prometheus' text format."""
        found = []
        for port in self._metrics_ports:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
                found.append(answer.read().decode())
        return "\n".join(found)

    @property
    def head(self) -> str:
        """Id of the first node."""
        return self._node_id(self._family(self._nodes[0]))

    @staticmethod
    def _family(node: subprocess.Popen[bytes]) -> list[psutil.Process]:
        """Return the process that was started for a node and its descendants; none if it has ended by itself."""
        with contextlib.suppress(psutil.NoSuchProcess):
            root = psutil.Process(node.pid)
            return [root, *root.children(recursive=True)]
        return []

    @staticmethod
    def _node_id(family: list[psutil.Process]) -> str:
        """Return the id of the node of these processes; empty if its raylet has ended, as a drained node's does."""
        words: list[str] = []
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):  # it may end in this moment
                words += process.cmdline() if process.name() == "raylet" else []
        return next((word.partition("=")[2] for word in words if word.startswith("--node_id=")), "")

    def kill_last_node(self) -> None:
        """End every process of the node that was added last, as when its machine loses its power."""
        self._kill(self._nodes[-1])

    def _kill(self, node: subprocess.Popen[bytes]) -> None:
        self._nodes.remove(node)
        family = self._family(node)
        node_id = self._node_id(family)
        # Its forked workers are children of the template, which is the first node's.
        workers = [worker for worker, its_node in self.workers().items() if its_node == node_id]
        for pid in [*(process.pid for process in family), *workers]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        node.wait()

    def stop(self) -> None:
        """End every process of the cluster and remove its files."""
        doomed: list[psutil.Process] = []
        for node in self._nodes:
            with contextlib.suppress(psutil.NoSuchProcess):
                root = psutil.Process(node.pid)
                doomed += [*root.children(recursive=True), root]
        for node in reversed(self._nodes):
            node.terminate()
        _, alive = psutil.wait_procs(doomed, timeout=_STOP_TIMEOUT_S)
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        for node in self._nodes:
            node.wait()
        self._nodes.clear()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _start_node(self, *options: str) -> None:
        client_port, agent_port, agent_grpc_port, runtime_env_port, metrics_port = free_ports(5)
        self._metrics_ports.append(metrics_port)
        log_path = self._directory / f"node-{self._num_started}.txt"
        self._num_started += 1
        command = [
            sys.executable,
            "-c",
            _START,
            "start",
            "--block",
            "--disable-usage-stats",
            "--include-log-monitor=false",
            f"--object-store-memory={_OBJECT_STORE_BYTES}",
            f"--temp-dir={self._directory}",
            f"--ray-client-server-port={client_port}",
            f"--dashboard-agent-listen-port={agent_port}",
            f"--dashboard-agent-grpc-port={agent_grpc_port}",
            f"--runtime-env-agent-port={runtime_env_port}",
            f"--metrics-export-port={metrics_port}",
            *options,
        ]
        with log_path.open("wb") as log:
            self._nodes.append(
                subprocess.Popen(
                    command,
                    env=self._environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    cwd=self._directory,
                    preexec_fn=_end_with_parent,  # noqa: PLW1509 - a killed test run must not leave a cluster behind
                )
            )

    def wait_for_nodes(self) -> None:
        """Wait until the cluster knows exactly those that were started, and has noticed that the killed are gone."""
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        while self._num_live_nodes() != len(self._nodes):
            if time.monotonic() > deadline_s or self._nodes[-1].poll() is not None:
                log = (self._directory / f"node-{self._num_started - 1}.txt").read_text(errors="replace")
                raise RuntimeError(f"The Ray node did not start within {_START_TIMEOUT_S:g} s:\n{log}")
            time.sleep(0.1)

    def _num_live_nodes(self) -> int:
        """Return the number of live nodes the job server knows of; 0 while it does not answer yet."""
        try:
            summary = self._asked("nodes?view=summary")["summary"]
        except (OSError, urllib.error.URLError, KeyError, ValueError):
            return 0
        return sum(node.get("raylet", {}).get("state") == "ALIVE" for node in summary)

    def workers(self) -> dict[int, str]:
        """Return the id of its node for each process that works for one and is alive."""
        found = self._asked("api/v0/workers?limit=1000")["result"]["result"]
        return {worker["pid"]: worker["node_id"] for worker in found if worker["is_alive"] and worker["pid"]}

    def _asked(self, path: str) -> dict[str, Any]:
        """Return what the job server knows."""
        request = urllib.request.Request(  # noqa: S310 - http, and our own
            f"{self.http_address}/{path}", headers=self._headers()
        )
        with urllib.request.urlopen(request, timeout=_ANSWER_TIMEOUT_S) as response:  # noqa: S310
            data: dict[str, Any] = json.load(response)["data"]
        return data

    def _headers(self) -> dict[str, str]:
        token = find_token(self._environment)
        return {"Authorization": f"Bearer {token}"} if token else {}


@contextlib.contextmanager
def ray_cluster(
    *, num_cpus: int = 2, environment: Mapping[str, str] | None = None, num_nodes: int = 1
) -> Iterator[RayCluster]:
    """Yield a running cluster of `num_nodes` local nodes with `num_cpus` logical CPUs each, stopped at the end."""
    cluster = RayCluster(num_cpus=num_cpus, environment=environment)
    try:
        for _ in range(num_nodes - 1):
            cluster.add_node(num_cpus=num_cpus)
        yield cluster
    finally:
        cluster.stop()


def find_token(environment: Mapping[str, str]) -> str | None:
    """Return the authentication token Ray would find in this environment, if any."""
    if environment.get("RAY_AUTH_TOKEN"):
        return environment["RAY_AUTH_TOKEN"]
    home = environment.get("HOME", "")
    path = Path(environment.get("RAY_AUTH_TOKEN_PATH") or Path(home) / ".ray" / "auth_token")
    return path.read_text(encoding="utf-8").strip() if path.is_file() else None


def _node_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without what would lead to other clusters, and with its authentication spelled out.

    A head node turns token authentication on by itself where it finds a token; a node that joins does not.
    """
    chosen = {
        name: value for name, value in environment.items() if name not in {"RAY_ADDRESS", "RAY_API_SERVER_ADDRESS"}
    }
    chosen.setdefault("RAY_AUTH_MODE", "token" if find_token(environment) else "disabled")
    chosen.setdefault("RAY_worker_niceness", "0")  # Ray's own is 15: beside other tests its workers would hardly run
    return {**_PATIENCE, **_REPORTS, **_NOTICES_LOSSES, **chosen}


def _end_with_parent() -> None:
    """Ask the kernel to end this process with the one that started it, even after SIGKILL (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
