"""OpenTelemetry spans: their contents, their parents, and where they go."""

from __future__ import annotations

import asyncio
import http.server
import json
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from fastapi import APIRouter
from fastapi.responses import StreamingResponse

from orchestray.platform.errors import ConfigError
from orchestray.serving.application.endpoint import LiveEndpoint
from orchestray.serving.config.load import load_serve_config
from orchestray.serving.http import HttpSettings, make_app
from orchestray.serving.http.tracing import Spans
from orchestray.serving.routing.registry import Registry
from support.http_endpoint import ROW_SUMS, Held, endpoint
from support.patience import PATIENCE_S
from support.served import written_run

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

pytest.importorskip("opentelemetry.sdk.trace")

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
PACKAGE = "opentelemetry-exporter-otlp-proto-"


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """Export nothing but at the end, and remove the machine's own variables."""
    for name in ("OTEL_TRACES_EXPORTER", "OTEL_SERVICE_NAME", "OTEL_RESOURCE_ATTRIBUTES", "OTEL_SDK_DISABLED"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "3600000")


def trace_one(spans: Spans) -> None:
    """Trace a request with a parent, and the end of the endpoint."""

    async def answering() -> None:
        transport = httpx.ASGITransport(make_app(Registry(), spans=spans))
        async with httpx.AsyncClient(transport=transport, base_url="http://endpoint") as client:
            assert (await client.get("/v2", headers={"traceparent": PARENT})).status_code == 200
        await spans.close()

    asyncio.run(answering())


@pytest.fixture
def applications_spans(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """Return the spans that go to a provider that the application has set."""
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    provider, kept = TracerProvider(), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(kept))
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)  # as set_tracer_provider, which can be called only once
    return kept


def test_a_span_is_a_child_of_what_the_request_names_and_goes_to_the_applications_provider(
    monkeypatch: pytest.MonkeyPatch, applications_spans: InMemorySpanExporter
) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "what the application has set needs no exporter of ours")
    spans = Spans(enabled=True)
    for _ in range(2):  # what the application has set is not ended with the endpoint
        trace_one(spans)
    first, second = applications_spans.get_finished_spans()
    assert first.name == second.name == "GET /v2"
    assert first.context is not None
    assert format(first.context.trace_id, "032x") == PARENT.split("-")[1]
    assert first.attributes is not None
    assert first.attributes["http.response.status_code"] == 200


@pytest.mark.parametrize(("is_asked", "num_spans"), [(True, 1), (False, 0)])
@pytest.mark.parametrize(
    ("path", "inputs"),
    [("/predict", ROW_SUMS.example), ("/invocations", [ROW_SUMS.example])],
    ids=["the short way", "through FastAPI"],
)
def test_an_answer_has_one_span_where_spans_are_asked_for_though_fastapi_can_make_its_own(
    is_asked: bool, num_spans: int, path: str, inputs: Any, applications_spans: InMemorySpanExporter
) -> None:
    async def serving() -> str:
        async with endpoint(settings=HttpSettings(tracing=is_asked)) as asked:
            answer = await asked.client.post(path, json={"inputs": inputs})
            assert answer.status_code == 200
            return answer.headers["x-request-id"]

    request_id = asyncio.run(serving())
    spans = applications_spans.get_finished_spans()
    assert [span.name for span in spans] == [f"POST {path}"] * num_spans
    wanted = {
        "http.request.method": "POST",
        "url.path": path,
        "http.response.status_code": 200,
        "orchestray.request_id": request_id,
        "orchestray.model": "sums",
        "orchestray.version": "1",
    }
    assert all(span.attributes is not None and wanted.items() <= span.attributes.items() for span in spans)


def test_the_span_of_a_client_that_left_before_its_answer_says_so(applications_spans: InMemorySpanExporter) -> None:
    async def serving() -> None:
        held = Held()
        async with endpoint((ROW_SUMS, held), settings=HttpSettings(tracing=True)) as asked:
            body = json.dumps({"inputs": ROW_SUMS.example}).encode()
            messages = [{"type": "http.request", "body": body}]

            async def receive() -> dict[str, Any]:
                if messages:
                    return messages.pop()
                await held.started.wait()
                return {"type": "http.disconnect"}

            async def send(_: Any) -> None:
                raise AssertionError("nobody is there to be answered")

            scope = {"type": "http", "method": "POST", "path": "/predict", "query_string": b"", "headers": []}
            await asked.app(scope, receive, send)  # type: ignore[arg-type]
            held.go.set()

    asyncio.run(serving())
    (span,) = applications_spans.get_finished_spans()
    assert span.attributes is not None
    assert (span.attributes["http.response.status_code"], span.attributes["orchestray.model"]) == (499, "sums")


@pytest.mark.parametrize(
    ("variables", "service"),
    [
        ({}, "orchestray"),
        ({"OTEL_SERVICE_NAME": "mine"}, "mine"),
        ({"OTEL_RESOURCE_ATTRIBUTES": "service.name=ours"}, "ours"),
    ],
)
def test_the_service_is_orchestray_unless_the_environment_names_it(
    variables: dict[str, str], service: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"OTEL_TRACES_EXPORTER": "console", **variables}.items():
        monkeypatch.setenv(name, value)
    trace_one(Spans(enabled=True))
    told = capsys.readouterr()
    assert told.out == ""
    assert json.loads(told.err)["resource"]["attributes"]["service.name"] == service


def test_none_exports_nothing_and_needs_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "none")
    trace_one(Spans(enabled=True))
    assert capsys.readouterr() == ("", "")


@contextmanager
def without_otlp() -> Iterator[None]:
    """Hide the packages of OTLP, as where they are not installed."""
    with pytest.MonkeyPatch.context() as patch:
        for protocol in ("http", "grpc"):
            patch.setitem(sys.modules, f"opentelemetry.exporter.otlp.proto.{protocol}.trace_exporter", None)
        yield


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        ({}, f"needs the package {PACKAGE}http, which is not installed: pip install {PACKAGE}http"),
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, f"pip install {PACKAGE}grpc"),
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "smoke"}, "OTLP_PROTOCOL: must be one of http/protobuf, grpc, got 'smoke'"),
        ({"OTEL_TRACES_EXPORTER": "console,smoke"}, "names smoke, which no installed package exports to"),
    ],
)
def test_an_application_whose_spans_can_go_nowhere_is_not_made(
    variables: dict[str, str], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with without_otlp(), pytest.raises(ConfigError) as refused:
        make_app(Registry(), HttpSettings(tracing=True))
    assert told in str(refused.value)


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("OTEL_BSP_MAX_QUEUE_SIZE", "256", "max_export_batch_size must be less than or equal to max_queue_size"),
        ("OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT", "many", "OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT must be a non-negative integer"),
    ],
)
def test_variables_that_cannot_be_meant_are_refused_with_what_is_wrong(
    name: str, value: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "console")
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=rf"^http\.tracing: OpenTelemetry refuses .* ValueError: .*{told}"):
        make_app(Registry(), HttpSettings(tracing=True))


def test_without_the_sdk_the_refusal_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match="pip install opentelemetry-sdk "):
        Spans(enabled=True)


def test_the_span_of_an_answer_that_breaks_off_says_what_was_asked_and_answered(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "console")

    async def parts() -> AsyncIterator[bytes]:
        yield b"the beginning"
        raise RuntimeError("and no more")

    router = APIRouter()
    router.add_api_route("/broken", lambda: StreamingResponse(parts()))

    async def serving() -> None:
        spans = Spans(enabled=True)
        app = make_app(Registry(), routers=[router], spans=spans)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://endpoint") as client:
            with pytest.raises(RuntimeError, match="and no more"):
                await client.get("/broken", headers={"x-request-id": "mine"})
        await spans.close()

    asyncio.run(serving())
    (line,) = (line for line in capsys.readouterr().err.splitlines() if line.startswith('{"name"'))
    span = json.loads(line)
    assert span["status"]["status_code"] == "ERROR"
    assert span["attributes"]["http.response.status_code"] == 200
    assert span["attributes"]["orchestray.request_id"] == "mine"


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Any]:
    """Return the config of an endpoint that traces."""
    run = written_run(tmp_path / "runs")
    return {"name": "endpoint", "models": [{"name": "digits", "run": str(run)}], "http": {"tracing": True}}


def test_an_endpoint_that_ends_has_exported_a_span_of_each_answer_across_a_change(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "console")

    async def serving() -> None:
        live = LiveEndpoint(load_serve_config(config))
        await live.start()
        try:
            async with httpx.AsyncClient(transport=httpx.ASGITransport(live), base_url="http://endpoint") as client:
                await client.post("/predict", json={"inputs": [0.5] * 64})
                await live.apply({**config, "http": {"tracing": True, "max_body_mb": 1.0}})  # another application
                await client.post("/predict", json={"inputs": []})
                await live.apply({**config, "http": {"tracing": False}})
                await client.get("/v2")
        finally:
            await live.close()

    asyncio.run(serving())
    spans = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [span["attributes"]["http.response.status_code"] for span in spans] == [200, 422]
    assert {span["name"] for span in spans} == {"POST /predict"}


def test_an_application_under_another_server_exports_its_spans_as_that_ends_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "console")

    async def serving() -> None:
        app = make_app(Registry(), HttpSettings(tracing=True))
        client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://endpoint")
        async with app.router.lifespan_context(app), client:
            await client.get("/v2")
            assert capsys.readouterr().err == ""

    asyncio.run(serving())
    (line,) = (line for line in capsys.readouterr().err.splitlines() if line.startswith('{"name"'))
    assert json.loads(line)["name"] == "GET /v2"


def test_a_change_to_tracing_that_lacks_a_package_is_refused_and_the_endpoint_goes_on(config: dict[str, Any]) -> None:
    async def serving() -> int:
        live = LiveEndpoint(load_serve_config({**config, "http": {"tracing": False}}))
        await live.start()
        try:
            with without_otlp(), pytest.raises(ConfigError, match=f"needs the package {PACKAGE}http"):
                await live.apply(config)
            async with httpx.AsyncClient(transport=httpx.ASGITransport(live), base_url="http://endpoint") as client:
                return (await client.post("/predict", json={"inputs": [0.5] * 64})).status_code
        finally:
            await live.close()

    assert asyncio.run(serving()) == 200


class Collector(http.server.ThreadingHTTPServer):
    """A server that keeps what it is sent; it may be held before it answers."""

    def __init__(self) -> None:
        self.received: list[tuple[str, bytes]] = []
        self.asked, self.answered, self.go_on = threading.Event(), threading.Event(), threading.Event()
        self.go_on.set()
        super().__init__(("127.0.0.1", 0), Collecting)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Collecting(http.server.BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        self.server.received.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
        self.server.asked.set()
        self.server.go_on.wait(PATIENCE_S)
        self.server.answered.set()
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Log nothing into the tests' output."""


@contextmanager
def collecting() -> Iterator[Collector]:
    with Collector() as collector:
        serving = threading.Thread(target=collector.serve_forever)
        serving.start()
        try:
            yield collector
        finally:
            collector.go_on.set()
            collector.shutdown()
            serving.join()


def test_a_collector_gets_the_spans_by_otlp(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    with collecting() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        trace_one(Spans(enabled=True))
    ((path, body),) = collector.received
    assert path == "/v1/traces"
    (of_resource,) = ExportTraceServiceRequest.FromString(body).resource_spans
    (of_scope,) = of_resource.scope_spans
    assert of_scope.scope.name == "fastapi"
    assert [span.name for span in of_scope.spans] == ["GET /v2"]


def test_a_collector_that_never_answers_does_not_keep_the_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    monkeypatch.setattr("orchestray.serving.http.tracing._FLUSH_S", 0.05)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", str(10 * PATIENCE_S))
    with collecting() as collector:
        collector.go_on.clear()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        trace_one(Spans(enabled=True))
        assert collector.asked.wait(PATIENCE_S)
        assert not collector.answered.is_set()
