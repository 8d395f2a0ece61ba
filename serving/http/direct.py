"""A fast path to the most frequent routes: routing through FastAPI costs as much as the rest of a small answer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from orchestray.serving.http.middleware import RequestMiddleware
from orchestray.serving.http.prefix import path_in
from orchestray.serving.http.request_context import SCOPE_KEY

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

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        found = self._found.get((scope["method"], path_in(scope))) if scope["type"] == "http" else None
        if found is None:
            await self.app(scope, receive, send)
        else:
            await self._front(found, scope, receive, send)


def _as_app(endpoint: Callable[[Request], Awaitable[Response]], name: str) -> ASGIApp:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        scope[SCOPE_KEY].span.update_name(name)
        response = await endpoint(Request(scope, receive, send))
        await response(scope, receive, send)

    return app
