"""An endpoint as an application of Ray Serve, from the point of view of the command that runs it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
import urllib.request
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from orchestray.platform.errors import ClusterError, OrchestrayError
from orchestray.platform.process.sockets import url_of
from orchestray.serving.application import serve_apps
from orchestray.serving.config.load import load_serve_config
from orchestray.serving.config.schema import ServeConfig
from orchestray.serving.runtime.work_thread import WorkThread

Found = TypeVar("Found")
_log = logging.getLogger("orchestray.serving")

_ANSWER_S = 1.0
_LOOK_EVERY_S = 5.0


class OnRay:
    """An endpoint whose ingress and replicas run under Ray Serve, on the node of this process and others.

    Args:
        config: config of the endpoint.
        listening: socket that holds the port until the ingress takes it.
        address: address of the Ray cluster; None: a local one.
    """

    def __init__(self, config: ServeConfig, listening: socket.socket, address: str | None) -> None:
        self._config = config
        self._listening = listening
        self._address = address
        self._is_owned = False
        self._is_running = False
        self._handle: Any = None
        self._look: asyncio.Task[None] | None = None

    async def start(self) -> str:
        """Start the application; return the URL when all its models are loaded and warm.

        Raises:
            ClusterError: the cluster does not answer, lacks the resources, or has an application of that name.
            OrchestrayError: a model cannot be served.
        """
        url = await _apart(self._start)
        self._look = asyncio.create_task(self._look_for_failures())
        return url

    def _start(self) -> str:
        cluster = serve_apps.join(self._address)
        self._is_owned = cluster.owned
        starting = serve_apps.start_serve(cluster)
        from ray import serve

        from orchestray.serving.application.build import application  # slow to load: Serve's controller starts beside

        made = application(self._config, reserves_cpus=not cluster.owned, composed=False, here=True)
        serve_apps.wait_for_controller(starting)
        name = self._config.name
        if name in serve_apps.status().applications:
            raise ClusterError(
                f"Ray Serve has an application {name} on this cluster already: give this endpoint another --name, or "
                f"end that one with `serve shutdown`"
            )
        serve_apps.check_room(self._config, cluster)
        self._is_running = True
        tls = self._config.http.tls.certificate is not None
        url = url_of(self._listening, self._config.http.host, scheme="https" if tls else "http")
        self._listening.close()
        serve_apps.run_application(made, name, route=f"/{name}", is_ready=partial(_is_ready, url))
        self._handle = serve.get_app_handle(name)
        return url

    async def warnings(self) -> list[str]:
        """Return clauses about its config for its owner."""
        return list((await self._handle.state.remote())["warnings"])

    async def apply(self, data: dict[str, Any]) -> str:
        """Take over a changed config, as plain data; return the changes in a sentence.

        Raises:
            OrchestrayError: it cannot be served; nothing has changed.
        """
        from orchestray.serving.application.build import wanted_of
        from orchestray.serving.application.endpoint import settings_of

        config = load_serve_config({**data, "name": self._config.name})
        wanted = wanted_of(config, settings_of(config), {}, reserves_cpus=not self._is_owned)
        return _changed(await self._handle.change.remote(wanted))

    async def replace(self, replica: str) -> str:
        """Have another replica take the place of one; return the change in a sentence.

        Raises:
            OrchestrayError: there is none of that name.
        """
        return _changed(await self._handle.replace.remote(replica))

    async def _look_for_failures(self) -> None:
        """Log why a replica that is to take the place of another does not start, once for each reason."""
        told: dict[str, str] = {}
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            with contextlib.suppress(Exception):  # the cluster's head, or Serve's controller, is being restarted
                found = await _apart(partial(serve_apps.failing, self._config.name))
                for deployment, reason in found.items():
                    if told.get(deployment) != reason:
                        _log.warning("A replica of %s does not start, and is tried again: %s", deployment, reason)
                told = found

    async def end(self) -> None:
        """Answer requests that wait or run, and end the application."""
        if self._look is not None:
            self._look.cancel()
        if self._is_running:
            await _apart(partial(serve_apps.leave, self._config.name))

    def end_at_once(self) -> None:
        """End without waiting: a cluster of this process ends with it, and on another Serve goes on to end it."""
        if self._is_running and not self._is_owned:
            serve_apps.leave_at_once(self._config.name)


def _changed(answer: dict[str, Any]) -> str:
    """Return the change of an ingress's answer, or raise its problem."""
    if "problem" in answer:
        error = OrchestrayError(answer["problem"])
        error.exit_status = answer["exit_status"]
        raise error
    return str(answer["changed"])


def _is_ready(url: str) -> bool:
    """Return True if an endpoint answers with all its models."""
    trusting = ssl.create_default_context()
    trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE  # nothing is sent, and it is this machine
    try:
        urllib.request.urlopen(f"{url}/v2/health/ready", timeout=_ANSWER_S, context=trusting).close()  # noqa: S310
    except OSError:  # a status other than 200 is one, too
        return False
    return True


async def _apart(call: Callable[[], Found]) -> Found:
    """Return the result of a call on a thread of its own, which does not keep the process from ending."""
    return await asyncio.get_running_loop().run_in_executor(WorkThread("serve"), call)
