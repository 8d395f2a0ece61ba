"""Versions whose replicas are deployments of the application: the batcher sends them whole batches."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import statistics
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from orchestray.platform.errors import OrchestrayError
from orchestray.serving.application import serve_apps
from orchestray.serving.application.batch_channel import GONE, BatchConnection, Door, doors_of, new_doors, remove
from orchestray.serving.application.deployments import deployment_name, has_replicas, model_deployment, model_key
from orchestray.serving.application.model_loader import Starters
from orchestray.serving.batching import Batcher, RunnerHandle
from orchestray.serving.batching.listener import Process
from orchestray.serving.config.schema import ModelSection, Scaling, ServeConfig
from orchestray.serving.models.signature import Output, Sample, Signature
from orchestray.serving.replicas.autoscaler import ask_for_replica, report_load
from orchestray.serving.replicas.batchers import ListenerOf, make_batcher
from orchestray.serving.routing.endpoint import ModelVersion

if TYPE_CHECKING:
    from ray.serve import Application
    from torch import nn

_log = logging.getLogger("orchestray.serving")

_PACES = 5
"""Number of batches whose median pace counts."""
_LOOK_EVERY_S = 0.5
"""Seconds between two looks for replicas that have come."""
_MOST_TRIES = 5
"""Connections to a replica that fail before a version that has no other is given up."""


class ApplicationStarters(Starters):
    """A starter of versions in the ingress, as gangs, or as deployments.

    A version that is not among the application's own deployments gets an application of its own. Its name says what it
    is: an ingress that takes the place of one that died finds it again.

    Args:
        listener_of: returns the listener of a version's batches.
        deployments: maps the key of a version to its deployment in this application, where it has one.
        reserves_cpus: True to have Ray reserve CPUs for replicas.

    Attributes:
        keeps: True to leave the applications of closed versions running: another ingress may use them.
    """

    def __init__(self, listener_of: ListenerOf, deployments: Mapping[str, str], *, reserves_cpus: bool) -> None:
        super().__init__(listener_of, "auto")  # gangs are placed on the application's own cluster
        self.deployments = deployments
        self.keeps = False
        self._reserves_cpus = reserves_cpus
        self._all_replicas: set[DeployedReplicas] = set()
        self._num_users: Counter[str] = Counter()
        """Versions of each application of their own: one that comes back shares it with what drains of it."""
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def _begin(self, model: ModelSection, config: ServeConfig) -> tuple[ModelVersion, nn.Module | None, str]:
        if not await asyncio.to_thread(has_replicas, model, config):
            return await super()._begin(model, config)
        content = await asyncio.to_thread(self.content, model)
        name = await asyncio.to_thread(deployment_name, model, config)
        own = (
            None
            if name == self.deployments.get(model_key(model))
            else f"{serve_apps.version_prefix(_application())}{name}"
        )
        if own is not None:
            await self._use(own, partial(model_deployment, model, config, name, reserves_cpus=self._reserves_cpus))
        return await self._version(model, config, name, own), None, content

    async def _use(self, own: str, made: Callable[[], Application]) -> None:
        """Have an application of a version's own run, for one more user; if it is about to end, once it has ended.

        Raises:
            OrchestrayError: it did not start.
        """
        async with self._turns[own]:
            self._num_users[own] += 1
            is_new = False
            try:
                if is_new := not await asyncio.to_thread(serve_apps.is_running, own):
                    application = await asyncio.to_thread(made)  # it may wait for that of another version
                    await asyncio.to_thread(serve_apps.run_application, application, own)
            except BaseException:
                await self._let_go(own, keeps=self.keeps and not is_new)
                raise

    async def _let_go(self, own: str, *, keeps: bool) -> None:
        """End an application of a version's own, unless it has other users, or is kept."""
        self._num_users[own] -= 1
        if not self._num_users[own] and not keeps:
            await asyncio.to_thread(serve_apps.delete, own)

    async def end_unused(self) -> None:
        """End the applications of versions that nobody uses here, such as those of an ingress before this one."""
        for own in await asyncio.to_thread(serve_apps.of_versions, _application()):
            async with self._turns[own]:
                if not self._num_users[own]:
                    await asyncio.to_thread(serve_apps.delete, own)

    async def end_with_application(self) -> None:
        """End the applications of versions if the ingress's own ends."""
        if await asyncio.to_thread(serve_apps.is_ending, _application()):
            await self.end_unused()

    async def replace(self, replica: str) -> None:
        """Have a replica answer what it has, and end; Serve puts another in its place.

        Args:
            replica: its name in the metrics.

        Raises:
            OrchestrayError: there is no such replica.
        """
        for replicas in self._all_replicas:
            if replica in replicas.reached:
                await replicas.replace(replica)
                return
        names = sorted(name for replicas in self._all_replicas for name in replicas.reached)
        there = f"there are {', '.join(names)}" if names else "the ingress computes, and has none: see `replicas`"
        raise OrchestrayError(f"the endpoint has no replica {replica}; {there}")

    async def _version(self, model: ModelSection, config: ServeConfig, name: str, own: str | None) -> ModelVersion:
        """Return the version that a deployment answers.

        Args:
            model: the model's section of the config.
            config: config of the endpoint.
            name: name of the deployment.
            own: application of the version, which ends with the last that uses it; None: the ingress's.
        """
        listener = self._listener_of(model.name, str(model.version))
        batcher = make_batcher(config.batching, listener)
        replicas = DeployedReplicas(name, doors_of(own or _application(), name), batcher)
        tasks = [asyncio.create_task(replicas.follow())]
        self._all_replicas.add(replicas)

        async def close() -> None:
            self._all_replicas.discard(replicas)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if own is not None:
                async with self._turns[own]:
                    await self._let_go(own, keeps=self.keeps)

        try:
            if isinstance(config.replicas, Scaling):
                await ask_for_replica(name)  # this ingress may take the place of one that had none left
            signature = await replicas.signature
        except BaseException:
            await close()
            raise
        if isinstance(config.replicas, Scaling):
            tasks.append(asyncio.create_task(report_load(batcher, name)))
        return ModelVersion(signature, batcher, close)


class DeployedReplicas:
    """The replicas of a deployment as runners of a batcher: those that can be reached.

    Each has a connection, on which the next batch is sent before the last has ended. A replica that dies loses no
    request: its batches are run once more.

    Args:
        name: name of the deployment.
        place: result of `doors_of` for it.
        batcher: gets the runners.

    Attributes:
        signature: the model's, when the first replica has come.
        reached: the replicas that can be reached, each a runner and its connection, by the runner's name.
    """

    def __init__(self, name: str, place: str, batcher: Batcher[Sample, Output]) -> None:
        self.signature: asyncio.Future[Signature] = asyncio.get_running_loop().create_future()
        self.reached: dict[str, tuple[RunnerHandle[Sample, Output], BatchConnection]] = {}
        self._name = name
        self._place = place
        self._batcher = batcher
        self._known: set[str] = set()
        """Replicas with a connection, or about to have one."""
        self._failures: Counter[str] = Counter()
        self._num_made = 0
        self._paces_s: deque[float] = deque(maxlen=_PACES)

    async def follow(self) -> None:
        """Connect to the replicas that come, until cancelled."""
        async with asyncio.TaskGroup() as group:
            while True:
                with contextlib.suppress(Exception):  # the cluster's head is being restarted: they stay as they are
                    for door in await asyncio.to_thread(new_doors, self._place, frozenset(self._known)):
                        self._known.add(door.replica)
                        group.create_task(self._hold(door))
                await asyncio.sleep(_LOOK_EVERY_S)

    async def replace(self, replica: str) -> None:
        """Have a replica answer the batches that it has, and end; return when it takes no more."""
        runner, connection = self.reached[replica]
        await runner.remove()
        connection.send_away()
        await connection.ended.wait()

    async def _hold(self, door: Door) -> None:
        """Have a runner for a replica as long as it can be reached."""
        try:
            connection = await BatchConnection.open(door)
        except GONE as error:
            await self._failed(door, error)
        else:
            self._num_made += 1
            run = partial(self._run, connection)
            name, process = f"{self._name}-{self._num_made}", Process(door.node, door.pid) if door.node else None
            runner = self._batcher.add_runner(run, name=name, pace_s=self._pace_s, process=process)
            self.reached[runner.name] = runner, connection
            if not self.signature.done():
                self.signature.set_result(connection.signature)
            try:
                await connection.read()
            finally:
                del self.reached[runner.name]
                self._batcher.retire(runner)
        finally:
            self._known.discard(door.replica)

    async def _failed(self, door: Door, error: Exception) -> None:
        problem = f"replica {door.replica} does not answer at {door.host}:{door.port}: {error!r}"
        _log.warning("%s", problem)
        self._failures[door.replica] += 1
        if self._failures[door.replica] >= _MOST_TRIES and not self.signature.done():
            text = f"{problem}; nodes must reach each other at all ports, as Ray wants"
            self.signature.set_exception(OrchestrayError(text))
        await asyncio.to_thread(remove, door)  # if it runs, it writes it again

    def _pace_s(self) -> float:
        """Return the seconds that a replica needs for a full batch; infinite before the first."""
        return statistics.median_low(self._paces_s) if self._paces_s else math.inf

    async def _run(self, connection: BatchConnection, samples: Sequence[Sample]) -> list[Output | Exception]:
        answers, seconds = await connection.run(samples)
        self._paces_s.append(seconds * max(1.0, self._batcher.max_batch_size / len(samples)))
        return answers


def _application() -> str:
    """Return the name of the application that this process is part of."""
    from ray import serve

    return str(serve.get_replica_context().app_name)
