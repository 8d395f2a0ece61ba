"""The batcher of a model version, and the arguments with which its model is loaded, from a serve config."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from orchestray.serving.batching import Batcher, BatchListener, make_policy
from orchestray.serving.config.schema import BatchingSection, ModelSection, ServeConfig
from orchestray.serving.models.signature import Output, Sample

ListenerOf = Callable[[str, str], BatchListener]
"""Function that returns the listener of a version's batches, given the model's name and version."""


def load_arguments(model: ModelSection, config: ServeConfig) -> dict[str, Any]:
    """Return the arguments of `load_served_model`."""
    return {
        "run": model.run,
        "name": model.name,
        "version": str(model.version),
        "gpus": config.resources.gpus_per_worker,
        "precision": config.compute.precision,
        "compile": config.compute.compile,
        "graphs": config.compute.cuda_graphs,
        "pad_to": config.compute.pad_to,
        "quantize": config.compute.quantize,
        "pad_to_multiple": config.compute.pad_to_multiple,
        "max_batch_size": config.batching.max_batch_size,
        "num_threads": max(1, math.floor(config.resources.cpus_per_worker)),
        "arguments": model.arguments,
    }


def make_batcher(batching: BatchingSection, listener: BatchListener) -> Batcher[Sample, Output]:
    """Make the batcher that a config describes."""
    return Batcher(
        policy=make_policy(batching.policy, timeout_ms=batching.timeout_ms),
        max_batch_size=batching.max_batch_size,
        max_queue=batching.max_queue,
        objective=batching.objective,
        run_timeout_s=batching.run_timeout_s,
        isolate=False,  # models isolate failures themselves, so that no batch has to travel again
        listener=listener,
    )
