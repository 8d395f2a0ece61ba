"""Requests that are sent where the user does not name any: found in what an endpoint says of itself."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from fastapi import FastAPI
from pydantic import BaseModel, Field

from orchestray.loadtest.discover import find_target, probe
from orchestray.loadtest.example import openapi_body, posts, v2_body
from orchestray.loadtest.plan import Target, parse_url
from orchestray.loadtest.results import EndpointError
from orchestray.platform.errors import ConfigError
from support.patience import PATIENCE_S

Pages = dict[str, tuple[int, Any]]


@contextmanager
def server(pages: Pages) -> Iterator[str]:
    """Serve GET and POST of these paths with status and JSON, and 404 for others; yield the URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            status, value = pages.get(f"{self.command} {self.path}", (404, {"detail": "nothing here"}))
            if value == "whose token?":
                status = 200 if self.headers.get("Authorization") == "Bearer mine" else 401
            body = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET  # noqa: N815 - as http.server calls it

        def log_message(self, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as made:
        thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{made.server_address[1]}"
        finally:
            made.shutdown()
            thread.join()


class Sample(BaseModel):
    inputs: list[list[float]] = Field(min_length=2, max_length=2)
    name: str = Field(min_length=6)
    kind: int = Field(gt=3)
    note: str | None = None


class Told(BaseModel):
    inputs: list[float] = Field(examples=[[1.0, 2.0]])


def application() -> FastAPI:
    app = FastAPI()

    @app.post("/predict")
    def predict(sample: Told) -> dict[str, Any]:
        return {}

    @app.post("/made/{model}")
    def made(model: str, sample: Sample) -> dict[str, Any]:
        return {}

    @app.get("/none")
    def none() -> dict[str, Any]:
        return {}

    return app


def test_an_example_in_the_document_is_sent_as_it_is() -> None:
    assert openapi_body(application().openapi(), "/predict") == {"inputs": [1.0, 2.0]}


def test_without_an_example_something_the_schema_allows_is_made() -> None:
    document = application().openapi()
    body = openapi_body(document, "/made/mine")
    schema = {"$ref": "#/components/schemas/Sample", "components": document["components"]}
    jsonschema.validate(body, schema)
    assert Sample.model_validate(body).inputs == [[0.0], [0.0]]


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"a": {"type": "integer", "minimum": 5}}, "required": ["a"]},
        {"type": "array", "prefixItems": [{"type": "string"}, {"const": 3}]},
        {"oneOf": [{"type": "boolean"}, {"type": "string"}]},
        {"allOf": [{"properties": {"a": {"type": "null"}}}, {"properties": {"b": {"enum": ["x"]}}, "required": ["b"]}]},
        {"type": ["number", "null"], "maximum": -2},
        {"type": "array", "minItems": 3, "items": {"type": "array", "minItems": 2, "items": {"type": "number"}}},
    ],
)
def test_what_is_made_fits_its_schema(schema: dict[str, Any]) -> None:
    content = {"content": {"application/json": {"schema": schema}}}
    document = {"paths": {"/a": {"post": {"requestBody": content}}}}
    jsonschema.validate(openapi_body(document, "/a"), schema)


def test_a_schema_that_holds_itself_ends() -> None:
    schemas = {"Tree": {"type": "object", "properties": {"left": {"$ref": "#/components/schemas/Tree"}}}}
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/Tree"}}}
    document = {"paths": {"/a": {"post": {"requestBody": {"content": content}}}}, "components": {"schemas": schemas}}
    assert "left" in openapi_body(document, "/a")


def test_tensors_are_made_as_the_metadata_describes_them() -> None:
    tensors = [("x", [-1, 3], "FP32"), ("n", [2], "INT64"), ("t", [1], "BYTES"), ("b", [-1], "BOOL")]
    inputs = [{"name": name, "shape": shape, "datatype": datatype} for name, shape, datatype in tensors]
    found = v2_body({"name": "m", "inputs": inputs, "outputs": []})["inputs"]
    assert [one["shape"] for one in found] == [[1, 3], [2], [1], [1]]
    assert [one["data"] for one in found] == [[0.0] * 3, [0, 0], ["text"], [False]]


def test_an_endpoint_of_unknown_paths_is_asked_for_them() -> None:
    with server({"GET /openapi.json": (200, application().openapi())}) as url:
        target, source = find_target(url)
        assert (target.path, source) == ("/predict", "the example in /openapi.json")
        assert json.loads(target.bodies[0]) == {"inputs": [1.0, 2.0]}
        assert find_target(f"{url}/made/mine")[0].path == "/made/mine"
        assert find_target(f"{url}/none", method="get")[0].bodies == ()
        with pytest.raises(EndpointError, match=r"has no JSON body for POST /none\. It has POST /predict"):
            find_target(f"{url}/none")


def test_a_v2_model_is_asked_for_its_metadata() -> None:
    tensor = {"name": "inputs", "shape": [-1, 2], "datatype": "FP32"}
    metadata = {"name": "digits", "inputs": [tensor], "outputs": []}
    with server({"GET /v2/models/digits": (200, metadata)}) as url:
        for path in ("/v2/models/digits", "/v2/models/digits/", "/v2/models/digits/infer"):
            target, _ = find_target(url + path)
            assert target.path == "/v2/models/digits/infer"
            assert json.loads(target.bodies[0])["inputs"][0]["data"] == [0.0, 0.0]
        with pytest.raises(EndpointError, match="gives no metadata of a model"):
            find_target(f"{url}/v2/models/other")


def test_several_paths_and_none_that_is_usual_are_listed() -> None:
    content = {"content": {"application/json": {"schema": {}}}}
    paths = {path: {"post": {"requestBody": content}} for path in ("/a", "/b")}
    assert posts({"paths": paths}) == ["/a", "/b"]
    with (
        server({"GET /openapi.json": (200, {"paths": paths})}) as url,
        pytest.raises(EndpointError, match=r"Which path .* has POST /a, POST /b; write it in the URL"),
    ):
        find_target(url)


def test_files_are_sent_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"\x00\x01")
    (tmp_path / "b").write_bytes(b"{}")
    target, _ = find_target("http://127.0.0.1:9/x", body_files=[tmp_path / "a", tmp_path / "b"])
    assert target.bodies == (b"\x00\x01", b"{}")
    with pytest.raises(ConfigError, match="GET is sent without one"):
        find_target("http://127.0.0.1:9/x", body_files=[tmp_path / "a"], method="GET")
    with pytest.raises(ConfigError, match=r"must be one of GET, POST, .* got 'HEAD'"):
        find_target("http://127.0.0.1:9/x", method="HEAD")
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        find_target("http://127.0.0.1:9/x", body_files=[tmp_path / "c"])


def test_why_there_is_no_answer_is_said_in_sentences() -> None:
    token = "whose token?"  # noqa: S105 - a page of the server above
    pages: Pages = {
        "GET /openapi.json": (200, token),
        "POST /wrong": (422, {"error": "inputs: wanted [8, 8]"}),
        "POST /broken": (500, {}),
    }
    with server(pages) as url:
        with pytest.raises(EndpointError, match=r"answered 401 to GET /openapi\.json: it wants a token\. Give"):
            find_target(url)
        with pytest.raises(EndpointError, match=r"has no /openapi\.json"):  # a string is not a document
            find_target(url, headers=[("Authorization", "Bearer mine")])
        target = parse_url(f"{url}/wrong")
        with pytest.raises(EndpointError, match=r"answered 422 .*inputs: wanted \[8, 8\].* --body FILE"):
            probe(target, timeout_s=PATIENCE_S)
        with pytest.raises(EndpointError, match="answered 500"):
            probe(parse_url(f"{url}/broken"), timeout_s=PATIENCE_S)
        with pytest.raises(EndpointError, match="does not speak TLS"):
            probe(parse_url(f"{url}/x".replace("http", "https")), timeout_s=PATIENCE_S)
    with pytest.raises(EndpointError, match="Nothing listens on"):
        probe(target, timeout_s=PATIENCE_S)
    with pytest.raises(EndpointError, match="cannot be reached"):
        probe(Target("no.such.host.invalid", 80, "/"), timeout_s=PATIENCE_S)
