"""Versions whose replicas are Ray Serve deployments: this process has the queue, from which they pull whole batches."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Mapping
from typing import Any

from orchestray.platform.cluster import ray_internals
from orchestray.platform.cluster.cluster import Cluster, connect
from orchestray.platform.errors import ClusterError, OrchestrayError
from orchestray.serving.config.schema import ModelSection, Scaling, ServeConfig
from orchestray.serving.replicas.autoscaler import ScalingPolicy, report_load
from orchestray.serving.replicas.batchers import ListenerOf, load_arguments, make_batcher
from orchestray.serving.replicas.directory import Directory
from orchestray.serving.replicas.pool import ReplicaPool
from orchestray.serving.replicas.ray_replica import ReplicaSettings, ServedReplica
from orchestray.serving.replicas.replica import FrontAddress
from orchestray.serving.replicas.scaling import IDLE_BEFORE_ZERO_S
from orchestray.serving.routing.endpoint import ModelVersion

_PREFIX = "orchestray-"
_CLIENT = "ray.serve.context:_get_global_client"
_HEALTH_PERIOD_S = 1.0
_IDLE_BEFORE_ZERO_S = IDLE_BEFORE_ZERO_S
_DOWN_AFTER_S = 10.0
"""Seconds for which there must be too many replicas before Serve's control loop removes any."""
_REPORT_WITHIN_S = 30.0
"""Seconds within which a running replica must report: longer than it tries to reach the listening process."""
_POLL_S = 0.2


class ApplicationEndedError(OrchestrayError):
    """The error that an application of Ray Serve was ended while it started."""


class RayReplicas:
    """A starter of versions as Ray Serve applications, one per version; the first joins or starts the cluster.

    Args:
        listener_of: returns the listener of a version's batches.
        address: address of the cluster; None: a local one.
        directory: directory of an endpoint with several fronts; None: this process is the only front.
        serve_options: arguments of `serve.start`.
    """

    def __init__(
        self,
        listener_of: ListenerOf,
        address: str | None,
        *,
        directory: Directory | None = None,
        serve_options: Mapping[str, Any] | None = None,
    ) -> None:
        self._listener_of = listener_of
        self._address = address
        self._is_shared = directory is not None
        self._serve_options = serve_options or {"proxy_location": "Disabled"}
        self._joining: asyncio.Task[None] | None = None
        self._cluster: Cluster | None = None
        self._pool: ReplicaPool | Directory = ReplicaPool() if directory is None else directory
        self._host, self._port = "127.0.0.1", 0
        self._applications: set[str] = set()

    async def start(self, model: ModelSection, config: ServeConfig) -> ModelVersion:
        """Start a version, and return it when all its replicas are warm.

        Raises:
            ClusterError: the cluster does not answer, or lacks the resources.
            OrchestrayError: the model cannot be served.
        """
        await self.join()
        group = self.application_name(f"{config.name}-{model.name}-{model.version}")
        listener = self._listener_of(model.name, str(model.version))
        batcher = make_batcher(config.batching, listener)
        reporting: list[asyncio.Task[None]] = []

        async def end() -> None:
            for task in reporting:
                task.cancel()
            await asyncio.to_thread(delete_application, group)

        content = await asyncio.to_thread(self.content, model)
        application = self._application(model, config, group, content)
        running = asyncio.create_task(asyncio.to_thread(run_application, application, group))
        reported = asyncio.create_task(self._pool.version(group, batcher, end, listener))
        try:
            version = await first_report(running, reported, f"{self._host}:{self._port}")
        except BaseException:
            reported.cancel()
            running.add_done_callback(_take_error)  # the failure to start is reported already
            await asyncio.to_thread(delete_application, group)
            raise
        if isinstance(config.replicas, Scaling):
            reporting.append(asyncio.create_task(report_load(batcher, group)))
        return version

    def application_name(self, of: str) -> str:
        """Return a new name that is unique on the cluster, where other endpoints may have the same name."""
        name = f"{_PREFIX}{of}-{secrets.token_hex(4)}"
        self._applications.add(name)
        return name

    def content(self, model: ModelSection) -> str:
        from orchestray.serving.models.load import content_of  # torch: late

        return content_of(model.run)

    @property
    def address(self) -> str | None:
        return self._address

    def move(self, address: str | None) -> bool:
        if self._joining is None:
            self._address = address
        return address == self._address

    async def join(self) -> FrontAddress:
        """Join the cluster if not done yet; return the address to which replicas report."""
        if self._joining is None:
            self._joining = asyncio.create_task(self._join())
        try:
            await asyncio.shield(self._joining)
        except OrchestrayError:
            self._joining = None  # the next change may name another one
            raise
        return FrontAddress(self._host, self._port, self._pool.secret, "")

    async def close(self) -> None:
        """Disconnect the replicas, and shut down Ray Serve unless others use it."""
        await self._pool.close()
        if self._cluster is not None:
            await asyncio.to_thread(_leave_serve, self._applications)

    async def _join(self) -> None:
        self._cluster = await asyncio.to_thread(_join, self._address, self._serve_options)
        if not self._cluster.owned:
            import ray

            self._host = ray.util.get_node_ip_address()
        self._port = await self._pool.listen(self._host)

    def _application(self, model: ModelSection, config: ServeConfig, group: str, content: str) -> Any:
        """Return the application, whose replicas all load the same model: later ones refuse any other."""
        from ray import serve

        assert self._cluster is not None
        front = FrontAddress(self._host, self._port, self._pool.secret, group)
        load = {**load_arguments(model, config), "content": content}
        settings = ReplicaSettings(front, load, config.batching.run_timeout_s, shared=self._is_shared)
        deployment: Any = serve.deployment(ServedReplica)
        return deployment.options(
            name="replica",
            ray_actor_options=_resources(config, self._cluster),
            health_check_period_s=_HEALTH_PERIOD_S,
            graceful_shutdown_wait_loop_s=0.1,
            **_number(config, group),
        ).bind(settings)


async def first_report(running: asyncio.Task[None], reported: asyncio.Task[ModelVersion], address: str) -> ModelVersion:
    """Return the version of started replicas when all of them run and the first has reported.

    Args:
        running: ends when all replicas run.
        reported: ends when a replica has reported.
        address: address to which they report.

    Raises:
        OrchestrayError: they did not start, or run and cannot report.
    """
    await asyncio.wait({running, reported}, return_when=asyncio.FIRST_COMPLETED)
    if not reported.done() and running.exception() is None:
        await asyncio.wait({reported}, timeout=_REPORT_WITHIN_S)
    with contextlib.suppress(ApplicationEndedError):  # by a replica: one that cannot report ends its application
        if reported.done():
            version = reported.result()  # the replica's own error first
            await running
            return version
        running.result()
    raise OrchestrayError(
        f"the replicas started, and could not report to this process at {address}: the machines of the cluster have to "
        "reach it there, whatever its port (is a firewall between?); or start the endpoint on one of them"
    )


def _take_error(task: asyncio.Task[None]) -> None:
    """Retrieve the error of a task that is not awaited, so that asyncio does not report it."""
    if not task.cancelled():
        task.exception()


def _number(config: ServeConfig, group: str) -> dict[str, Any]:
    """Return the number of replicas, or the scaling, as options of a Serve deployment."""
    replicas = config.replicas
    if not isinstance(replicas, Scaling):
        return {"num_replicas": replicas}
    policy = {
        "key": group,
        "least": replicas.min,
        "most": replicas.max,
        "target_latency_s": replicas.target_latency_ms / 1e3,
        "idle_before_zero_s": _IDLE_BEFORE_ZERO_S,
    }
    return {
        "autoscaling_config": {
            "min_replicas": replicas.min,
            "max_replicas": replicas.max,
            "initial_replicas": max(1, replicas.min),  # at least one: it reports the model's signature
            "upscale_delay_s": 0.0,
            "downscale_delay_s": _DOWN_AFTER_S,
            "downscale_to_zero_delay_s": 0.0,  # the policy has waited
            "policy": {
                "policy_function": f"{ScalingPolicy.__module__}:{ScalingPolicy.__name__}",
                "policy_kwargs": policy,
            },
        }
    }


def _resources(config: ServeConfig, cluster: Cluster) -> dict[str, float]:
    """Return the resources that Ray reserves for a replica.

    On our own cluster these are GPUs only, since its CPUs may be over-subscribed.

    Raises:
        ClusterError: fewer resources are free.
    """
    wanted = config.resources
    replicas = config.replicas.max if isinstance(config.replicas, Scaling) else config.replicas
    num_cpus = 0.0 if cluster.owned else wanted.cpus_per_worker
    free = _free()
    if num_cpus * replicas > free.get("CPU", 0.0) or wanted.gpus_per_worker * replicas > free.get("GPU", 0.0):
        raise ClusterError(
            f"{replicas} replicas of {num_cpus:g} CPUs and {wanted.gpus_per_worker:g} GPUs each find no room in "
            f"{cluster.describe()}, of which {free.get('CPU', 0.0):g} CPU, {free.get('GPU', 0.0):g} GPU are free: "
            "lower replicas or resources (what replaces other replicas needs room beside them)"
        )
    return {"num_cpus": num_cpus, "num_gpus": wanted.gpus_per_worker}


def _free() -> dict[str, float]:
    import ray

    free: dict[str, float] = ray.available_resources()
    return free


def _join(address: str | None, serve_options: Mapping[str, Any]) -> Cluster:
    cluster = connect(address)
    from ray import serve

    from orchestray.platform.actors.pool import make_room

    make_room(cluster)
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    if (
        "http_options" in serve_options
        and ray_internals.find(_CLIENT)(raise_if_no_controller_running=False) is not None
    ):
        raise ClusterError(
            "Ray Serve runs on this cluster already, and has one address for all: use http.fronts: 1, another cluster, "
            "or end it with `serve shutdown`"
        )
    try:
        serve.start(**serve_options)
    except Exception as error:
        raise ClusterError(f"Ray Serve did not start; is one of its ports taken? {error}") from error
    return cluster


def _leave_serve(own: set[str]) -> None:
    """Shut down Ray Serve, unless it has applications of others, whose replicas nothing would replace."""
    from ray import serve

    with contextlib.suppress(Exception):  # the cluster may be gone already
        if own.issuperset(serve.status().applications):
            serve.shutdown()


def run_application(application: Any, name: str, route: str | None = None) -> None:
    """Have Ray Serve run an application; return when all its replicas run.

    Args:
        application: a bound deployment.
        name: name of the application.
        route: prefix of its HTTP route; None: none.

    Raises:
        ApplicationEndedError: it was ended meanwhile.
        ClusterError: another application has the route.
        OrchestrayError: the replicas did not start.
    """
    from ray import serve

    target = serve.RunTarget(application, name, route)
    try:
        # Serve itself would wait for ever for an application that was ended before all of it ran.
        serve.run_many([target], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)
        _until_running(name)
        client: Any = ray_internals.find(_CLIENT)()
        client.wait_for_proxies_serving()
    except OrchestrayError:
        raise
    except Exception as error:
        if (holder := _holder(route)) not in (None, name):
            raise ClusterError(
                f"on this cluster the application {holder} of Ray Serve answers at {route} already, and only one can: "
                "end it, or use http.fronts: 1 or another cluster"
            ) from error
        raise OrchestrayError(f"the replicas of {name} did not start: {error}") from error


def _until_running(name: str) -> None:
    from ray import serve

    while True:
        application = serve.status().applications.get(name)
        if application is None or application.status == "DELETING":
            raise ApplicationEndedError(f"the replicas of {name} were ended while they started")
        if application.status == "DEPLOY_FAILED":
            raise OrchestrayError(f"the replicas of {name} did not start: {application.message}")
        if application.status == "RUNNING":
            return
        time.sleep(_POLL_S)


def _holder(route: str | None) -> str | None:
    """Return the application of Ray Serve that answers at a route, or None."""
    with contextlib.suppress(Exception):  # the cluster may be gone already
        client: Any = ray_internals.find(_CLIENT)()
        for name, details in client.get_serve_details()["applications"].items():
            if route is not None and details["route_prefix"] == route and details["status"] != "DELETING":
                return str(name)
    return None


def delete_application(name: str, *, wait: bool = False) -> None:
    """Have Ray Serve end an application; with `wait` return when it has ended."""
    from ray import serve

    with contextlib.suppress(Exception):  # the cluster may be gone already
        serve.delete(name, _blocking=wait)
