"""A fast path to the most frequent routes: routing through FastAPI costs as much as the rest of a small answer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from orchestray.serving.http.prefix import path_in

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send


class Direct:
    """A table of route endpoints by exact path and method.

    Exceptions of an endpoint reach the caller, past the layers and error handlers of an application.

    Args:
        routes: routes whose paths have no parameters.
    """

    def __init__(self, routes: Sequence[Route]) -> None:
        self._apps: dict[tuple[str, str], ASGIApp] = {
            (method, route.path): _as_app(route.endpoint) for route in routes for method in route.methods or ()
        }

    def find(self, scope: Scope) -> ASGIApp | None:
        """Return the ASGI application of the route that matches a request, or None."""
        if scope["type"] != "http":
            return None
        return self._apps.get((scope["method"], path_in(scope)))


def _as_app(endpoint: Callable[[Request], Awaitable[Response]]) -> ASGIApp:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        response = await endpoint(Request(scope, receive, send))
        await response(scope, receive, send)

    return app
