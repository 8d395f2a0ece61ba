"""Loading of the models of a serve config as versions that answer requests."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Protocol

from orchestray.serving.application.starting import add_generator, divided_network, is_text, start_divided
from orchestray.serving.config.schema import ModelSection, ServeConfig
from orchestray.serving.replicas.batchers import ListenerOf, load_arguments, make_batcher
from orchestray.serving.replicas.in_process import in_process
from orchestray.serving.routing.endpoint import ModelVersion

if TYPE_CHECKING:
    from orchestray.serving.replicas.ray_replicas import RayReplicas

_log = logging.getLogger("orchestray.serving")


class Starter(Protocol):
    """A starter of versions."""

    async def start(self, model: ModelSection, config: ServeConfig) -> ModelVersion:
        """Start a version, and return it when it is loaded and warm.

        Args:
            model: the model's section of the config.
            config: config of the endpoint.

        Raises:
            OrchestrayError: it cannot be served; the message says why.
        """

    def content(self, model: ModelSection) -> str:
        """Return a digest that distinguishes the present model of that name from earlier ones. Reads a file."""

    @property
    def address(self) -> str | None:
        """Ray cluster for versions started from now on; None: one that is found or started here."""

    def move(self, address: str | None) -> bool:
        """Use another Ray cluster for versions started from now on; return False if one is in use already."""

    async def close(self) -> None:
        """Release what all versions shared; the versions are closed already."""


class InProcess:
    """A starter of versions in this process, each on a thread of its own; text generation has one more.

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
    """A starter of versions in this process, as processes that share a model, or as replicas of a cluster.

    The cluster is started when first needed.
    """

    def __init__(self, listener_of: ListenerOf, address: str | None = None) -> None:
        self._listener_of = listener_of
        self._address = address
        self._in_process = InProcess(listener_of)
        self._replicas: RayReplicas | None = None
        self._has_gangs = False

    async def start(self, model: ModelSection, config: ServeConfig) -> ModelVersion:
        """Start a version, and return it when it is loaded and warm.

        Raises:
            OrchestrayError: it cannot be served; the message says why.
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
            from orchestray.serving.replicas.ray_replicas import RayReplicas  # Ray: late

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
        """Release what all versions shared; the versions are closed already."""
        if self._replicas is not None:
            await self._replicas.close()
