"""The prefix under which a proxy shows an endpoint: in links, redirects and the `servers` of the OpenAPI document."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.types import Scope

_PREFIX = re.compile(r"(/[A-Za-z0-9._~-]{1,64}){1,16}")
"""Pattern of prefixes, as of `http.root_path`: not `//host`, nor quotes, which would lead browsers elsewhere."""
_HEADER = b"x-forwarded-prefix"


def with_prefix(scope: Scope, root_path: str) -> Scope:
    """Return the scope of a request with its whole prefix as ASGI's `root_path`, and at the begin of its `path`.

    Without `root_path` the prefix is that of `X-Forwarded-Prefix`, as Traefik sends it, and of the server, as Ray Serve
    sets it. Proxies that take the prefix off and those that leave it are served alike.

    Args:
        scope: scope of an HTTP request.
        root_path: the prefix that the endpoint's owner has set; empty: none.
    """
    prefix = root_path
    if not prefix:
        given = next((value for name, value in scope["headers"] if name == _HEADER), b"").decode("latin-1").rstrip("/")
        prefix = (given if _PREFIX.fullmatch(given) else "") + scope.get("root_path", "")
    if not prefix:
        return scope
    inner = _without(prefix, _without(scope.get("root_path", ""), scope["path"]))
    return {**scope, "path": prefix + inner, "root_path": prefix}


def path_in(scope: Scope) -> str:
    """Return the path of a request without the prefix."""
    prefix: str = scope.get("root_path", "")
    return (_without(prefix, scope["path"]) or "/") if prefix else scope["path"]


def _without(prefix: str, path: str) -> str:
    return path[len(prefix) :] if path == prefix or path.startswith(f"{prefix}/") else path
