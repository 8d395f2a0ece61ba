"""The FastAPI application that combines all routes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from importlib.metadata import version as version_of
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from orchestray.serving.http.inference_v2 import v2_routes
from orchestray.serving.http.middleware import RequestMiddleware, path_in, with_prefix
from orchestray.serving.http.monitor import Monitor
from orchestray.serving.http.openapi import describe
from orchestray.serving.http.page import page_routes
from orchestray.serving.http.predict import predict_routes
from orchestray.serving.http.predictor import Predictor
from orchestray.serving.http.problems import HttpProblem
from orchestray.serving.http.request_context import SCOPE_KEY
from orchestray.serving.http.responses import EXPOSED
from orchestray.serving.http.settings import HttpSettings
from orchestray.serving.http.tracing import Spans
from orchestray.serving.models.json_object import input_error
from orchestray.serving.routing.registry import Registry

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send


class Direct:
    """An application in which the endpoints of some routes are found by exact path and method, and no layer is passed.

    Args:
        app: application of all other requests.
        front: middleware of the routes.
        routes: routes whose paths have no parameters.
    """

    def __init__(self, app: ASGIApp, front: RequestMiddleware, routes: Sequence[Route]) -> None:
        self.app = app
        self._front = front
        self._found: dict[tuple[str, str], ASGIApp] = {
            (method, route.path): _as_app(route.endpoint, f"{method} {route.path}")
            for route in routes
            for method in route.methods or ()
        }

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Answer a request."""
        found = self._found.get((scope["method"], path_in(scope))) if scope["type"] == "http" else None
        return self.app(scope, receive, send) if found is None else self._front(found, scope, receive, send)


def _as_app(endpoint: Callable[[Request], Awaitable[Response]], name: str) -> ASGIApp:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        scope[SCOPE_KEY].span.update_name(name)
        response = await endpoint(Request(scope, receive, send))
        await response(scope, receive, send)

    return app


class ServingApp(FastAPI):
    """A FastAPI application with middleware, a fast path, and an OpenAPI document that follows the models.

    Args:
        models: models that are served.
        front: middleware that every request passes.
        direct: routes that bypass all of FastAPI's layers.
        settings: tokens, and the prefix.
        more: arguments of FastAPI.
    """

    def __init__(
        self,
        models: Registry,
        front: RequestMiddleware,
        direct: Sequence[Route],
        settings: HttpSettings,
        **more: Any,
    ) -> None:
        super().__init__(**more)
        self._models = models
        self._front = front
        self._direct = direct
        self._settings = settings
        self.add_middleware(lambda app: partial(front, app))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        await super().__call__(
            with_prefix(scope, self._settings.root_path) if scope["type"] == "http" else scope, receive, send
        )

    def build_middleware_stack(self) -> ASGIApp:
        """Return all layers with the routes, and the fast path in front, unless a layer was added for all routes."""
        layers = super().build_middleware_stack()
        return layers if len(self.user_middleware) > 1 else Direct(layers, self._front, self._direct)

    def openapi(self) -> dict[str, Any]:
        """Return the OpenAPI document of the models that are served now."""
        self.openapi_schema = None
        document = super().openapi()
        own = describe(self._models, with_tokens=bool(self._settings.tokens))
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
    spans: Spans | None = None,
) -> FastAPI:
    """Make the ASGI application of an endpoint, to run on the event loop of the registry's batchers.

    A server that stops must call `monitor.live.close()`: pages that watch would keep their streams open for ever.

    Args:
        registry: the models; they may change, come and go while this runs.
        settings: limits, tokens, logs.
        monitor: the one whose `listener(model, version)` the batchers got; `/metrics` and the page show it.
        routers: more routes, which pass the same checks; an HttpProblem that they raise is answered.
        spans: the spans, closed by the caller; None: made as `settings` say, and closed when the server ends the
            application (ASGI's lifespan).

    Raises:
        ConfigError: `settings` ask for tracing, and a package for it is missing.
    """
    settings = settings or HttpSettings()
    monitor = monitor or Monitor()
    own_spans = Spans(enabled=settings.tracing and spans is None)
    monitor.watch(registry)
    predictor = Predictor(registry)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        monitor.live.close()
        await own_spans.close()

    version = version_of("orchestray")
    predicting = predict_routes(predictor, settings)
    app = ServingApp(
        registry,
        RequestMiddleware(settings, monitor),
        predicting[:1],
        settings,
        telemetry=(spans or own_spans).telemetry,
        title="orchestray",
        version=version,
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
    )
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=[*settings.cors_origins],
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=EXPOSED,
        )
    app.add_exception_handler(HTTPException, _as_problem)
    app.add_exception_handler(RequestValidationError, _as_wrong_input)
    # Routes are tried in order, so the most frequent ones come first.
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
    """Answer errors of the routing in the form of every other refusal."""
    assert isinstance(error, HTTPException)
    text = str(error.detail)
    if error.status_code == 404:
        text = "There is nothing at this address; GET /docs says what there is."
    elif error.status_code == 405:
        taken = (error.headers or {}).get("Allow", "another method")
        text = f"This address takes the method {taken}, not {request.method}; GET /docs has examples."
    raise HttpProblem(error.status_code, text, headers=error.headers)


async def _as_wrong_input(_: Request, error: Exception) -> Response:
    """Answer what FastAPI finds invalid for a router's route; the first part of its place is `body`, `query`, ..."""
    assert isinstance(error, RequestValidationError)
    raise input_error([{**each, "loc": each["loc"][1:]} for each in error.errors()])
