"""JSON Schemas of the models' shapes and types, for the OpenAPI document."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from orchestray.serving.http.frames import FORMS, takes_any
from orchestray.serving.http.predictor import most_samples
from orchestray.serving.http.tensors import BFLOAT16, DATATYPES, TEXTS, datatype_of
from orchestray.serving.models.signature import ANY, Signature, TensorSpec, num_elements
from orchestray.serving.routing.endpoint import Endpoint

Json = dict[str, Any]
_OBJECT: Json = {"type": "object"}
_MOST_COLUMNS = 1024
"""Most columns without names that a schema lists: an image has more pixels than anybody sends as columns."""


def schemas_of(endpoints: Sequence[Endpoint]) -> Json:
    """Return the components of each model.

    `<model>.input` and `<model>.output` are of one sample, `<model>.v2` and `<model>.invocations` of a request.
    """
    schemas: Json = {}
    for endpoint in endpoints:
        signature = endpoint.signature
        is_decoded, is_encoded = ("decode" in signature.own_forms, "encode" in signature.own_forms)
        given = {"description": "as the model's task decodes it"} if is_decoded else _sample(signature.inputs)
        if signature.padding is not None and signature.padding.mask is not None and "required" in given:
            given = {**given, "required": [name for name in given["required"] if name != signature.padding.mask]}
        example = {} if signature.shown_example is None else {"example": signature.shown_example}
        schemas[f"{endpoint.name}.input"] = {**given, **example}
        output = (
            {"description": "as the model's task encodes it"}
            if is_encoded
            else _sample(signature.outputs, nullable=True)
        )
        classes = f"scores of the classes {', '.join(map(str, signature.class_names))}" if signature.class_names else ""
        schemas[f"{endpoint.name}.output"] = {**({"description": classes} if classes else {}), **output}
        schemas[f"{endpoint.name}.v2"] = _v2_request(signature, most_samples(endpoint.main))
        schemas[f"{endpoint.name}.invocations"] = _invocations(signature, most_samples(endpoint.main))
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
    if spec.dtype == ANY:
        return {"description": str(spec)}
    if dtype.kind == "b":
        schema = {"type": "boolean"}
    elif dtype.kind in "iu":
        limits = np.iinfo(dtype)
        schema = {"type": "integer", "minimum": int(limits.min), "maximum": int(limits.max)}
    else:
        most = float(np.finfo(dtype).max)
        schema = {"type": ["number", "null"]} if nullable else {"type": "number", "minimum": -most, "maximum": most}
    for size in reversed(spec.shape):
        sizes = {"minItems": 1} if size is None else {"minItems": size, "maxItems": size}
        schema = {"type": "array", "items": schema, **sizes}
    return {**schema, "description": str(spec)}


def _invocations(signature: Signature, most: int) -> Json:
    """Return the schema of a request of up to `most` samples in each form of MLflow; columns may come in any order."""
    many = partial(_list, most=most)
    if takes_any(signature):
        rows = {"anyOf": [many({}), _OBJECT]}
        return {"anyOf": [{**_OBJECT, "required": [name], "properties": {name: rows}} for name in FORMS]}
    sample = _sample(signature.inputs)
    columns = _columns(signature)
    row = {**_OBJECT, "required": [*columns], "properties": columns, "additionalProperties": False}
    by_column = {**row, "properties": {name: many(each) for name, each in columns.items()}}
    count = len(columns)
    names = {"type": "array", "items": {"enum": [*columns]}, "minItems": count, "maxItems": count, "uniqueItems": True}
    line = {"type": "array", "items": {"anyOf": [*columns.values()]}, "minItems": count, "maxItems": count}
    split = {**_OBJECT, "required": ["columns", "data"], "properties": {"columns": names, "data": many(line)}}
    rows = {"anyOf": [many(sample), many(row)]}
    forms = {
        "inputs": {"anyOf": [*rows["anyOf"], by_column]},
        "instances": rows,
        "dataframe_split": split,
        "dataframe_records": many(row),
    }
    return {
        "anyOf": [
            {
                **_OBJECT,
                "required": [name],
                "properties": {name: form, "params": _OBJECT},
                "additionalProperties": False,
            }
            for name, form in forms.items()
        ]
    }


def _columns(signature: Signature) -> Json:
    """Return the schemas of the columns of a table: its inputs, or the features or the numbers of the only one."""
    if len(signature.inputs) > 1:
        return {spec.name: _tensor(spec, nullable=False) for spec in signature.inputs}
    spec = signature.inputs[0]
    features = signature.feature_names
    if not features and num_elements(spec) > _MOST_COLUMNS:
        return {spec.name: _tensor(spec, nullable=False)}
    features = features or {str(place): 1 for place in range(num_elements(spec))}
    number = _tensor(TensorSpec(spec.name, spec.dtype, ()), nullable=False)
    if spec.numpy_dtype.kind == "f":
        number = {"anyOf": [number, {"type": "boolean"}]}
    lists = {name: {"type": "array", "items": number, "minItems": n, "maxItems": n} for name, n in features.items()}
    return {name: {"anyOf": [number, lists[name]]} if n == 1 else lists[name] for name, n in features.items()}


def _list(each: Json, most: int) -> Json:
    return {"type": "array", "items": each, "minItems": 1, "maxItems": most}


def _v2_request(signature: Signature, most: int) -> Json:
    """Return the schema of a request: one sample, or up to `most`; its tensors are flat or nested, in any order."""
    specs = signature.inputs
    names = {"enum": [spec.name for spec in signature.outputs]}
    tensors: Json = {"type": "array", "minItems": len(specs)}
    outputs = {**_OBJECT, "required": ["name"], "properties": {"name": names, "parameters": _OBJECT}}
    return {
        **_OBJECT,
        "required": ["inputs"],
        "properties": {
            "id": {"type": "string"},
            "inputs": {
                "anyOf": [
                    {**tensors, "prefixItems": [_v2_tensor(spec, 1, one=True) for spec in specs], "items": False},
                    {**tensors, "items": {"anyOf": [_v2_tensor(spec, most) for spec in specs]}, "maxItems": len(specs)},
                ]
            },
            "outputs": {"type": "array", "items": outputs},
            "parameters": _OBJECT,
        },
    }


def _v2_tensor(spec: TensorSpec, most: int, *, one: bool = False) -> Json:
    if spec.dtype == ANY:
        texts = {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": most}
        shape: Json = {"const": [1]} if one else {"type": "array", "items": {"type": "integer"}}
        given: Json = {"name": {"const": spec.name}, "shape": shape, "datatype": {"const": TEXTS}, "data": texts}
        return {**_OBJECT, "required": [*given], "properties": given}
    num = num_elements(spec)
    value = _tensor(TensorSpec(spec.name, spec.dtype, ()), nullable=False)
    flat = {"type": "array", "items": value, "minItems": num, "maxItems": num * most}
    if spec.is_variable:
        flat = {"type": "array", "items": value, "minItems": 1}
    rank = len(spec.shape) + 1
    sizes = [{"type": "integer", "minimum": 1, "maximum": most}, *map(_size, spec.shape)]
    shape = {"type": "array", "prefixItems": sizes, "items": False, "minItems": rank, "maxItems": rank}
    kinds = {"f": ("FP", "BF", "INT", "UINT"), "b": ("BOOL",)}.get(spec.numpy_dtype.kind, ("INT", "UINT"))
    taken = [name for name in (*DATATYPES, BFLOAT16) if name.startswith(kinds)]
    return {
        **_OBJECT,
        "required": ["name", "shape", "datatype", "data"],
        "properties": {
            "name": {"const": spec.name},
            "shape": {"const": [1, *spec.shape]} if one and not spec.is_variable else shape,
            "datatype": {"const": datatype_of(spec.dtype)} if one else {"enum": taken},
            "data": flat if one else {"anyOf": [flat, _list(_tensor(spec, nullable=False), most)]},
        },
    }


def _size(size: int | None) -> Json:
    return {"type": "integer", "minimum": 1} if size is None else {"const": size}


def v2_example(signature: Signature) -> Json:
    """Return a request of the Open Inference Protocol v2 that works as it is: the model's example."""
    if signature.inputs[0].dtype == ANY:
        data = [signature.example if isinstance(signature.example, str) else "a text"]
        return {"inputs": [{"name": signature.inputs[0].name, "shape": [1], "datatype": TEXTS, "data": data}]}
    values = signature.parse(signature.example)
    return {
        "inputs": [
            {
                "name": spec.name,
                "shape": [1, *values[spec.name].shape],
                "datatype": datatype_of(spec.dtype),
                "data": values[spec.name].reshape(-1).tolist(),
            }
            for spec in signature.inputs
        ]
    }
