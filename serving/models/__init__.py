"""A run directory as a function on batches, and the models of an endpoint by name and version."""

from __future__ import annotations

from orchestray.serving.models.endpoint import Endpoint, ModelVersion, Share
from orchestray.serving.models.errors import InputError, ModelError, UnknownModelError
from orchestray.serving.models.in_process import in_process
from orchestray.serving.models.registry import Registry
from orchestray.serving.models.signature import Output, Sample, Signature, TensorSpec

__all__ = [
    "Endpoint",
    "InputError",
    "ModelError",
    "ModelVersion",
    "Output",
    "Registry",
    "Sample",
    "Share",
    "Signature",
    "TensorSpec",
    "UnknownModelError",
    "in_process",
]
