"""The pages at `/` and `/docs`, their files, and the routes that they read: the models, and batches as they happen."""

from __future__ import annotations

from functools import partial
from typing import Any

from prometheus_client import Histogram
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.staticfiles import StaticFiles

from orchestray.serving.http.monitor import LiveBatches
from orchestray.serving.http.responses import json_answer
from orchestray.serving.models.signature import TensorSpec
from orchestray.serving.routing.endpoint import Endpoint
from orchestray.serving.routing.registry import Registry
from orchestray.trainers.core.parts import parts_of, reports_of

_PARTS = frozenset(
    f"serving.{folder}" for folder in ("application", "batching", "generation", "models", "replicas", "sharded")
)
"""Folders of the classes that `/models` names of a version."""
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
# Swagger UI sets inline styles as it draws its elements.
_DOCS_POLICY = _POLICY.replace("style-src 'self'", "style-src 'self' 'unsafe-inline'")
_HEADERS = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def page_routes(models: Registry, live: LiveBatches) -> list[Route]:
    """Return the routes `GET /`, `/docs`, `/assets/{name}`, `/models` and `/live` (server-sent events)."""
    # Swagger UI's files are among them: loaded from elsewhere, the page would be blank without a network.
    assets = StaticFiles(packages=[("orchestray.serving.http", "assets"), ("fastapi_offline", "static")])

    async def file(request: Request, name: str, policy: str = _POLICY) -> Response:
        response = await assets.get_response(name, request.scope)
        response.headers.update({**_HEADERS, "content-security-policy": policy})
        return response

    async def asset(request: Request) -> Response:
        return await file(request, request.path_params["name"])

    async def served(_: Request) -> Response:
        return json_answer([_about(endpoint) for endpoint in models])

    async def follow(_: Request) -> Response:
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        return StreamingResponse(live.events(), headers=headers, media_type="text/event-stream")

    return [
        Route("/", partial(file, name="index.html"), methods=["GET"]),
        Route("/docs", partial(file, name="docs.html", policy=_DOCS_POLICY), methods=["GET"]),
        Route("/favicon.ico", partial(file, name="icon.svg"), methods=["GET"]),
        Route("/assets/{name}", asset, methods=["GET"]),
        Route("/models", served, methods=["GET"]),
        Route("/live", follow, methods=["GET"]),
    ]


def _about(endpoint: Endpoint) -> dict[str, Any]:
    signature = endpoint.signature
    return {
        "name": endpoint.name,
        "versions": [
            {
                "version": share.version.version,
                "traffic": share.traffic,
                "shadow": share.shadow,
                "computing": share.version.signature.computing,
                "batching": share.version.batcher.describe(),
                "parts": parts_of(share.version, folders=_PARTS),
                "reports": reports_of(share.version, folders=_PARTS),
            }
            for share in endpoint.shares
        ],
        "inputs": [_spec(spec) for spec in signature.inputs],
        "outputs": [_spec(spec) for spec in signature.outputs],
        "example": signature.shown_example,
        "own_forms": signature.own_forms,
        "feature_names": signature.feature_names,
        "class_names": signature.class_names,
        "generation": _about_text(endpoint),
    }


def _about_text(endpoint: Endpoint) -> dict[str, Any] | None:
    """Return statistics of text generation of the version with the most traffic; None if it does not generate text."""
    generator = endpoint.main.generator
    if generator is None:
        return None
    stats = generator.stats
    return {
        "tokens": stats.num_tokens,
        "running": stats.num_running,
        "waiting": stats.num_waiting,
        "cache_used": stats.cache_used,
        "first_token_s": _mean(stats.first_token),
        "token_s": _mean(stats.between_tokens),
    }


def _mean(histogram: Histogram) -> float:
    """Return the mean of what a histogram has seen; 0 before the first."""
    values = {sample.name: sample.value for metric in histogram.collect() for sample in metric.samples}
    total, count = (next(value for name, value in values.items() if name.endswith(end)) for end in ("_sum", "_count"))
    return total / count if count else 0.0


def _spec(spec: TensorSpec) -> dict[str, Any]:
    return {"name": spec.name, "dtype": spec.dtype, "shape": list(spec.shape)}
