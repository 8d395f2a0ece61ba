"""OpenTelemetry spans, if enabled, and their exporters. Without the SDK everything else works."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from opentelemetry import trace

from orchestray.platform.errors import ConfigError

if TYPE_CHECKING:
    from fastapi.telemetry import TelemetryConfig

_FLUSH_S = 5.0
"""Seconds for the last spans at the end: a collector that does not answer would hold the endpoint for half a minute."""
_EXPORTERS = "OTEL_TRACES_EXPORTER"
_PROTOCOLS = {"http/protobuf": "http", "grpc": "grpc"}
"""Maps the protocols of OTLP to the suffix of the package and its exporter."""


class Spans:
    """The spans of an endpoint, one for each answer, which FastAPI makes by the conventions of OpenTelemetry.

    They go to the provider that the application has set, else to one of this object's own. Its own is not set for the
    process, whose application may still want to set one.

    Args:
        enabled: False to make none.

    Raises:
        ConfigError: a package is missing that the environment's `OTEL_*` variables ask for, or they are invalid.
    """

    def __init__(self, *, enabled: bool) -> None:
        self._own: Any = None
        provider = None
        if enabled:
            provider = trace.get_tracer_provider()
            if isinstance(provider, trace.ProxyTracerProvider):  # stands for one that is not set
                provider = self._own = _make_provider()
        self.telemetry: TelemetryConfig = {
            "tracer_provider": provider,
            "tracing": enabled,
            "operation_spans": False,
            "metrics": False,
            "logs": False,
            "auto_configure": False,
        }
        """Argument of FastAPI."""

    async def close(self) -> None:
        """Export the last spans, within some seconds; an application's own provider is left alone."""
        if self._own is None:
            return
        # The SDK's shutdown blocks and takes no time limit; a thread that is not a daemon would keep the process alive.
        last = threading.Thread(target=self._own.shutdown, name="last spans", daemon=True)
        last.start()
        await asyncio.to_thread(last.join, _FLUSH_S)


def _make_provider() -> Any:
    """Make the provider that the standard variables describe.

    The variables: https://opentelemetry.io/docs/specs/otel/configuration/sdk-environment-variables/. The SDK itself
    reads those of the sampler, of batches and of the resource, and each exporter its own.
    """
    try:
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        exporters = [_make_exporter(name) for name in _exporter_names()]
        processors = [BatchSpanProcessor(exporter) for exporter in exporters]
        resource = Resource.create({"service.name": "orchestray"}).merge(OTELResourceDetector().detect())
        # Ended by `close`, not as the process exits: a second Ctrl-C must not wait for a collector.
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    except ConfigError:
        raise
    except ImportError:
        raise _missing("opentelemetry-sdk") from None
    except Exception as error:  # what a variable cannot mean; some is noticed on import
        raise ConfigError(
            "http.tracing: OpenTelemetry refuses what the environment's OTEL_* variables say: "
            f"{type(error).__name__}: {error}. Correct the variable, or set http.tracing to false"
        ) from error
    for processor in processors:
        provider.add_span_processor(processor)
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
    package = ""
    if name == "otlp":
        protocol = _otlp_protocol()
        name, package = f"otlp_proto_{protocol}", f"opentelemetry-exporter-otlp-proto-{protocol}"
    try:
        # Entry points in which packages declare their exporters, also those of other makers.
        for each in entry_points(group="opentelemetry_traces_exporter", name=name):
            return each.load()()
    except ImportError as error:
        package = package or error.name or name
    if package:
        raise _missing(package)
    raise ConfigError(
        f"http.tracing: {_EXPORTERS} names {name}, which no installed package exports to: "
        "install one that does, or set it to otlp, console or none"
    )


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
