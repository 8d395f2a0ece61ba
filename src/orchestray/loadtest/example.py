"""Request bodies made from an endpoint's description: OpenAPI, or metadata of the Open Inference Protocol v2."""

from __future__ import annotations

import math
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

_DEEPEST = 16
_MOST_ITEMS = 1_000_000
_JSON = "application/json"


def posts(document: Mapping[str, Any]) -> list[str]:
    """Return the paths of an OpenAPI document that accept a POST with a JSON body and have no path parameters."""
    found = []
    for path, operations in (document.get("paths") or {}).items():
        content = ((operations.get("post") or {}).get("requestBody") or {}).get("content") or {}
        if _JSON in content and "{" not in path:
            found.append(path)
    return found


def openapi_body(document: Mapping[str, Any], path: str) -> Any:
    """Return a body for a POST to this path: the document's example, or one made from its schema, or else None.

    An example of the content is preferred to one of its schema, and that to a generated one.
    """
    paths: Mapping[str, Any] = document.get("paths") or {}
    operations: Any = paths.get(path)
    if operations is None:
        operations = next((value for key, value in paths.items() if _fits(key, path)), {})
    body = _resolved((operations.get("post") or {}).get("requestBody") or {}, document)
    content = (body.get("content") or {}).get(_JSON) or {}
    if "example" in content:
        return content["example"]
    for example in (content.get("examples") or {}).values():
        example = _resolved(example, document)
        if "value" in example:
            return example["value"]
    schema = content.get("schema")
    return None if schema is None else _instance(schema, document, 0)


def _fits(pattern: str, path: str) -> bool:
    """Return True if a pattern such as `/models/{name}` matches this path."""
    wanted, given = pattern.split("/"), path.partition("?")[0].split("/")
    return len(wanted) == len(given) and all(w == g or w.startswith("{") for w, g in zip(wanted, given, strict=True))


def _resolved(value: Any, document: Mapping[str, Any]) -> Mapping[str, Any]:
    for _ in range(_DEEPEST):
        if not isinstance(value, Mapping) or "$ref" not in value:
            break
        at: Any = document
        for part in str(value["$ref"]).removeprefix("#/").split("/"):
            at = at.get(part.replace("~1", "/").replace("~0", "~"), {}) if isinstance(at, Mapping) else {}
        value = at
    return value if isinstance(value, Mapping) else {}


def _instance(schema: Any, document: Mapping[str, Any], depth: int) -> Any:
    """Return a value, as simple as possible, that a JSON schema allows."""
    schema = _resolved(schema, document)
    if depth > _DEEPEST:
        return None
    for key in ("example", "const", "default"):
        if key in schema:
            return schema[key]
    for key in ("examples", "enum"):
        if schema.get(key):
            return schema[key][0]
    make = partial(_instance, document=document, depth=depth + 1)
    if schema.get("allOf"):
        parts = [make(part) for part in schema["allOf"]]
        return dict(ChainMap(*reversed(parts))) if all(isinstance(part, dict) for part in parts) else parts[0]
    for key in ("anyOf", "oneOf"):
        if schema.get(key):
            return make(schema[key][0])
    kind = schema.get("type")
    return _typed(kind[0] if isinstance(kind, list) else kind, schema, make)


def _typed(kind: Any, schema: Mapping[str, Any], make: Callable[[Any], Any]) -> Any:
    if kind == "object" or "properties" in schema:
        properties = schema.get("properties") or {}
        return {name: make(properties.get(name, {})) for name in schema.get("required") or properties}
    if kind == "array":
        if "prefixItems" in schema:
            return [make(item) for item in schema["prefixItems"]]
        return [make(schema.get("items", {}))] * min(_MOST_ITEMS, max(1, int(schema.get("minItems", 1))))
    if kind in {"integer", "number"}:
        least = schema.get("exclusiveMinimum", schema.get("minimum", 0) - 1) + 1
        value = min(max(0, least), schema.get("maximum", math.inf))
        return int(value) if kind == "integer" else float(value)
    if kind == "string":
        return "text".ljust(int(schema.get("minLength", 0)), "x")
    return {"boolean": False, "null": None}.get(str(kind), 0)


def v2_body(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return an inference request of zeros for a model's metadata (Open Inference Protocol v2, "Model Metadata").

    A dimension of -1, which allows any size, becomes 1.
    """
    tensors = []
    for tensor in metadata["inputs"]:
        shape: Sequence[int] = [max(1, int(size)) for size in tensor["shape"]]
        datatype = str(tensor["datatype"])
        zero: Any = 0.0 if datatype.startswith(("FP", "BF")) else {"BYTES": "text", "BOOL": False}.get(datatype, 0)
        data = [zero] * min(_MOST_ITEMS, math.prod(shape))
        tensors.append({"name": tensor["name"], "shape": shape, "datatype": datatype, "data": data})
    return {"inputs": tensors}
