"""The end of versions before their successors are loaded, on a device that has no memory for both."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterable

from orchestray.serving.application.changes import VersionKey
from orchestray.serving.batching import BatchListener
from orchestray.serving.config.schema import ModelSection, ServeConfig
from orchestray.serving.replicas.batchers import make_batcher
from orchestray.serving.routing.endpoint import ModelVersion


async def stand_in(version: ModelVersion, config: ServeConfig) -> ModelVersion:
    """Return a version that has no model, and that has clients retry when the successor is there.

    It references nothing of the version but its signature.

    Args:
        version: version that it stands for.
        config: config of the endpoint.
    """
    empty = ModelVersion(version.signature, make_batcher(config.batching, BatchListener()))
    empty.replaced_in_s = version.start_s or 0.0  # as long as its own loading took
    await empty.batcher.close()
    return empty


async def release() -> None:
    """Give the memory of models that are garbage back to their device."""
    if "torch" in sys.modules:  # else the models are those of other processes
        from orchestray.serving.models.device import release_memory

        await asyncio.to_thread(release_memory)


def sections_of(keys: Iterable[VersionKey], config: ServeConfig) -> dict[VersionKey, ModelSection]:
    """Return the section of each version in the config that it was started by."""
    sections = {(model.name, model.version): model for model in config.models}
    return {key: sections[key.name, key.version] for key in keys}
