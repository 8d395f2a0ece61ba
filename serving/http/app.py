"""The application: everything under one roof."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from importlib.metadata import version as version_of
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from orchestray.serving.http.direct import Direct
from orchestray.serving.http.front import Behind, Front
from orchestray.serving.http.inference_v2 import v2_routes
from orchestray.serving.http.monitor import Monitor
from orchestray.serving.http.openapi import describe
from orchestray.serving.http.page import page_routes
from orchestray.serving.http.predict import predict_routes
from orchestray.serving.http.predictor import Predictor
from orchestray.serving.http.problems import HttpProblem
from orchestray.serving.http.settings import HttpSettings
from orchestray.serving.http.tracing import Tracer, make_tracer
from orchestray.serving.models.registry import Registry

if TYPE_CHECKING:
    from fastapi.telemetry import TelemetryConfig
    from starlette.types import Receive, Scope, Send

_NO_TELEMETRY: TelemetryConfig = {"tracing": False, "metrics": False, "logs": False}
"""Of FastAPI's own: spans are made by a `Tracer`, once for each answer and only where the settings ask for them."""


class ServingApp(FastAPI):
    """FastAPI behind a front, with a short way to some routes, and an OpenAPI document that follows the models.

    Args:
        models: those served.
        front: passes every request.
        direct: has the routes to which the way is short: past all of FastAPI's layers.
        with_tokens: whether requests need one.
        more: of FastAPI.
    """

    def __init__(self, models: Registry, front: Front, direct: Direct, *, with_tokens: bool, **more: Any) -> None:
        super().__init__(**more, telemetry=_NO_TELEMETRY)
        self._models = models
        self._front = front
        self._direct = direct
        self._with_tokens = with_tokens
        self.add_middleware(Behind, front=front)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        app = self._direct.find(scope)
        if app is None or len(self.user_middleware) > 1:  # a layer that was added is for all routes
            await super().__call__(scope, receive, send)
        else:
            await self._front(app, scope, receive, send)

    def openapi(self) -> dict[str, Any]:
        """The document, for the models served now."""
        self.openapi_schema = None
        document = super().openapi()
        own = describe(self._models, with_tokens=self._with_tokens)
        components = document.setdefault("components", {})
        schemas = {**components.get("schemas", {}), **own["components"]["schemas"]}
        return {
            **document,
            **own,
            "paths": {**own["paths"], **document["paths"]},
            "components": {**components, **own["components"], "schemas": schemas},
        }


def make_app(
    registry: Registry,
    settings: HttpSettings | None = None,
    *,
    monitor: Monitor | None = None,
    routers: Sequence[APIRouter] = (),
    tracer: Tracer | None = None,
) -> FastAPI:
    """The HTTP side of an endpoint. Runs under any ASGI server, on the event loop that the registry's batchers live on.

    A server that is told to stop calls `monitor.live.close()`: pages that look on would keep their streams for ever.

    Args:
        registry: the models; they may change, come and go while this runs.
        settings: limits, tokens, logs.
        monitor: whose `listener(model, version)` the batchers were given; it is what `/metrics` and the page show.
        routers: more routes, which pass the same checks; an HttpProblem that they raise is answered.
        tracer: makes the spans, and is closed by the caller; None: what `settings` say, closed as the server ends the
            application (ASGI's lifespan).

    Raises:
        ConfigError: `settings` ask for tracing, and what it needs is missing.
    """
    settings = settings or HttpSettings()
    monitor = monitor or Monitor()
    own_tracer = make_tracer(settings.tracing and tracer is None)
    monitor.watch(registry)
    predictor = Predictor(registry)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        monitor.live.close()
        await own_tracer.close()

    version = version_of("orchestray")
    predicting = predict_routes(predictor, settings)
    app = ServingApp(
        registry,
        Front(settings, monitor, tracer or own_tracer),
        Direct(predicting[:1]),
        with_tokens=bool(settings.tokens),
        title="orchestray",
        version=version,
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
    )
    app.add_exception_handler(HTTPException, _as_problem)
    app.add_exception_handler(RequestValidationError, _as_wrong_input)
    # What is asked most is looked at first.
    app.router.routes[:0] = [
        *predicting,
        *v2_routes(predictor, settings, version),
        _metrics_route(monitor),
        *page_routes(registry, monitor.live),
    ]
    for router in routers:
        app.include_router(router)
    return app


def _metrics_route(monitor: Monitor) -> Route:
    async def metrics(_: Request) -> Response:
        text, media_type = monitor.text()
        return Response(text, headers={"content-type": media_type})

    return Route("/metrics", metrics, methods=["GET"])


async def _as_problem(request: Request, error: Exception) -> Response:
    """What the routing refuses, in the form of every other refusal."""
    assert isinstance(error, HTTPException)
    text = str(error.detail)
    if error.status_code == 404:
        text = "There is nothing at this address; GET /docs says what there is."
    elif error.status_code == 405:
        taken = (error.headers or {}).get("Allow", "another method")
        text = f"This address takes the method {taken}, not {request.method}; GET /docs has examples."
    raise HttpProblem(error.status_code, text, headers=error.headers)


async def _as_wrong_input(_: Request, error: Exception) -> Response:
    """What FastAPI finds wrong with the body of a router's route."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    field = ".".join(str(part) for part in first["loc"] if part != "body") or "the body"
    raise HttpProblem(422, f"{field}: {first['msg']}.", more={"field": field, "wanted": first["msg"], "got": "other"})
