"""The Ray cluster that a run works on: a new one started quietly by this process, or an existing one."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import socket
import threading
import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from orchestray.platform.cluster import head as heads
from orchestray.platform.errors import ClusterError
from orchestray.platform.jobs.address import ask, use_token
from orchestray.platform.process.stopping import held_interrupts, kept_termination

if TYPE_CHECKING:
    from orchestray.platform.actors.gang import Gang
    from orchestray.platform.cluster.head import Head

_ANSWER_TIMEOUT_S = 5.0
_ASK_TIMEOUT_S = 1.0


@dataclass
class Cluster:
    """A connection to Ray.

    `owned` is True if this process started the cluster. Then logical CPUs may be over-subscribed, finished gangs stay
    warm for the next run of this process, and `close` ends every process of the cluster.
    """

    owned: bool
    address: str
    head: Head | None = None
    parked: list[Gang] = field(default_factory=list)
    room: Any = None
    """Placement group made by others, in which all gangs are placed and stay warm; None: each gang makes its own."""

    def resources(self) -> dict[str, float]:
        """Return the total resources of all nodes, for example {"CPU": 8.0, "GPU": 1.0}."""
        import ray

        resources: dict[str, float] = ray.cluster_resources()
        return resources

    def nodes(self) -> list[dict[str, Any]]:
        """Return the live nodes as Ray describes them."""
        import ray

        return [node for node in ray.nodes() if node["Alive"]]

    def describe(self) -> str:
        """Return one line on the cluster's resources, for error messages."""
        resources = self.resources()
        shown = ", ".join(f"{resources.get(name, 0):g} {name}" for name in ("CPU", "GPU"))
        return f"{len(self.nodes())} node(s) with {shown} in all"

    def alive(self) -> bool:
        import ray

        if not ray.is_initialized():
            return False
        try:
            return bool(self.nodes())
        except Exception:  # noqa: BLE001 - any failure to ask means that the cluster is gone
            return False

    def close(self) -> None:
        """Disconnect, and end the cluster if this process started it."""
        import ray

        for gang in self.parked:
            gang.close()
        self.parked.clear()
        with contextlib.suppress(Exception):
            if self.owned:
                ray.shutdown()
        if self.head is not None:
            self.head.kill()
            self.head = None
        if self in _connected:
            _connected.remove(self)


_lock = threading.Lock()
_connected: list[Cluster] = []
"""The cluster of this process, if any: Ray allows one connection per process."""


def connect(address: str | None = None) -> Cluster:
    """Return the cluster to work on, connecting or starting one as needed.

    An already connected driver is used as it is. Otherwise `address` (or the environment variable RAY_ADDRESS) names a
    cluster to connect to. Without either, a local one is started quietly, with token authentication.

    Raises:
        ClusterError: the address does not answer, or Ray does not start.
    """
    with _lock:
        for cluster in _connected:
            if cluster.alive():
                if address and address not in {"auto", "local", cluster.address}:
                    raise ClusterError(
                        f"This process is connected to the Ray cluster at {cluster.address} and cannot join "
                        f"{address} as well. Leave the address out, or use another process."
                    )
                return cluster
        # Ray's next `init` aborts the process if Ctrl-C has left one half-way.
        with kept_termination(), held_interrupts():
            _connected[:] = [_connect(address or os.environ.get("RAY_ADDRESS"))]
            atexit.register(_connected[0].close)
        return _connected[0]


def prepare(address: str | None = None) -> None:
    """Set the environment variables that Ray reads at import; call this first if you import Ray before `connect`.

    Args:
        address: same as in `connect`.
    """
    # Ray's notices on CPU over-subscription and accelerators are not meant for our users.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    address = address or os.environ.get("RAY_ADDRESS")
    if address and address != "local":
        use_token()


def current() -> Cluster | None:
    """Return the cluster that this process is connected to, or None."""
    return _connected[0] if _connected else None


def _connect(address: str | None) -> Cluster:
    prepare(address)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import ray
    if ray.is_initialized():
        return Cluster(owned=False, address=ray.get_runtime_context().gcs_address)
    heads.read_environment()
    if address == "local":
        address = None
    if address:
        return _join(address)
    return _start()


def _join(address: str) -> Cluster:
    import ray

    _check_answers(address)
    logging.getLogger("ray").setLevel(logging.ERROR)
    try:
        joined = ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, configure_logging=False)
    except Exception as error:
        raise ClusterError(
            f"The Ray cluster at {address} could not be joined: {_first_line(error)} "
            "Give the address `ray start --head` printed, as host:port, or leave --address out to start a cluster here."
        ) from error
    heads.silence()
    _check_token(address, getattr(joined, "dashboard_url", None))
    return Cluster(owned=False, address=ray.get_runtime_context().gcs_address)


def _check_token(address: str, dashboard: str | None) -> None:
    """Refuse a cluster that has no token if this process has one: it would admit no answer of the cluster's workers."""
    if not dashboard or os.environ.get("RAY_AUTH_MODE") != "token":
        return
    mode = None
    with contextlib.suppress(OSError, ValueError, LookupError):  # the dashboard need not be reachable from here
        mode = ask(f"http://{dashboard}", "authentication_mode", timeout_s=_ASK_TIMEOUT_S)["authentication_mode"]
    if mode == "disabled":
        import ray

        ray.shutdown()
        raise ClusterError(
            f"The Ray cluster at {address} was started without a token, and this machine has one (as in "
            "~/.ray/auth_token): set RAY_AUTH_MODE=disabled here, or start the cluster again, which then uses it."
        )


def _check_answers(address: str) -> None:
    """Raise an error at once if nothing listens at the address; Ray would need a minute to find out."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if address == "auto" or not port.isdigit():
        if address != "auto":
            raise ClusterError(f"The Ray address {address!r} is not of the form host:port, auto or ray://host:port.")
        return
    try:
        socket.create_connection((host.strip("[]") or "127.0.0.1", int(port)), timeout=_ANSWER_TIMEOUT_S).close()
    except (OSError, OverflowError) as error:
        raise ClusterError(
            f"No Ray cluster answers at {address} ({error}). Start one with `ray start --head`, "
            "correct --address (or RAY_ADDRESS), or leave it out to start a cluster here."
        ) from error


def _start() -> Cluster:
    num_cpus = available_cpus()
    import ray

    heads.silence()
    try:
        head = heads.start(num_cpus)
        if head is not None:
            ray.init(address=head.address, log_to_driver=False, logging_level=logging.ERROR, configure_logging=False)
            return Cluster(owned=True, address=head.address, head=head)
        ray.init(num_cpus=num_cpus, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:
        raise ClusterError(
            f"Ray could not be started on this machine: {_first_line(error)} "
            "Its logs are in session_latest/logs of Ray's temporary directory."
        ) from error
    return Cluster(owned=True, address=ray.get_runtime_context().gcs_address)


def available_cpus() -> int:
    """Return the number of cores this process may use (its affinity mask, which containers and taskset set)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    line = text.splitlines()[0].strip()
    return line if line.endswith((".", "!", "?")) else line + "."
