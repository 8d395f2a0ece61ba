"""The OpenAPI document, with the real shapes of the served models and examples that work as they are."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from orchestray.serving.http.predictor import MODEL_HEADER, VERSION_HEADER
from orchestray.serving.http.request_context import PRIORITY_HEADER, TIMEOUT_HEADER
from orchestray.serving.http.schemas import Json, schemas_of, v2_example
from orchestray.serving.routing.endpoint import Endpoint
from orchestray.serving.routing.registry import Registry

_PROBLEMS = {
    401: "No token, or a wrong one (where tokens are set)",
    404: "No such model or version, or it does not do this",
    413: "The body is too large",
    415: "The body is compressed in another way than gzip or deflate",
    422: "Wrong input: the field, what was wanted and what came",
    429: "More requests than the token is allowed",
    500: "The model failed on this request",
    503: "The queue is full, the deadline cannot be met, or the endpoint is not ready: Retry-After says when",
    504: "The deadline passed while the request was being computed",
}
_OF_A_BODY, _OF_TOKENS = {422, 500, 504}, {401, 429}
_ERROR = {
    "type": "object",
    "required": ["error", "request_id"],
    "properties": {
        "error": {"type": "string"},
        "request_id": {"type": "string"},
        "field": {"type": "string"},
        "wanted": {"type": "string"},
        "got": {"type": "string"},
        "retry_after_s": {"type": "number"},
    },
}
_ANY_OBJECT = {"type": "object"}
_HEADERS = [
    {
        "name": TIMEOUT_HEADER,
        "in": "header",
        "description": "Milliseconds after which the answer is of no use",
        "schema": {"type": "number", "minimum": 0, "maximum": 86_400_000},
    },
    {
        "name": PRIORITY_HEADER,
        "in": "header",
        "description": "Higher goes first",
        "schema": {"type": "integer", "minimum": -100, "maximum": 100},
    },
]


def describe(models: Registry, *, with_tokens: bool) -> Json:
    """Return the paths and components of the routes of `make_app`, for the models served now."""
    endpoints = list(models)
    document: Json = {
        "paths": {
            **_predict_paths(endpoints),
            **_v2_paths(endpoints),
            **_other_paths(),
        },
        "components": {"schemas": {"Error": _ERROR, **schemas_of(endpoints)}},
    }
    if with_tokens:
        document["components"]["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"bearer": []}]
    return document


def parameters_of(default_model: str, models: Json | None = None, versions: Json | None = None) -> list[Json]:
    """Return the parameters with which a request chooses its model, deadline and priority.

    Args:
        default_model: description of what happens without `?model=`.
        models, versions: additions to the schemas of `?model=` and `?version=`.
    """
    return [
        _parameter("model", "query", default_model, models),
        _parameter("version", "query", "Default: by share of the traffic", versions),
        _parameter(MODEL_HEADER, "header", "As ?model="),
        _parameter(VERSION_HEADER, "header", "As ?version="),
        *_HEADERS,
    ]


def _predict_paths(endpoints: Sequence[Endpoint]) -> Json:
    inputs, outputs = (
        _one_of([_ref(f"{endpoint.name}.{part}") for endpoint in endpoints]) for part in ("input", "output")
    )
    request, answer = _object({"inputs": inputs}, ["inputs"]), _object({"outputs": outputs}, ["outputs"])
    many = _one_of([_ref(f"{endpoint.name}.invocations") for endpoint in endpoints])
    choice = parameters_of(
        "Default: the first", {"enum": [endpoint.name for endpoint in endpoints]}, {"enum": _versions(endpoints)}
    )
    examples = {each.name: {"value": {"inputs": each.signature.shown_example}} for each in endpoints}
    first = next(iter(examples.values()), {"value": {}})["value"]
    paths = {
        "/predict": {
            "post": _operation("predict", "Answer one sample", request, answer, choice, examples=examples),
        },
        "/invocations": {
            "post": _operation(
                "invocations",
                "Answer a list of samples, as Amazon SageMaker and MLflow ask",
                many,
                {"type": "object", "required": ["predictions"], "properties": {"predictions": {"type": "array"}}},
                choice,
                examples={"one": {"value": {"inputs": [first["inputs"]] if first else []}}},
            ),
        },
    }
    rows = [{"type": "array", "minItems": 1, "items": _ref(f"{endpoint.name}.input")} for endpoint in endpoints]
    name = {**_parameter("name", "path", "The model", {"enum": [each.name for each in endpoints]}), "required": True}
    paths["/v1/models/{name}:predict"] = {
        "post": _operation(
            "v1_predict",
            "Answer a list of samples, as KServe (V1) and TensorFlow Serving ask",
            _object({"instances": _one_of(rows)}, ["instances"]),
            paths["/invocations"]["post"]["responses"]["200"]["content"]["application/json"]["schema"],
            [name, *_HEADERS],
        )
    }
    paths["/invocations"]["post"]["requestBody"]["content"]["text/csv"] = {"schema": {"type": "string"}}
    return paths


def _v2_paths(endpoints: Sequence[Endpoint]) -> Json:
    name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
    version = {"name": "version", "in": "path", "required": True, "schema": {"type": "string"}}
    if endpoints:
        name["schema"] = {"type": "string", "enum": [endpoint.name for endpoint in endpoints]}
        version["schema"] = {"type": "string", "enum": _versions(endpoints)}
    request = _one_of([_ref(f"{endpoint.name}.v2") for endpoint in endpoints])
    examples = {each.name: {"value": v2_example(each.signature)} for each in endpoints}
    answer = {"type": "object", "required": ["model_name", "model_version", "outputs"]}
    paths: Json = {
        "/v2": _get("v2_server", "The server (Open Inference Protocol v2)"),
        "/v2/health/live": _get("v2_live", "Whether the server runs", is_open=True),
        "/v2/health/ready": _get("v2_ready", "Whether requests are answered", is_open=True),
    }
    for prefix, place, suffix in (
        ("/v2/models/{name}", [name], ""),
        ("/v2/models/{name}/versions/{version}", [name, version], "_version"),
    ):
        infer = _operation(
            f"v2_infer{suffix}",
            "Answer a batch of samples (also with binary tensors behind the JSON)",
            request,
            answer,
            [*place, *_HEADERS],
            examples=examples,
        )
        infer["responses"]["200"]["content"]["application/octet-stream"] = {
            "schema": {"type": "string", "format": "binary"}
        }
        paths[f"{prefix}/infer"] = {"post": infer}
        paths[prefix] = _get(f"v2_model{suffix}", "The tensors of a model", place)
        paths[f"{prefix}/ready"] = _get(f"v2_model_ready{suffix}", "Whether a model answers", place, is_open=True)
    return paths


def _other_paths() -> Json:
    metrics = _operation("metrics", "Prometheus metrics", None, {"type": "string"}, [], media_type="text/plain")
    return {
        "/ping": _get("ping", "Whether requests are answered (SageMaker)", is_open=True),
        "/models": _get("models", "The models: versions, shares, shapes, examples", answer={"type": "array"}),
        "/metrics": {"get": metrics},
    }


def _get(
    name: str,
    summary: str,
    parameters: Sequence[Json] = (),
    *,
    answer: Json = _ANY_OBJECT,
    is_open: bool = False,
) -> Json:
    return {"get": _operation(name, summary, None, answer, [*parameters], is_open=is_open)}


def _operation(
    name: str,
    summary: str,
    request: Json | None,
    answer: Json,
    parameters: list[Json],
    *,
    media_type: str = "application/json",
    examples: Json | None = None,
    is_open: bool = False,
) -> Json:
    operation: Json = {
        "operationId": name,
        "summary": summary,
        "parameters": parameters,
        "responses": {"200": {"description": "Success", "content": {media_type: {"schema": answer}}}},
    }
    without = set() if request is not None else _OF_A_BODY
    if is_open:
        without, operation["security"] = without | _OF_TOKENS, []
    operation["responses"] |= {str(status): answer for status, answer in problems(without).items()}
    if request is not None:
        content: Json = {"schema": request}
        if examples:
            content["examples"] = examples
        operation["requestBody"] = {"required": True, "content": {"application/json": content}}
    return operation


def problems(without: Collection[int] = ()) -> dict[int | str, Json]:
    """Return the answers that are errors, by their status; some may be left out."""
    content = {"application/json": {"schema": _ref("Error")}}
    return {
        status: {"description": text, "content": content} for status, text in _PROBLEMS.items() if status not in without
    }


def _versions(endpoints: Sequence[Endpoint]) -> list[str]:
    return sorted({version.version for endpoint in endpoints for version in endpoint.versions})


def _object(properties: Json, required: list[str]) -> Json:
    return {"type": "object", "required": required, "properties": properties, "additionalProperties": False}


def _parameter(name: str, place: str, description: str, schema: Json | None = None) -> Json:
    return {"name": name, "in": place, "description": description, "schema": {"type": "string", **(schema or {})}}


def _one_of(schemas: list[Json]) -> Json:
    if len(schemas) == 1:
        return schemas[0]
    return {"anyOf": schemas} if schemas else {}


def _ref(name: str) -> Json:
    return {"$ref": f"#/components/schemas/{name}"}
