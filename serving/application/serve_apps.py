"""Applications of Ray Serve on a cluster: Serve is started, they are run and ended, and Serve is left."""

from __future__ import annotations

import contextlib
import logging
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from orchestray.platform import errors
from orchestray.platform.cluster import ray_internals
from orchestray.platform.cluster.cluster import Cluster, connect
from orchestray.platform.errors import ClusterError, OrchestrayError
from orchestray.serving.application.starting import gpus_of_listener
from orchestray.serving.config.schema import Scaling, ServeConfig
from orchestray.serving.runtime.work_thread import WorkThread

if TYPE_CHECKING:
    from ray.serve.schema import ServeStatus

_log = logging.getLogger("orchestray.serving")

_CLIENT = "ray.serve.context:_get_global_client"
BUILDING = threading.Lock()
"""Lock to hold while Ray Serve makes deployments, or the configs of those it tells of: each enters its router into a
table of the process and takes it out again, and two that do so at once fail."""
_POLL_S = 0.1
_ASK_S = 5.0
"""Seconds that Serve has to take on the end of applications."""
_OWN_ERROR = re.compile(r"^orchestray\.platform\.errors\.(?P<kind>\w+): ", re.MULTILINE)
"""The begin of the last part of a traceback; errors that were its cause come before."""

_DOES_NOT_START = "failed to start"
"""Part of what Serve says of a deployment whose replicas raise as they start."""


class ApplicationEndedError(OrchestrayError):
    """The error that an application of Ray Serve was ended while it started."""


def join(address: str | None) -> Cluster:
    """Connect to the cluster, or start one.

    Args:
        address: address of the cluster; None: a local one.

    Raises:
        ClusterError: it does not answer.
    """
    cluster = connect(address)
    from orchestray.platform.actors.pool import make_room

    make_room(cluster)
    return cluster


def start_serve(cluster: Cluster) -> Future[None]:
    """Start Ray Serve on a cluster, unless it runs; the future is done when its proxies answer too.

    Where Serve runs already it stays as it is. Its proxy is for those who ask it; an ingress has a port itself.
    """
    from ray import serve

    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    location = "Disabled" if cluster.owned else "EveryNode"
    return WorkThread("serve proxies").submit(serve.start, location)


def status() -> ServeStatus:
    """Return what Ray Serve says of its applications and proxies."""
    from ray import serve

    with BUILDING:
        return serve.status()


def wait_for_controller(starting: Future[None]) -> None:
    """Return when Ray Serve's controller answers: its proxies start beside applications.

    Args:
        starting: result of `start_serve`.

    Raises:
        ClusterError: Serve did not start.
    """
    try:
        while not starting.done() and not status().proxies:
            time.sleep(_POLL_S)
        if starting.done():
            starting.result()
    except Exception as error:
        raise ClusterError(f"Ray Serve did not start; is one of its ports taken? {error}") from error
    starting.add_done_callback(_warn_of_proxy)


def _warn_of_proxy(starting: Future[None]) -> None:
    if (error := starting.exception()) is not None:
        reason = (str(error).strip() or repr(error)).splitlines()[-1]  # behind the traceback of its process
        _log.warning("Ray Serve's own proxy did not start, and only the endpoint's port answers: %s", reason)


def leave(name: str) -> None:
    """End an application and those of its versions, and Ray Serve unless it has others: nothing would replace those."""
    from ray import serve

    delete(name)  # first, as it answers what waits by the others
    with contextlib.suppress(Exception):  # the cluster may be gone already
        found = set(status().applications)
        left = {other for other in found if other.startswith(version_prefix(name))}
        for other in left:
            delete(other)
        if found == left:
            serve.shutdown()


def leave_at_once(name: str) -> None:
    """Have Ray Serve end an application and those of its versions; return when it is about to."""
    asked: set[str] = set()
    until_s = time.monotonic() + _ASK_S
    with contextlib.suppress(Exception):  # the cluster may be gone already
        while time.monotonic() < until_s:
            applications = status().applications
            own = {other for other in applications if other == name or other.startswith(version_prefix(name))}
            left = {other for other in own if applications[other].status != "DELETING"}
            if not left:
                return
            for other in left - asked:
                threading.Thread(target=delete, args=(other,), daemon=True).start()  # it waits for the end
            asked |= left
            time.sleep(_POLL_S)


def version_prefix(name: str) -> str:
    """Return the begin of the names of the applications of an endpoint's versions."""
    return f"{name}+"  # which no endpoint has in its name


def of_versions(name: str) -> set[str]:
    """Return the names of the applications of an endpoint's versions."""
    return {other for other in status().applications if other.startswith(version_prefix(name))}


def check_room(config: ServeConfig, cluster: Cluster) -> None:
    """Refuse replicas for which too few resources are free: Serve would wait for them for ever.

    On our own cluster only GPUs count, since its CPUs may be over-subscribed.

    Raises:
        ClusterError: fewer resources are free.
    """
    import ray

    wanted = config.resources
    replicas = config.replicas.max if isinstance(config.replicas, Scaling) else config.replicas
    num_cpus = 0.0 if cluster.owned else wanted.cpus_per_worker
    beside = 0.0 if config.in_process else gpus_of_listener(config)
    free = ray.available_resources()
    if num_cpus * replicas > free.get("CPU", 0.0) or wanted.gpus_per_worker * replicas + beside > free.get("GPU", 0.0):
        raise ClusterError(
            f"{replicas} replicas of {num_cpus:g} CPUs and {wanted.gpus_per_worker:g} GPUs each"
            f"{f', and {beside:g} GPUs to generate text,' * (beside > 0)} find no room in "
            f"{cluster.describe()}, of which {free.get('CPU', 0.0):g} CPU, {free.get('GPU', 0.0):g} GPU are free: "
            "lower replicas or resources (what replaces other replicas needs room beside them)"
        )


def run_application(
    application: Any, name: str, route: str | None = None, *, is_ready: Callable[[], bool] = lambda: False
) -> None:
    """Have Ray Serve run an application; return when all its replicas run.

    Args:
        application: a bound deployment.
        name: name of the application.
        route: prefix of its HTTP route; None: none.
        is_ready: returns True if it answers already: Serve says so later.

    Raises:
        ApplicationEndedError: it was ended meanwhile.
        ClusterError: another application has the route.
        OrchestrayError: a replica did not start: the error that it raised, if it is one of ours.
    """
    from ray import serve

    target = serve.RunTarget(application, name, route)
    try:
        # Serve itself would wait for ever for an application that was ended before all of it ran.
        with BUILDING:
            serve.run_many([target], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)
        _until_running(name, is_ready)
    except OrchestrayError:
        raise
    except Exception as error:
        if (holder := _holder(route)) not in (None, name):
            raise ClusterError(
                f"on this cluster the application {holder} of Ray Serve answers at {route} already, and only one can: "
                "end it, or use another cluster"
            ) from error
        raise OrchestrayError(f"the application {name} did not start: {error}") from error


def is_running(name: str) -> bool:
    """Return True if an application of that name runs."""
    application = status().applications.get(name)
    return application is not None and application.status == "RUNNING"


def is_ending(name: str) -> bool:
    """Return True if an application has ended or is about to."""
    application = status().applications.get(name)
    return application is None or application.status == "DELETING"


def _until_running(name: str, is_ready: Callable[[], bool]) -> None:
    while not is_ready():
        application = status().applications.get(name)
        if application is None or application.status == "DELETING":
            raise ApplicationEndedError(f"the application {name} was ended while it started")
        messages = [deployment.message for deployment in application.deployments.values()]
        if (error := next(filter(None, map(own_error, messages)), None)) is not None:
            raise error  # Serve would try twice more
        if application.status == "DEPLOY_FAILED":
            reason = next(filter(None, messages), application.message)
            raise OrchestrayError(f"the application {name} did not start: {reason}")
        if application.status == "RUNNING":
            return
        time.sleep(_POLL_S)


def own_error(message: str) -> OrchestrayError | None:
    """Return the error of ours with which a replica did not start, from Serve's message; None if it has none."""
    found = list(_OWN_ERROR.finditer(message))[-1:]
    if not found:
        return None
    error = OrchestrayError(message[found[0].end() :].strip())
    error.exit_status = getattr(errors, found[0]["kind"], OrchestrayError).exit_status
    return error


def failing(name: str) -> dict[str, str]:
    """Return why replicas of an endpoint do not start, by deployment; Serve tries again."""
    return {
        deployment: str(own_error(state.message) or state.message.strip().splitlines()[-1])
        for other, application in status().applications.items()
        if other == name or other.startswith(version_prefix(name))
        for deployment, state in application.deployments.items()
        if state.status == "UNHEALTHY" and _DOES_NOT_START in state.message
    }


def _holder(route: str | None) -> str | None:
    """Return the application of Ray Serve that answers at a route, or None."""
    with contextlib.suppress(Exception):  # the cluster may be gone already
        client: Any = ray_internals.find(_CLIENT)()
        for name, details in client.get_serve_details()["applications"].items():
            if route is not None and details["route_prefix"] == route and details["status"] != "DELETING":
                return str(name)
    return None


def delete(name: str) -> None:
    """Have Ray Serve end an application; return when it has ended."""
    from ray import serve

    with contextlib.suppress(Exception):  # the cluster may be gone already
        serve.delete(name)
