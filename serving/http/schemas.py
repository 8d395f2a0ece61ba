"""JSON Schemas of the models' shapes and types, for the OpenAPI document."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from orchestray.serving.http.tensors import datatype_of
from orchestray.serving.models.signature import Signature, TensorSpec
from orchestray.serving.routing.endpoint import Endpoint

Json = dict[str, Any]


def schemas_of(endpoints: Sequence[Endpoint]) -> Json:
    """Return the components of each model: `<model>.input`, `<model>.output` (one sample), `<model>.v2` (a request)."""
    schemas: Json = {}
    for endpoint in endpoints:
        signature = endpoint.signature
        schemas[f"{endpoint.name}.input"] = {**_sample(signature.inputs), "example": signature.example}
        schemas[f"{endpoint.name}.output"] = _sample(signature.outputs, nullable=True)
        schemas[f"{endpoint.name}.v2"] = _v2_request(signature)
    return schemas


def _sample(specs: Sequence[TensorSpec], *, nullable: bool = False) -> Json:
    if len(specs) == 1:
        return _tensor(specs[0], nullable=nullable)
    return {
        "type": "object",
        "required": [spec.name for spec in specs],
        "properties": {spec.name: _tensor(spec, nullable=nullable) for spec in specs},
        "additionalProperties": False,
    }


def _tensor(spec: TensorSpec, *, nullable: bool) -> Json:
    """Return the schema of a nested array of the tensor's shape."""
    dtype = spec.numpy_dtype
    schema: Json
    if dtype.kind == "b":
        schema = {"type": "boolean"}
    elif dtype.kind in "iu":
        limits = np.iinfo(dtype)
        schema = {"type": "integer", "minimum": int(limits.min), "maximum": int(limits.max)}
    else:
        most = float(np.finfo(dtype).max)
        schema = {"type": ["number", "null"]} if nullable else {"type": "number", "minimum": -most, "maximum": most}
    for size in reversed(spec.shape):
        schema = {"type": "array", "items": schema, "minItems": size, "maxItems": size}
    return {**schema, "description": str(spec)}


def _v2_request(signature: Signature) -> Json:
    tensors = [
        {
            "type": "object",
            "required": ["name", "shape", "datatype", "data"],
            "properties": {
                "name": {"const": spec.name},
                "shape": {"const": [1, *spec.shape]},
                "datatype": {"const": datatype_of(spec.dtype)},
                "data": _flat(spec),
            },
        }
        for spec in signature.inputs
    ]
    return {
        "type": "object",
        "required": ["inputs"],
        "properties": {
            "id": {"type": "string"},
            "inputs": {"type": "array", "prefixItems": tensors, "items": False, "minItems": len(tensors)},
        },
    }


def _flat(spec: TensorSpec) -> Json:
    flat = TensorSpec(spec.name, spec.dtype, (math.prod(spec.shape),))
    return _tensor(flat, nullable=False)


def v2_example(signature: Signature) -> Json:
    """Return a request of the Open Inference Protocol v2 that works as it is: the model's example."""
    values = signature.parse(signature.example)
    return {
        "inputs": [
            {
                "name": spec.name,
                "shape": [1, *spec.shape],
                "datatype": datatype_of(spec.dtype),
                "data": values[spec.name].reshape(-1).tolist(),
            }
            for spec in signature.inputs
        ]
    }
