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

import psutil

from orchestray.platform.listening import free_ports
from support.patience import PATIENCE_S

_START_TIMEOUT_S = PATIENCE_S
_STOP_TIMEOUT_S = 15.0
_START = """
from ray._private.node import Node
from ray._raylet import DASHBOARD_AGENT_LISTEN_PORT_NAME, persist_port
from ray.scripts.scripts import main

from orchestray.platform.cluster import forking

start = Node.start_ray_processes

def start_ray_processes(self):
    port = self._ray_params.dashboard_agent_listen_port
    persist_port(self._session_dir, self._node_id, DASHBOARD_AGENT_LISTEN_PORT_NAME, port)
    if self.head and forking.is_wanted():
        self._ray_params.setup_worker_path = forking.SHIM
        self.all_processes[forking.NAME] = [forking.start_template(self)]
    start(self)

Node.start_ray_processes = start_ray_processes
Node.start_monitor = Node.start_ray_client_server = lambda self: None
main()
"""
"""As `ray start`, but the raylet need not wait for its agent to say what port it was given: after 15 s it would end.
On the first node workers that ask for nothing of their own are forked, as on a Ray of our own: a start costs more than
what most do. The others have no template: those of one machine would meet at one socket, and it ends with its node.
There is no autoscaler, and no server of Ray's own client: nothing here asks for them."""
_PATIENCE = {
    "RAY_raylet_start_wait_time_s": "300",
    "RAY_worker_register_timeout_seconds": "300",
    "RAY_agent_register_timeout_ms": "300000",
}
"""Ray itself would give up on a node after 30 s."""
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
            self._wait_for_nodes(1)
        except BaseException:
            self.stop()
            raise

    def add_node(self, *, num_cpus: int = 2) -> None:
        """Start a second node of the cluster on this machine, and wait until the cluster knows it."""
        self._start_node(f"--address={self.gcs_address}", "--node-ip-address=127.0.0.1", f"--num-cpus={num_cpus}")
        self._wait_for_nodes(len(self._nodes))

    def kill_last_node(self) -> None:
        """End every process of the node that was added last, as when its machine loses its power."""
        root = psutil.Process(self._nodes.pop().pid)
        for process in [root, *root.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        root.wait()

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
        log_path = self._directory / f"node-{len(self._nodes)}.txt"
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

    def _wait_for_nodes(self, num_nodes: int) -> None:
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        while self._num_nodes() < num_nodes:
            if time.monotonic() > deadline_s or self._nodes[-1].poll() is not None:
                log = (self._directory / f"node-{len(self._nodes) - 1}.txt").read_text(errors="replace")
                raise RuntimeError(f"The Ray node did not start within {_START_TIMEOUT_S:g} s:\n{log}")
            time.sleep(0.1)

    def _num_nodes(self) -> int:
        """How many live nodes the job server knows of; 0 while it does not answer yet."""
        request = urllib.request.Request(  # noqa: S310 - http, and our own
            f"{self.http_address}/nodes?view=summary", headers=self._headers()
        )
        try:
            with urllib.request.urlopen(request, timeout=5) as response:  # noqa: S310
                summary = json.load(response)["data"]["summary"]
        except (OSError, urllib.error.URLError, KeyError, ValueError):
            return 0
        return sum(node.get("raylet", {}).get("state") == "ALIVE" for node in summary)

    def _headers(self) -> dict[str, str]:
        token = find_token(self._environment)
        return {"Authorization": f"Bearer {token}"} if token else {}


@contextlib.contextmanager
def ray_cluster(
    *, num_cpus: int = 2, environment: Mapping[str, str] | None = None, num_nodes: int = 1
) -> Iterator[RayCluster]:
    """A running cluster of `num_nodes` local nodes with `num_cpus` logical CPUs each, stopped at the end."""
    cluster = RayCluster(num_cpus=num_cpus, environment=environment)
    try:
        for _ in range(num_nodes - 1):
            cluster.add_node(num_cpus=num_cpus)
        yield cluster
    finally:
        cluster.stop()


def find_token(environment: Mapping[str, str]) -> str | None:
    """The authentication token Ray would find in this environment, if any."""
    if environment.get("RAY_AUTH_TOKEN"):
        return environment["RAY_AUTH_TOKEN"]
    home = environment.get("HOME", "")
    path = Path(environment.get("RAY_AUTH_TOKEN_PATH") or Path(home) / ".ray" / "auth_token")
    return path.read_text(encoding="utf-8").strip() if path.is_file() else None


def _node_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment without what would lead to other clusters, and with its authentication spelled out.

    A head node turns token authentication on by itself where it finds a token; a node that joins does not.
    """
    chosen = {
        name: value for name, value in environment.items() if name not in {"RAY_ADDRESS", "RAY_API_SERVER_ADDRESS"}
    }
    chosen.setdefault("RAY_AUTH_MODE", "token" if find_token(environment) else "disabled")
    chosen.setdefault("RAY_worker_niceness", "0")  # Ray's own is 15: beside other tests its workers would hardly run
    return {**_PATIENCE, **chosen}


def _end_with_parent() -> None:
    """Ask the kernel to end this process with the one that started it, even after SIGKILL (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
