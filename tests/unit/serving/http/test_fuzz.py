"""Requests made from the OpenAPI document, right and wrong ones, and of anything: none is answered with a 500."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import httpx
import hypothesis
import pytest
from hypothesis import strategies as st
from starlette.routing import Route

from orchestray.serving.http import HttpSettings, Tokens
from orchestray.serving.http.auth import Token
from support.generation import small_model
from support.http_endpoint import PAIR, ROW_SUMS, endpoint, listening, pair, row_sums
from support.patience import PATIENCE_S

schemathesis = pytest.importorskip("schemathesis")

SETTINGS: dict[str, Any] = {
    "derandomize": True,
    "database": None,
    "deadline": None,
    "suppress_health_check": list(hypothesis.HealthCheck),
}
QUIET = HttpSettings(access_log=False)
TEXT = small_model(context=32, depth=1)
MINE = "right"
WITH_TOKEN = HttpSettings(access_log=False, tokens=Tokens((Token(hashlib.sha256(MINE.encode()).hexdigest(), "us"),)))


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with listening((ROW_SUMS, row_sums), (PAIR, pair), settings=QUIET, text=TEXT) as url:
        yield url


@pytest.fixture(scope="module")
def schema(url: str) -> Any:
    return schemathesis.openapi.from_url(f"{url}/openapi.json")


def statuses(operation: Any, mode: Any) -> set[int]:
    """Return the statuses of answers to requests to one route, right or wrong ones."""
    seen: set[int] = set()
    # A schema cannot say that a tensor has as many values as its shape: many tensors that it accepts are wrong.
    most = 32 if "/infer" in operation.path else 8

    @hypothesis.settings(max_examples=most, phases=[hypothesis.Phase.generate], **SETTINGS)
    @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
    def ask(case: Any) -> None:
        answer = case.call(timeout=PATIENCE_S)
        seen.add(answer.status_code)
        assert answer.status_code != 500, (answer.text, case.as_curl_command())
        assert answer.headers["x-request-id"]
        if answer.status_code >= 400:
            assert answer.json()["error"]

    with contextlib.suppress(hypothesis.errors.Unsatisfiable):  # nothing can be wrong with a request without parameters
        ask()
    return seen


def test_no_request_made_from_the_schema_is_answered_with_a_500(schema: Any) -> None:
    operations = [result.ok() for result in schema.get_all_operations()]
    assert len(operations) >= 15
    assert "POST /generate" in {operation.label for operation in operations}
    for operation in operations:
        right = statuses(operation, schemathesis.GenerationMode.POSITIVE)
        # A right request may still name one model and send what another takes, or a deadline of no time.
        assert right <= {200, 400, 404, 422, 503, 504}, operation.label
        assert 200 in right, operation.label
        wrong = statuses(operation, schemathesis.GenerationMode.NEGATIVE)
        if operation.path == "/predict":
            assert 422 in wrong


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=12,
)
FIELDS = ("inputs", "instances", "dataframe_split", "dataframe_records", "columns", "data", "outputs", "parameters")
TENSORS = st.fixed_dictionaries(
    {},
    optional={
        "name": st.just("inputs") | JSON,
        "shape": st.just([1, 2, 3]) | JSON,
        "datatype": st.sampled_from(["FP32", "INT8", "BOOL", "FP16"]) | JSON,
        "data": st.lists(st.integers() | st.floats(), min_size=6, max_size=6) | JSON,
        "parameters": st.fixed_dictionaries({"binary_data_size": st.integers(-1, 99) | JSON}) | JSON,
    },
)
REQUESTS = st.dictionaries(
    st.sampled_from(FIELDS), JSON | st.lists(TENSORS, max_size=2) | st.dictionaries(st.sampled_from(FIELDS), JSON)
)
BODIES = st.binary(max_size=40) | st.builds(lambda value: json.dumps(value).encode(), REQUESTS | JSON)


@pytest.mark.parametrize(
    "path", ["/predict", "/invocations", "/v2/models/sums/infer", "/v2/models/pair/infer", "/generate"]
)
def test_no_body_whatsoever_is_answered_with_a_500(path: str, url: str) -> None:
    headers = [{}, {"Content-Type": "text/csv"}, {"Inference-Header-Content-Length": "20"}]

    with httpx.Client(base_url=url, timeout=PATIENCE_S) as client:

        @hypothesis.settings(max_examples=90, **SETTINGS)
        @hypothesis.given(BODIES, st.sampled_from(headers))
        def ask(body: bytes, more: dict[str, str]) -> None:
            answer = client.post(path, content=body, headers=more)
            assert answer.status_code in {200, 422}, (body, more, answer.text)

        ask()


# -- every route, those that no schema names too, of an endpoint that asks for a token ---------------------------------

OPEN = {"/", "/docs", "/favicon.ico", "/assets/{name}", "/ping"}
OPEN |= {"/v2/health/live", "/v2/health/ready", "/v2/models/{name}/ready", "/v2/models/{name}/versions/{version}/ready"}
"""Health, and the page before it has asked for the token."""
NAMED = {"name": ["sums", "pair"], "version": ["1", "2"]}
ASSETS = {"name": ["index.html", "icon.svg", "swagger-ui.css"]}
RIGHT = {"authorization": f"Bearer {MINE}"}
WRONG = st.just({}) | st.binary(max_size=30).map(lambda given: {"authorization": given.hex()})
WRONG |= st.sampled_from([{"authorization": f"Bearer {MINE}x"}, {"authorization": f"Basic {MINE}"}])
ANY = st.characters(exclude_characters="/", exclude_categories=["Cs"])
METHODS = ("GET", "POST", "HEAD", "PUT", "DELETE", "OPTIONS")


@pytest.fixture(scope="module")
def routes() -> dict[str, set[str]]:
    """Return the methods of each route that the application has."""

    async def asking() -> dict[str, set[str]]:
        async with endpoint((ROW_SUMS, row_sums), (PAIR, pair), settings=WITH_TOKEN, text=TEXT) as asked:
            found: dict[str, set[str]] = {}
            for path, operations in asked.app.openapi()["paths"].items():  # a router's own are there alone
                found[path] = {method.upper() for method in operations}
            for route in asked.app.routes:
                if isinstance(route, Route):
                    found.setdefault(route.path, set()).update(route.methods or ())
            return found

    return asyncio.run(asking())


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with (
        listening((ROW_SUMS, row_sums), (PAIR, pair), settings=WITH_TOKEN, text=TEXT) as url,
        httpx.Client(base_url=url, timeout=PATIENCE_S) as client,
    ):
        yield client


def places(route: str) -> st.SearchStrategy[str]:
    """Return addresses of a route: those that exist, and any others."""
    address = st.just(route)
    for name, values in (ASSETS if route.startswith("/assets/") else NAMED).items():
        if "{" + name + "}" in route:
            given = st.sampled_from(values) | st.text(ANY, min_size=1, max_size=8)
            address = st.builds(lambda path, value, name=name: path.replace("{" + name + "}", value), address, given)
    return address.map(quote)


def asked_with(client: httpx.Client, method: str, path: str, body: bytes, headers: dict[str, str]) -> int:
    with client.stream(method, path, content=body, headers=headers) as answer:
        assert answer.status_code != 500, (method, path, body, headers, answer.read())
        assert answer.headers["x-request-id"]
        if answer.headers.get("content-type", "").startswith("text/event-stream") and method != "HEAD":
            assert next(answer.iter_bytes())  # it goes on for ever
        elif answer.status_code >= 400 and method != "HEAD":
            answer.read()
            assert answer.json()["error"]
    return answer.status_code


def asked_anyhow(client: httpx.Client, route: str, methods: set[str]) -> set[int]:
    """Ask a route with the token, and with none or another; the statuses of its own method with the token."""
    own, seen = min(methods - {"HEAD"}), set()

    @hypothesis.settings(max_examples=12, phases=[hypothesis.Phase.generate], **SETTINGS)
    @hypothesis.given(places(route), st.sampled_from(METHODS), BODIES, WRONG)
    def ask(path: str, method: str, body: bytes, wrong: dict[str, str]) -> None:
        status = asked_with(client, method, path, body, RIGHT)
        assert method in methods or status in {404, 405}, (method, path, status)
        seen.add(asked_with(client, own, path, body, RIGHT))
        unknown = asked_with(client, method, path, body, wrong)
        assert unknown == (status if route in OPEN else 401), (method, path, wrong)

    ask()
    return seen


def test_every_route_answers_its_token_alone_and_none_answers_with_a_500(
    client: httpx.Client, routes: dict[str, set[str]]
) -> None:
    assert {"/", "/docs", "/live", "/assets/{name}", "/models", "/metrics", "/openapi.json", "/generate"} <= set(routes)
    assert set(routes) >= OPEN
    for route, methods in routes.items():
        seen = asked_anyhow(client, route, methods)
        is_openai = route.startswith("/v1/") and not route.endswith(":predict")  # whose clients expect a 400
        wrong = 400 if is_openai else 422
        assert seen & {200, wrong}, (route, seen)
        assert seen <= {200, 404, wrong}, (route, seen)
