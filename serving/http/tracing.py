"""OpenTelemetry spans, where they are asked for. Without the package opentelemetry-api nothing else is missing."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any, Protocol

from orchestray.platform.errors import ConfigError
from orchestray.serving.http.call import Call


class Tracer(Protocol):
    """Makes a span of a request."""

    def span(self, scope: Mapping[str, Any], call: Call) -> contextlib.AbstractContextManager[object]:
        """Entered while the request is answered."""
        ...


class NoTracer:
    """Makes none."""

    def span(self, scope: Mapping[str, Any], call: Call) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()


class OpenTelemetry:
    """Spans of kind SERVER, children of what a `traceparent` header names (W3C Trace Context).

    Raises:
        ConfigError: opentelemetry-api is not installed.
    """

    def __init__(self, provider: Any = None) -> None:
        """`provider`: makes the spans; default: the process's own."""
        try:
            from opentelemetry import propagate, trace
        except ImportError:
            raise ConfigError("http.tracing: needs opentelemetry-api: pip install opentelemetry-sdk") from None
        self._extract = propagate.extract
        self._tracer = trace.get_tracer("orchestray.serving", tracer_provider=provider)
        self._kind = trace.SpanKind.SERVER

    @contextlib.contextmanager
    def span(self, scope: Mapping[str, Any], call: Call) -> Any:
        carrier = {name.decode("latin-1"): value.decode("latin-1") for name, value in call.headers.items()}
        with self._tracer.start_as_current_span(
            f"{scope['method']} {scope['path']}", context=self._extract(carrier), kind=self._kind
        ) as span:
            yield span
            span.set_attributes(
                {
                    "http.request.method": scope["method"],
                    "url.path": scope["path"],
                    "http.response.status_code": call.status,
                    "orchestray.request_id": call.request_id,
                    "orchestray.model": call.model,
                    "orchestray.version": call.version,
                }
            )


def make_tracer(enabled: bool) -> Tracer:
    """Spans where they are enabled."""
    return OpenTelemetry() if enabled else NoTracer()
