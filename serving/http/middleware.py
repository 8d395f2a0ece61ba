"""ASGI middleware for every request: id, token and size before; errors, metrics and the access log after.

Links, redirects and the `servers` of the OpenAPI document have the prefix under which a proxy shows an endpoint.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from typing import TYPE_CHECKING

from starlette.requests import ClientDisconnect

from orchestray.serving.http.access_log import AccessLog
from orchestray.serving.http.auth import RateLimits
from orchestray.serving.http.body import INFLATED, check_length, inflated
from orchestray.serving.http.monitor import Monitor
from orchestray.serving.http.problems import HttpProblem, as_problem, openai_error
from orchestray.serving.http.request_context import ARRIVED_KEY, SCOPE_KEY, Call
from orchestray.serving.http.responses import json_answer
from orchestray.serving.http.settings import HttpSettings

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

_log = logging.getLogger("orchestray.serving")

_OPEN_PATHS = frozenset({"/ping", "/v2/health/live", "/v2/health/ready", "/", "/docs", "/favicon.ico"})
_OPEN_PREFIX = "/assets/"
_MODEL_HEALTH = re.compile(r"/v2/models/[^/]+(/versions/[^/]+)?/ready")
"""Pattern of a model's health route; other routes of a model do not match, whatever its name."""


class RequestMiddleware:
    """The middleware in front of all routes.

    Health routes, and the pages with their files, need no token: they do not reveal names of models.
    """

    def __init__(self, settings: HttpSettings, monitor: Monitor) -> None:
        self._settings = settings
        self._limits = RateLimits(settings.rate_limit_per_s)
        self._access_log = AccessLog(monitor, settings)

    async def __call__(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """Have an application answer a request, and answer its errors too."""
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        call = Call(dict(scope["headers"]), self._settings.timeout_s, arrived_s=scope.get(ARRIVED_KEY))
        scope[SCOPE_KEY] = call
        answer = _Answer(send, call)
        try:
            await app(scope, self._admit(scope, receive, call), answer)
        except ClientDisconnect:
            call.status = call.gone_status
        except asyncio.CancelledError:
            if not call.client_gone:
                raise
            task = asyncio.current_task()
            if task is not None:
                task.uncancel()
            call.status = call.gone_status
        except Exception as error:  # noqa: BLE001 - whatever it is, it is answered
            await self._refuse(error, scope, receive, answer, call)
            # The future that raised it references it, and its frames reference the future: break the cycle.
            error.__traceback__ = None
        finally:
            call.describe()  # one that has not begun, or breaks off: the span of a whole one has ended
            self._access_log.note(
                call.status,
                call.request_id,
                time.perf_counter() - call.started_s,
                method=scope["method"],
                path=scope["path"],
                client=scope["client"][0] if scope.get("client") else None,
                num_bytes=call.num_body_bytes,
                model=call.model,
                version=call.version,
                token=call.token,
            )

    def _admit(self, scope: Scope, receive: Receive, call: Call) -> Receive:
        """Check what is known of a request before its body, and return the `receive` that decompresses it."""
        headers = call.headers
        if self._settings.tokens and not _is_open(path_in(scope)):
            call.token = self._settings.tokens.check(headers.get(b"authorization"))
            if call.token is not None:
                self._limits.take(call.token, call.started_s)
        check_length(headers.get(b"content-length"), self._settings.max_body_bytes)
        coding = headers.get(b"content-encoding", b"identity").strip().lower()
        if coding in {b"identity", b""}:
            return receive
        if coding not in INFLATED:
            raise HttpProblem(
                415, "The body is compressed in another way than gzip or deflate: send it in one of them."
            )
        return inflated(receive, self._settings.max_body_bytes, coding)

    async def _refuse(self, error: Exception, scope: Scope, receive: Receive, answer: _Answer, call: Call) -> None:
        """Answer a problem; in the form of OpenAI's API, if it was asked by that, in which wrong input is a 400."""
        path = path_in(scope)
        problem, as_openai = as_problem(error), path.startswith("/v1/") and not path.endswith(":predict")  # KServe's
        if problem.status == 500:
            _log.error("request %s: %s %s failed", call.request_id, scope["method"], scope["path"], exc_info=error)
        if answer.started:
            raise error
        content = openai_error(problem) if as_openai else {"error": problem.text, **problem.more}
        status = 400 if as_openai and problem.status == 422 else problem.status
        response = json_answer({**content, "request_id": call.request_id}, status, problem.headers)
        await response(scope, receive, answer)


class _Answer:
    """A `send` that adds the request's id and the answering version to the headers, and records the status."""

    def __init__(self, send: Send, call: Call) -> None:
        self._send = send
        self._call = call
        self._id = (b"x-request-id", call.request_id.encode())
        self.started = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.started = True
            self._call.status = message["status"]
            headers = [*message["headers"], self._id]
            if self._call.version:
                headers.append((b"x-model-version", self._call.version.encode("latin-1", "replace")))
            message["headers"] = headers
            self._call.describe()
        else:
            self._call.num_body_bytes += len(message.get("body", b""))
        await self._send(message)


def _is_open(path: str) -> bool:
    return path in _OPEN_PATHS or path.startswith(_OPEN_PREFIX) or _MODEL_HEALTH.fullmatch(path) is not None


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
