"""Ray Serve's own metrics of the requests that reach an endpoint at its own port, and pass none of Serve's processes.

Serve's proxies count the others under the same names: the two never count one request.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_EVERY_S = 1.0
_BUCKETS_MS = (1.0, 2, 5, 10, 20, 50, 100, 200, 300, 400, 500, 1000, 2000, 5000, 10_000, 60_000, 120_000)
_IS_COUNTED: ContextVar[bool] = ContextVar("is_counted", default=False)


@contextmanager
def counted_by_serve() -> Iterator[None]:
    """Leave out the requests that are answered within, and in what they start."""
    token = _IS_COUNTED.set(True)
    try:
        yield
    finally:
        _IS_COUNTED.reset(token)


class ServeMetrics:
    """The counters of an ingress, in its process.

    Requests are noted as they are answered and written once a second, on another thread: Ray's calls would cost more
    than a refusal.
    """

    def __init__(self) -> None:
        from ray import serve
        from ray.util import metrics

        context = serve.get_replica_context()
        tags = {"route": "/", "application": context.app_name}
        keys = ("route", "method", "application")
        self._requests = metrics.Counter("serve_num_http_requests", tag_keys=(*keys, "status_code"))
        self._errors = metrics.Counter("serve_num_http_error_requests", tag_keys=(*keys, "error_code"))
        self._latency_ms = metrics.Histogram(
            "serve_http_request_latency_ms", boundaries=[*_BUCKETS_MS], tag_keys=(*keys, "status_code")
        )
        self._of_deployment = serve.metrics.Counter("serve_deployment_request_counter", tag_keys=("route",))
        for each in (self._requests, self._errors, self._latency_ms):
            each.set_default_tags(tags)
        self._answers: list[tuple[str, int, float]] = []
        """Method, status and seconds of each answer that is not written yet."""

    def note(self, method: str, status: int, seconds: float) -> None:
        """Note an answer, `seconds` after its request came."""
        if not _IS_COUNTED.get():
            self._answers.append((method, status, seconds))

    async def keep_writing(self) -> None:
        """Write what is noted, until cancelled."""
        while True:
            await asyncio.sleep(_EVERY_S)
            answers, self._answers = self._answers, []
            if answers:
                await asyncio.to_thread(self._write, answers)

    def _write(self, answers: list[tuple[str, int, float]]) -> None:
        for method, status, seconds in answers:
            self._latency_ms.observe(seconds * 1e3, tags={"method": method, "status_code": str(status)})
        for (method, status), number in Counter(answer[:2] for answer in answers).items():
            self._requests.inc(number, tags={"method": method, "status_code": str(status)})
            if status >= 400:
                self._errors.inc(number, tags={"method": method, "error_code": str(status)})
        self._of_deployment.inc(len(answers), tags={"route": "/"})
