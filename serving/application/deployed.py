"""Versions whose replicas are deployments of the application: the batcher sends them whole batches by their handle."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from orchestray.serving.application import serve_apps
from orchestray.serving.application.deployments import deployment_name, has_replicas, model_deployment, model_key
from orchestray.serving.application.model_loader import Starters
from orchestray.serving.application.starting import add_codec, add_generator
from orchestray.serving.batching import Batcher, RunnerLostError
from orchestray.serving.batching.runner import RunnerHandle
from orchestray.serving.config.schema import ModelSection, Scaling, ServeConfig
from orchestray.serving.models.signature import Output, Sample, Signature
from orchestray.serving.replicas.autoscaler import report_load
from orchestray.serving.replicas.batchers import ListenerOf, make_batcher
from orchestray.serving.routing.endpoint import ModelVersion

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

_log = logging.getLogger("orchestray.serving")

_PACES = 5
"""Number of batches whose median pace counts."""
_TAKING = ("RUNNING", "RECOVERING", "UPDATING", "PENDING_MIGRATION")
"""States of replicas that take requests; a controller that was started again finds them as RECOVERING."""
_LOOK_EVERY_S = 0.5
"""Seconds between two looks at the number of replicas that run."""


class ApplicationStarters(Starters):
    """A starter of versions in the ingress, as gangs, or as deployments.

    A version that is not among the application's own deployments gets an application of its own. Its name says what it
    is: an ingress that takes the place of one that died finds it again.

    Args:
        listener_of: returns the listener of a version's batches.
        deployments: maps the key of a version to its deployment in this application, where it has one.
        reserves_cpus: True to have Ray reserve CPUs for replicas.
    """

    def __init__(self, listener_of: ListenerOf, deployments: Mapping[str, str], *, reserves_cpus: bool) -> None:
        super().__init__(listener_of, "auto")  # gangs are placed on the application's own cluster
        self.deployments = deployments
        self._reserves_cpus = reserves_cpus

    async def start(self, model: ModelSection, config: ServeConfig) -> ModelVersion:
        """Start a version, and return it when it is loaded and warm.

        Raises:
            OrchestrayError: it cannot be served; the message says why.
        """
        if not await asyncio.to_thread(has_replicas, model, config):
            return await super().start(model, config)
        content = await asyncio.to_thread(self.content, model)
        name = await asyncio.to_thread(deployment_name, model, config)
        own = (
            None
            if name == self.deployments.get(model_key(model))
            else f"{serve_apps.version_prefix(_application())}{name}"
        )
        if own is not None and not await asyncio.to_thread(serve_apps.is_running, own):
            application = model_deployment(model, config, name, reserves_cpus=self._reserves_cpus)
            try:
                await asyncio.to_thread(serve_apps.run_application, application, own)
            except BaseException:
                await asyncio.to_thread(serve_apps.delete, own)
                raise
        version = await self._version(model, config, name, own)
        try:
            listener = self._listener_of(model.name, str(model.version))
            await add_codec(version, model)
            await add_generator(version, model, config, listener, content=content)
        except BaseException:
            await version.close(drain=False)
            raise
        return version

    async def _version(self, model: ModelSection, config: ServeConfig, name: str, own: str | None) -> ModelVersion:
        """Return the version that a deployment answers.

        Args:
            model: the model's section of the config.
            config: config of the endpoint.
            name: name of the deployment.
            own: application of the version, which ends with it; None: the ingress's.
        """
        from ray import serve

        listener = self._listener_of(model.name, str(model.version))
        batcher = make_batcher(config.batching, listener)
        handle = serve.get_deployment_handle(name, own or _application())
        signature = Signature.from_dict(await handle.signature.remote())
        replicas = DeployedReplicas(handle, name, own or _application(), batcher)
        await replicas.look()
        tasks = [asyncio.create_task(replicas.follow())]
        if isinstance(config.replicas, Scaling):
            tasks.append(asyncio.create_task(report_load(batcher, name)))

        async def close() -> None:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if own is not None:
                await asyncio.to_thread(serve_apps.delete, own)

        return ModelVersion(signature, batcher, close)


class DeployedReplicas:
    """The replicas of a deployment as runners of a batcher: as many as run.

    A runner has a replica of its own, to which `SlotRouter` sends its batches. The next one is sent before the last has
    ended: the replica does not wait for it. A replica that dies loses no request: its batches are run once more.

    Args:
        handle: handle of the deployment.
        name: name of the deployment.
        application: name of its application.
        batcher: gets the runners.
    """

    def __init__(
        self, handle: DeploymentHandle[Any], name: str, application: str, batcher: Batcher[Sample, Output]
    ) -> None:
        self._handle = handle
        self._name = name
        self._application = application
        self._batcher = batcher
        self._runners: dict[int, RunnerHandle[Sample, Output]] = {}
        """Maps the slot of a replica to its runner."""
        self._num_made = 0
        self._paces_s: deque[float] = deque(maxlen=_PACES)

    async def follow(self) -> None:
        """Keep as many runners as there are replicas, until cancelled."""
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            with contextlib.suppress(Exception):  # Serve's controller is being restarted: replicas stay as they are
                await self.look()

    async def look(self) -> None:
        """Look once at the number of replicas that run, and have as many runners."""
        count = await asyncio.to_thread(_num_running, self._name, self._application)
        if count is None:
            return
        for slot, runner in list(self._runners.items()):
            if slot >= count or runner.removed:
                self._batcher.retire(self._runners.pop(slot))
        for slot in range(count):
            if slot not in self._runners:
                self._num_made += 1
                name = f"{self._name}-{self._num_made}"
                run = partial(self._run, slot)
                self._runners[slot] = self._batcher.add_runner(run, name=name, pace_s=self._pace_s)

    def _pace_s(self) -> float:
        """Return the seconds that a replica needs for a full batch; infinite before the first."""
        return statistics.median_low(self._paces_s) if self._paces_s else math.inf

    async def _run(self, slot: int, samples: Sequence[Sample]) -> list[Output | Exception]:
        from ray.exceptions import RayError

        answer: Any = self._handle.run.remote(list(samples), slot=slot)
        try:
            answers: list[Output | Exception]
            answers, seconds = await answer
            self._paces_s.append(seconds * max(1.0, self._batcher.max_batch_size / len(samples)))
        except RayError as error:
            raise RunnerLostError(f"A replica of {self._name} is gone: {error}") from error
        except asyncio.CancelledError:
            answer.cancel()
            raise
        return answers


def _num_running(name: str, application_name: str) -> int | None:
    """Return the number of replicas of a deployment that take requests; None: Serve's controller does not know yet."""
    from ray import serve

    application = serve.status().applications.get(application_name)
    deployment = None if application is None else application.deployments.get(name)
    if deployment is None:
        return None
    states: Any = deployment.replica_states  # by strings, or an enum of strings
    return sum(int(states.get(state, 0)) for state in _TAKING)


def _application() -> str:
    """Return the name of the application that this process is part of."""
    from ray import serve

    return str(serve.get_replica_context().app_name)
