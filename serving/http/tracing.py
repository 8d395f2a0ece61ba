"""OpenTelemetry spans, if enabled, and their exporters. Without its packages everything else works."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from importlib.metadata import entry_points
from typing import Any, Protocol

from orchestray.platform.errors import ConfigError
from orchestray.serving.http.request_context import Call

_FLUSH_S = 5.0
"""Seconds for the last spans at the end: a collector that does not answer would hold the endpoint for half a minute."""
_EXPORTERS = "OTEL_TRACES_EXPORTER"
_PROTOCOLS = {"http/protobuf": "http", "grpc": "grpc"}
"""Maps the protocols of OTLP to the suffix of the package and its exporter."""


class Tracer(Protocol):
    """A maker of one span per request."""

    def span(self, scope: Mapping[str, Any], call: Call) -> contextlib.AbstractContextManager[object]:
        """Return a context manager to enter while the request is answered."""
        ...

    async def close(self) -> None:
        """Export what is not exported yet, within some seconds. No span is kept afterwards."""
        ...


class NoTracer:
    """A tracer that makes no spans."""

    def span(self, scope: Mapping[str, Any], call: Call) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()

    async def close(self) -> None:
        """Do nothing, as there is nothing to export."""


class OpenTelemetry:
    """A tracer whose spans are of kind SERVER, and children of a `traceparent` header (W3C Trace Context).

    Raises:
        ConfigError: a package is missing that the environment's `OTEL_*` variables ask for, or they are invalid.
    """

    def __init__(self, provider: Any = None) -> None:
        """Set up the spans.

        Args:
            provider: makes the spans; default: the one that the application has set, else one of this tracer's own. Its
                own is not set for the process, whose application may still want to set one.
        """
        self._own: Any = None
        with _refused():
            try:
                from opentelemetry import propagate, trace
            except ImportError:
                raise _missing("opentelemetry-sdk") from None
            if provider is None:
                provider = trace.get_tracer_provider()
                if isinstance(provider, trace.ProxyTracerProvider):  # stands for one that is not set
                    provider = self._own = _make_provider()
        self._extract = propagate.extract
        self._tracer = trace.get_tracer("orchestray.serving", tracer_provider=provider)
        self._kind = trace.SpanKind.SERVER

    @contextlib.contextmanager
    def span(self, scope: Mapping[str, Any], call: Call) -> Any:
        carrier = {name.decode("latin-1"): value.decode("latin-1") for name, value in call.headers.items()}
        with self._tracer.start_as_current_span(
            f"{scope['method']} {scope['path']}", context=self._extract(carrier), kind=self._kind
        ) as span:
            try:
                yield span
            finally:  # also for an answer that breaks off
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

    async def close(self) -> None:
        """Export the last spans; an application's own provider is left alone."""
        if self._own is None:
            return
        loop, ended = asyncio.get_running_loop(), asyncio.Event()

        def end() -> None:
            self._own.shutdown()
            with contextlib.suppress(RuntimeError):  # the loop is closed, so that nothing waits any more
                loop.call_soon_threadsafe(ended.set)

        # The SDK's shutdown blocks and takes no time limit; a thread that is not a daemon would keep the process alive.
        threading.Thread(target=end, name="last spans", daemon=True).start()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_FLUSH_S):
                await ended.wait()


def make_tracer(enabled: bool) -> Tracer:
    """Return a tracer that makes spans if `enabled`.

    Raises:
        ConfigError: see `OpenTelemetry`.
    """
    return OpenTelemetry() if enabled else NoTracer()


@contextlib.contextmanager
def _refused() -> Iterator[None]:
    """Turn the packages' various errors about unusable variables into ConfigError; some raise them on import.

    Raises:
        ConfigError: a package raised.
    """
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            "http.tracing: OpenTelemetry refuses what the environment's OTEL_* variables say: "
            f"{type(error).__name__}: {error}. Correct the variable, or set http.tracing to false"
        ) from error


def _make_provider() -> Any:
    """Make the provider that the standard variables describe.

    The variables: https://opentelemetry.io/docs/specs/otel/configuration/sdk-environment-variables/. The SDK itself
    reads those of the sampler, of batches and of the resource, and each exporter its own.
    """
    try:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        raise _missing("opentelemetry-sdk") from None
    exporters = [_make_exporter(name) for name in _exporter_names()]
    resource = Resource.create()
    if str(resource.attributes["service.name"]).startswith("unknown_service"):  # the variables set none
        resource = resource.merge(Resource({"service.name": "orchestray"}))
    # Ended by `close`, not as the process exits: a second Ctrl-C must not wait for a collector.
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    for exporter in exporters:
        provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider


def _exporter_names() -> list[str]:
    given = os.environ.get(_EXPORTERS, "").strip() or "otlp"
    names = [name.strip() for name in given.split(",")]
    return [name for name in names if name and name != "none"]


def _make_exporter(name: str) -> Any:
    if name == "console":
        from opentelemetry.sdk.trace.export import ConsoleSpanExporter

        # Like the access log: standard output is for the command's answers, as with `--json`.
        return ConsoleSpanExporter(out=sys.stderr, formatter=lambda span: f"{span.to_json(indent=None)}\n")
    package = None
    if name == "otlp":
        protocol = _otlp_protocol()
        name, package = f"otlp_proto_{protocol}", f"opentelemetry-exporter-otlp-proto-{protocol}"
    # Entry points in which packages declare their exporters, also those of other makers.
    found = entry_points(group="opentelemetry_traces_exporter", name=name)
    try:
        for each in found:
            return each.load()()
    except ImportError as error:
        package = package or error.name or name
    if package is None:
        raise ConfigError(
            f"http.tracing: {_EXPORTERS} names {name}, which no installed package exports to: "
            "install one that does, or set it to otlp, console or none"
        )
    raise _missing(package)


def _otlp_protocol() -> str:
    names = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
    name, given = next(((name, os.environ[name]) for name in names if os.environ.get(name)), ("", "http/protobuf"))
    if given not in _PROTOCOLS:
        raise ConfigError(f"http.tracing: {name}: must be one of {', '.join(_PROTOCOLS)}, got {given!r}")
    return _PROTOCOLS[given]


def _missing(package: str) -> ConfigError:
    return ConfigError(
        f"http.tracing: needs the package {package}, which is not installed: pip install {package} "
        f"(the environment variable {_EXPORTERS} says where spans go: otlp, which is the default, console or none)"
    )
