"""Trained models as functions on batches."""

from __future__ import annotations

from orchestray.serving.models.errors import InputError, ModelError, UnknownModelError
from orchestray.serving.models.signature import Output, Sample, Signature, TensorSpec

__all__ = [
    "InputError",
    "ModelError",
    "Output",
    "Sample",
    "Signature",
    "TensorSpec",
    "UnknownModelError",
]
