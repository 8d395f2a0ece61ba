"""The HTTP API of an endpoint, from its OpenAPI document; and its Prometheus metrics."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from builder.reference.markdown import page, sentence, table
from orchestray.serving.generation.router import make_generate_router
from orchestray.serving.http import Monitor, make_app
from orchestray.serving.routing.registry import Registry

Json = dict[str, Any]


def http_page() -> str:
    """Return the page of all routes."""
    registry = Registry()
    document = make_app(registry, routers=[make_generate_router(registry)]).openapi()
    lines: list[str] = []
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            lines += _operation(f"{method.upper()} {path}", operation)
    lines += [
        "## Errors",
        "",
        "Every error is JSON: `error`, `request_id`, and where it applies `field`, `wanted`, `got`.",
        "Under `/v1` `error` is an object, as OpenAI's clients read it, and wrong input is a 400.",
        "",
    ]
    statuses = {
        status: answer["description"]
        for operations in document["paths"].values()
        for operation in operations.values()
        for status, answer in operation["responses"].items()
        if not status.startswith("2")
    }
    lines += table(["status", "meaning"], [[status, text] for status, text in sorted(statuses.items())])
    introduction = (
        "Every route of `orchestray serve`. A running endpoint shows the same at `/docs`, with the shapes of its "
        "models, and as OpenAPI at `/openapi.json`."
    )
    return page("HTTP API", introduction, lines)


def _operation(title: str, operation: Json) -> Iterator[str]:
    yield from (f"## `{title}`", "")
    yield from (sentence(operation.get("summary", "")), "")
    if operation.get("description"):
        yield from (operation["description"], "")
    rows = [
        [f"`{each['name']}`", each["in"], "yes" if each.get("required") else "", each.get("description", "")]
        for each in operation.get("parameters", ())
    ]
    if rows:
        yield from table(["parameter", "in", "required", "meaning"], rows)
    body = operation.get("requestBody", {}).get("content", {})
    if body:
        yield from (f"Body: {', '.join(f'`{each}`' for each in body)}.", "")
    answers = {
        status: ", ".join(f"`{each}`" for each in answer.get("content", {}))
        for status, answer in operation["responses"].items()
    }
    yield from (f"Answers: {', '.join(answers)}.", "")


def endpoint_metrics() -> list[str]:
    """Return the table of the metrics of `/metrics`."""
    monitor = Monitor()
    monitor.watch(Registry())
    found = [
        (metric.name + ("_total" if metric.type == "counter" else ""), metric.type, metric.documentation)
        for metric in monitor.registry.collect()
    ]
    return table(["metric", "type", "meaning"], [[f"`{name}`", kind, text] for name, kind, text in sorted(found)])
