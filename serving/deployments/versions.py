"""From a line of a serve config to a version of a model that answers requests, in this process."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from orchestray.platform.config.serving.schema import BatchingSection, ModelSection, ServeConfig
from orchestray.serving.batching import Batcher, BatchListener, make_policy
from orchestray.serving.generation.starting import add_generator, divided_network, is_text, start_divided
from orchestray.serving.models.endpoint import ModelVersion
from orchestray.serving.models.in_process import in_process
from orchestray.serving.models.signature import Output, Sample

if TYPE_CHECKING:
    from orchestray.serving.deployments.ray_replicas import RayReplicas

_log = logging.getLogger("orchestray.serving")

ListenerOf = Callable[[str, str], BatchListener]
"""By a model's name and version: who is told of its batches."""


class Starter(Protocol):
    """Starts versions."""

    async def start(self, model: ModelSection, config: ServeConfig) -> ModelVersion:
        """A version that is loaded and warm.

        Raises:
            OrchestrayError: it cannot be served; says why.
        """

    def content(self, model: ModelSection) -> str:
        """What tells the model that is there now from one that was there before, under the same name. Reads a file."""

    @property
    def address(self) -> str | None:
        """The Ray cluster that is used for what is started; None: one that is found or started here."""

    def move(self, address: str | None) -> bool:
        """Have a Ray cluster used for what is started from now on; False: another one is in use."""

    async def close(self) -> None:
        """Let go of what all versions shared; they are closed already."""


class InProcess:
    """Versions that run in this process, each on a thread of its own; what generates text has one more.

    Both threads compute with the same network: its weights are in memory once.
    """

    def __init__(self, listener_of: ListenerOf) -> None:
        self._listener_of = listener_of

    async def start(self, model: ModelSection, config: ServeConfig) -> ModelVersion:
        from orchestray.serving.models.load import load_served_model  # torch: late

        served = await asyncio.to_thread(load_served_model, **load_arguments(model, config))
        listener = self._listener_of(model.name, str(model.version))
        version = in_process(served, make_batcher(config.batching, listener))
        try:
            await add_generator(version, model, config, listener, module=served.module)
        except BaseException:
            await version.close(drain=False)
            raise
        return version


class Starters:
    """Starts versions: in this process, or as replicas of a cluster, which is then started when it is first needed."""

    def __init__(self, listener_of: ListenerOf, address: str | None = None) -> None:
        self._listener_of = listener_of
        self._address = address
        self._in_process = InProcess(listener_of)
        self._replicas: RayReplicas | None = None
        self._has_gangs = False

    async def start(self, model: ModelSection, config: ServeConfig) -> ModelVersion:
        """A version that is loaded and warm.

        Raises:
            OrchestrayError: it cannot be served; says why.
        """
        network = await asyncio.to_thread(divided_network, model, config)
        if network is not None:
            batcher = make_batcher(config.batching, self._listener_of(model.name, str(model.version)))
            divided = await start_divided(model, config, network, batcher, self._address)
            self._has_gangs = True
            if await asyncio.to_thread(is_text, model):
                divided.generator_lacking = (
                    f"The model {model.name} is divided over processes, and such a model generates no text; "
                    "POST /predict answers. Served with compute.network.tensor=1 and pipeline=1 it does."
                )
                _log.warning("%s", divided.generator_lacking)
            return divided
        if config.in_process:
            return await self._in_process.start(model, config)
        if self._replicas is None:
            from orchestray.serving.deployments.ray_replicas import RayReplicas  # Ray: late

            self._replicas = RayReplicas(self._listener_of, self._address)
        content = await asyncio.to_thread(self.content, model)
        version = await self._replicas.start(model, config)
        try:
            listener = self._listener_of(model.name, str(model.version))
            await add_generator(version, model, config, listener, content=content)
        except BaseException:
            await version.close(drain=False)
            raise
        return version

    def content(self, model: ModelSection) -> str:
        from orchestray.serving.models.load import content_of  # torch: late

        return content_of(model.run)

    @property
    def address(self) -> str | None:
        return self._address

    def move(self, address: str | None) -> bool:
        if self._has_gangs or (self._replicas is not None and not self._replicas.move(address)):
            return address == self._address
        self._address = address
        return True

    async def close(self) -> None:
        """Let go of what all versions shared; they are closed already."""
        if self._replicas is not None:
            await self._replicas.close()


def load_arguments(model: ModelSection, config: ServeConfig) -> dict[str, Any]:
    """What `load_served_model` is called with."""
    return {
        "run": model.run,
        "name": model.name,
        "version": str(model.version),
        "gpus": config.resources.gpus_per_worker,
        "precision": config.compute.precision,
        "compile": config.compute.compile,
        "quantize": config.compute.quantize,
        "max_batch_size": config.batching.max_batch_size,
        "num_threads": max(1, math.floor(config.resources.cpus_per_worker)),
    }


def make_batcher(batching: BatchingSection, listener: BatchListener) -> Batcher[Sample, Output]:
    """The batcher that a config describes."""
    return Batcher(
        policy=make_policy(batching.policy, timeout_ms=batching.timeout_ms),
        max_batch_size=batching.max_batch_size,
        max_queue=batching.max_queue,
        objective=batching.objective,
        run_timeout_s=batching.run_timeout_s,
        isolate=False,  # models do that themselves, where no batch has to travel for it
        listener=listener,
    )
