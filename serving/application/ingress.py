"""The ingress of an endpoint's application: its HTTP server, the queues of its models, and its handle's methods.

Its last change is kept by the cluster: an ingress that dies is replaced by one that knows it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
from typing import TYPE_CHECKING, Any, TypeAlias

from orchestray.platform.cluster import key_values
from orchestray.platform.errors import OrchestrayError
from orchestray.platform.process.sockets import listen
from orchestray.serving.application.deployed import ApplicationStarters
from orchestray.serving.application.endpoint import DRAIN_S, LiveEndpoint
from orchestray.serving.application.loop_thread import LoopThread
from orchestray.serving.application.serve_metrics import ServeMetrics, counted_by_serve
from orchestray.serving.application.served import Served
from orchestray.serving.config.schema import ServeConfig
from orchestray.serving.http.settings import JSON
from orchestray.serving.replicas.batchers import ListenerOf

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle
    from starlette.types import ASGIApp, Receive, Scope, Send

Wanted: TypeAlias = dict[str, Any]
"""`config`, `settings`, `deployments` and `reserves_cpus` of an endpoint, as `application` makes them: JSON values."""


class ChangeMemory:
    """The change that an endpoint has made since it was deployed, in the cluster's key-value store.

    Args:
        deployed: the `user_config` that the endpoint was deployed with: one that is deployed again forgets the change.
    """

    def __init__(self, deployed: Wanted) -> None:
        from ray import serve

        self._deployed = deployed
        self._digest = hashlib.sha256(json.dumps(deployed, sort_keys=True).encode()).hexdigest()
        self._key = f"orchestray-change-{serve.get_replica_context().app_name}"

    def latest(self) -> Wanted:
        """Return the config of the last change; without one, that of the deployment."""
        kept = key_values.get(self._key) or {}
        changed: Wanted = kept["wanted"] if kept.get("since") == self._digest else self._deployed
        return changed

    def write(self, wanted: Wanted) -> None:
        """Keep a change."""
        key_values.put(self._key, {"since": self._digest, "wanted": wanted})


_log = logging.getLogger("orchestray.serving")


class Ingress:
    """The deployment that takes an application's requests.

    It answers at `http.host:http.port` of its node by a server of its own, behind Serve's proxy by the same routes, and
    by its handle. All three share the queue of each model version.
    """

    async def __init__(self, *_models: DeploymentHandle[Any]) -> None:  # type: ignore[misc]
        """Start a thread for the endpoint; `_models` only make Serve deploy them."""
        self._thread = LoopThread("endpoint")
        self._started: _Endpoint | None = None
        self._memory: ChangeMemory
        self._wanted: list[Wanted] = []
        """The last change, after the one before it."""
        self._turn = asyncio.Lock()

    async def reconfigure(self, wanted: Wanted) -> None:
        """Take over a config; Serve calls this at the start, and after a change of the application's `user_config`.

        At the start a later config of `change` comes first: an ingress that takes the place of one that died goes on
        as that did. Later on a config that cannot be served leaves the endpoint as it is.

        Args:
            wanted: `user_config` of the deployment.

        Raises:
            OrchestrayError: the first config cannot be served.
        """
        if self._started is None:
            self._memory = ChangeMemory(wanted)
            self._wanted = [self._memory.latest()]
            self._started = await self._thread.call(_Endpoint.start(self._wanted[-1]))
            here = asyncio.get_running_loop()

            async def remember() -> None:
                asyncio.run_coroutine_threadsafe(self._remember_rollback(), here)

            self._started.served.live.on_rollback = remember
            return
        async with self._turn:
            if wanted["deployments"] != self._wanted[-1]["deployments"] and wanted["config"].get("update"):
                _log.warning("no version is watched: Ray Serve has ended the replicas that a rollback would need")
                wanted = {**wanted, "config": {**wanted["config"], "update": {}}}
            if (problem := (await self._take_over(wanted)).get("problem")) is None:
                self._memory = ChangeMemory(wanted)
            else:
                _log.warning("the endpoint stays as it is: %s", problem)

    async def change(self, wanted: Wanted) -> dict[str, Any]:
        """Take over a changed config, and remember it for an ingress that takes the place of this one.

        Returns:
            `changed`, the changes in a sentence; or `problem`, why there are none, with its `exit_status`.
        """
        async with self._turn:
            answer = await self._take_over(wanted)
            if "changed" in answer:
                await self._remember(wanted)
            return answer

    async def replace(self, replica: str) -> dict[str, Any]:
        """Have a replica answer what it has, and end; Serve puts another in its place.

        Args:
            replica: its name in the metrics.

        Returns:
            `changed`, a sentence; or `problem`, why there is no change, with its `exit_status`.
        """
        try:
            await self._thread.call(self._endpoint.starters.replace(replica))
        except OrchestrayError as error:
            return {"problem": str(error), "exit_status": error.exit_status}
        return {"changed": f"the replica {replica} has ended, and Ray Serve starts another"}

    async def _remember_rollback(self) -> None:
        """Remember that the endpoint has gone back to the models before the last change."""
        async with self._turn:  # that change is remembered first
            self._wanted = [{**self._wanted[-1], "deployments": self._wanted[0]["deployments"]}]
            await self._remember(self._wanted[0])

    async def _remember(self, wanted: Wanted) -> None:
        kept = self._endpoint.served.live.config.model_dump(mode="json", exclude_unset=True)  # its port is the same
        await asyncio.to_thread(self._memory.write, {**wanted, "config": kept})

    async def _take_over(self, wanted: Wanted) -> dict[str, Any]:
        try:
            changed = await self._thread.call(self._endpoint.change(wanted))
        except OrchestrayError as error:
            return {"problem": str(error), "exit_status": error.exit_status}
        self._wanted = [self._wanted[-1], wanted]
        return {"changed": changed}

    async def state(self) -> dict[str, Any]:
        """Return the `url` of the endpoint, and its `warnings` for its owner, as clauses."""
        return {"url": self._endpoint.served.url, "warnings": self._endpoint.served.live.warnings}

    async def predict(
        self,
        inputs: Any,
        *,
        model: str | None = None,
        version: str | int | None = None,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> Any:
        """Return the answer to one sample, from the same batches as requests by HTTP.

        Args:
            inputs: nested lists of numbers, or an array; for several inputs a mapping by name.
            model, version: model that answers; None: the first, by its shares of traffic.
            priority: higher goes first.
            timeout_s: seconds after which the answer is useless; None: no limit.

        Returns:
            An array, or a mapping of arrays by name if the model has several outputs; JSON values where a task encodes
            them, or a class returns others than numbers.

        Raises:
            InputError: the sample is invalid.
            UnknownModelError, BatchingError, ModelError: see `Endpoint.predict`.
        """
        asked = self._endpoint.predict(inputs, model, version, priority, timeout_s)
        return await self._thread.call(asked)

    async def check_health(self) -> None:
        """Check the ingress's health for Serve, which replaces one whose event loop stands still."""
        await self._thread.call(asyncio.sleep(0))

    def __serve_build_asgi_app__(self) -> ASGIApp:
        async def answer(scope: Scope, receive: Receive, send: Send) -> None:  # a function: uvicorn calls methods twice
            if scope["type"] == "lifespan":
                await _live(receive, send)
            else:
                with counted_by_serve():
                    await self._thread.bridge(self._endpoint.served.live, scope, receive, send)

        return answer

    async def __del__(self) -> None:
        """Answer waiting requests, in Serve's last call before it ends the process."""
        if self._started is not None:
            await self._thread.call(self._started.end())
        self._thread.end()

    @property
    def _endpoint(self) -> _Endpoint:
        assert self._started is not None, "Serve has called reconfigure"
        return self._started


class _Endpoint:
    """The endpoint of an ingress, in the event loop of its thread."""

    def __init__(self, served: Served, starters: ApplicationStarters) -> None:
        self.served = served
        self.starters = starters
        metrics = ServeMetrics()
        served.live.monitor.on_each = metrics.note
        self._writing = asyncio.create_task(metrics.keep_writing())
        self._tidying = asyncio.create_task(self._end_unused())

    @classmethod
    async def start(cls, wanted: Wanted) -> _Endpoint:
        """Load the models, and answer at the config's address.

        Raises:
            OrchestrayError: a model cannot be served, or the port is taken.
        """
        config = ServeConfig.model_validate(wanted["config"])
        made: list[ApplicationStarters] = []

        def make(listener_of: ListenerOf) -> ApplicationStarters:
            made.append(ApplicationStarters(listener_of, wanted["deployments"], reserves_cpus=wanted["reserves_cpus"]))
            made[0].keeps = True  # where it cannot start, an ingress before it may use them
            return made[0]

        live = LiveEndpoint(config, settings=JSON.validate_python(wanted["settings"]), make_starters=make)
        listening = listen(config.http.host, config.http.port, key="http.host")
        served = Served(live, listening)
        try:
            await served.start()
        except BaseException:
            listening.close()
            await served.end()
            raise
        made[0].keeps = False
        return cls(served, made[0])

    async def end(self) -> None:
        """Answer waiting requests; end the versions too, unless Serve puts another ingress there instead."""
        self._tidying.cancel()
        self.starters.keeps = True
        await self.served.end()
        with contextlib.suppress(Exception):  # the cluster may be gone already
            await self.starters.end_with_application()

    async def _end_unused(self) -> None:
        """End the versions of an ingress before this one, once it has answered what it had."""
        await asyncio.sleep(DRAIN_S)
        with contextlib.suppress(Exception):  # the cluster's head is being restarted: they end with the application
            await self.starters.end_unused()

    async def change(self, wanted: Wanted) -> str:
        """Take over a changed config; return the changes in a sentence.

        Raises:
            OrchestrayError: it cannot be served; nothing has changed.
        """
        before, self.starters.deployments = self.starters.deployments, wanted["deployments"]
        try:
            return await self.served.apply(wanted["config"], JSON.validate_python(wanted["settings"]))
        except BaseException:
            self.starters.deployments = before
            raise

    async def predict(
        self, inputs: Any, model: str | None, version: str | int | None, priority: int, timeout_s: float | None
    ) -> Any:
        models = self.served.live.registry
        endpoint = models.default if model is None else models[model]
        chosen = endpoint.pick(version)
        deadline_s = None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s
        sample = await chosen.codec.sample_of(inputs, deadline_s=deadline_s)
        output = await endpoint.predict(sample, version=chosen, priority=priority, deadline_s=deadline_s)
        return await chosen.codec.answer_of(output)


async def _live(receive: Receive, send: Send) -> None:
    """Answer ASGI's lifespan events: the endpoint begins and ends with its deployment."""
    while (await receive())["type"] != "lifespan.shutdown":
        await send({"type": "lifespan.startup.complete"})
    await send({"type": "lifespan.shutdown.complete"})
