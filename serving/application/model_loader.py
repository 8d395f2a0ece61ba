"""Loading of the models of a serve config as versions that answer requests."""

from __future__ import annotations

import asyncio
import logging

from orchestray.serving.application.starting import add_codec, add_generator, divided_network, is_text, start_divided
from orchestray.serving.config.schema import ModelSection, ServeConfig
from orchestray.serving.models.content import content_of
from orchestray.serving.models.own_class import OwnModel
from orchestray.serving.replicas.batchers import ListenerOf, load_arguments, make_batcher
from orchestray.serving.replicas.in_process import in_process
from orchestray.serving.routing.endpoint import ModelVersion

_log = logging.getLogger("orchestray.serving")


class Starters:
    """A starter of versions in this process, or as processes of a cluster that share a model.

    A version in this process has a thread of its own, and one more for text generation. Both compute with the same
    network: its weights are in memory once.

    Args:
        listener_of: returns the listener of a version's batches.
        address: Ray cluster of the processes, which is joined or started when first needed; None: a local one.
    """

    def __init__(self, listener_of: ListenerOf, address: str | None = None) -> None:
        self._listener_of = listener_of
        self._address = address

    async def start(self, model: ModelSection, config: ServeConfig) -> ModelVersion:
        """Start a version, and return it when it is loaded and warm.

        Raises:
            OrchestrayError: it cannot be served; the message says why.
        """
        network = await asyncio.to_thread(divided_network, model, config)
        if network is None:
            return await self._in_process(model, config)
        listener = self._listener_of(model.name, str(model.version))
        batcher = make_batcher(config.batching, listener)
        divided = await start_divided(model, config, network, batcher, self._address)
        await add_codec(divided, model, config.batching.max_queue, listener)
        if await asyncio.to_thread(is_text, model):
            divided.generator_lacking = (
                f"The model {model.name} is divided over processes, and such a model generates no text; "
                "POST /predict answers. Served with compute.network.tensor=1 and pipeline=1 it does."
            )
            _log.warning("%s", divided.generator_lacking)
        return divided

    async def _in_process(self, model: ModelSection, config: ServeConfig) -> ModelVersion:
        from orchestray.serving.models.load import load_served_model  # torch: late

        served = await asyncio.to_thread(load_served_model, **load_arguments(model, config))
        listener = self._listener_of(model.name, str(model.version))
        version = in_process(served, make_batcher(config.batching, listener))
        if isinstance(served, OwnModel):
            return version  # it generates no text
        try:
            await add_codec(version, model, config.batching.max_queue, listener)
            await add_generator(version, model, config, listener, module=served.module)
        except BaseException:
            await version.close(drain=False)
            raise
        return version

    def content(self, model: ModelSection) -> str:
        """Return a digest that distinguishes the present model of that name from earlier ones. Reads a file."""
        return content_of(model.run)
