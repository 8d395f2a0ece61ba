"""Loading of the models of a serve config as versions that answer requests."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from orchestray.serving.application.starting import add_codec, add_generator, divided_network, is_text, start_divided
from orchestray.serving.config.schema import ModelSection, ServeConfig
from orchestray.serving.models.content import content_of
from orchestray.serving.replicas.batchers import ListenerOf, load_arguments, make_batcher
from orchestray.serving.replicas.in_process import in_process
from orchestray.serving.routing.endpoint import ModelVersion

if TYPE_CHECKING:
    from torch import nn

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
        version, module, content = await self._begin(model, config)
        listener = self._listener_of(model.name, str(model.version))
        try:
            await add_codec(version, model, config.batching.max_queue, listener)
            if version.generator_lacking is None:
                await add_generator(version, model, config, listener, module=module, content=content)
        except BaseException:
            await version.close(drain=False)
            raise
        return version

    async def _begin(self, model: ModelSection, config: ServeConfig) -> tuple[ModelVersion, nn.Module | None, str]:
        """Start what answers predictions.

        Returns:
            the version; its network, if that is in this process; and, if not, a digest of the model that it has.
        """
        network = await asyncio.to_thread(divided_network, model, config)
        batcher = make_batcher(config.batching, self._listener_of(model.name, str(model.version)))
        if network is None:
            from orchestray.serving.models.load import load_served_model  # torch: late

            served = await asyncio.to_thread(load_served_model, **load_arguments(model, config))
            return in_process(served, batcher), getattr(served, "module", None), ""
        divided = await start_divided(model, config, network, batcher, self._address)
        if await asyncio.to_thread(is_text, model):
            divided.generator_lacking = (
                f"The model {model.name} is divided over processes, and such a model generates no text; "
                "POST /predict answers. Served with compute.network.tensor=1 and pipeline=1 it does."
            )
            _log.warning("%s", divided.generator_lacking)
        return divided, None, ""

    def content(self, model: ModelSection) -> str:
        """Return a digest that distinguishes the present model of that name from earlier ones. Reads a file."""
        return content_of(model.run)
