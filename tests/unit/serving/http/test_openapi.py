"""The OpenAPI document accepts every form of a body that is answered."""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import replace
from typing import Any

import httpx
import jsonschema
import pytest

from orchestray.serving.generation.router import make_generate_router
from orchestray.serving.http import HttpSettings, Tokens
from orchestray.serving.http.auth import Token
from orchestray.serving.routing.registry import Registry
from support.http_endpoint import PAIR, ROW_SUMS, endpoint, pair, row_sums

ONE, TWO = [[1, 2, 3], [4, 5, 6]], [[0, 0, 1], [0, 0, 2.5]]
FEATURES = replace(ROW_SUMS, feature_names={"a": 4, "b": 1, "c": 1})
ROWS = [{"c": 6, "a": [1, 2, 3, 4], "b": True}, {"a": [0, 0, 1, 0], "b": [0], "c": 2}]
BOTH = {"left": [1, 2], "right": 3}


def tensor(**more: Any) -> dict[str, Any]:
    return {"name": "inputs", "shape": [2, 2, 3], "datatype": "FP32", "data": [ONE, TWO], **more}


def v2(*tensors: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"inputs": [*tensors], **more}


LEFT, RIGHT = (
    {"name": "left", "shape": [2, 2], "datatype": "INT8", "data": [1, 2, 3, 4]},
    {"name": "right", "shape": [2], "datatype": "UINT16", "data": [3, 4]},
)
V2 = "/v2/models/{name}/infer"
ANSWERED = [
    (ROW_SUMS, "/predict", {"inputs": ONE}),
    (PAIR, "/predict", {"inputs": BOTH}),
    (ROW_SUMS, "/invocations", {"inputs": [ONE, TWO]}),
    (ROW_SUMS, "/invocations", {"instances": [ONE], "params": {}}),
    (ROW_SUMS, "/invocations", {"dataframe_records": [{str(place): place for place in range(6)}]}),
    (PAIR, "/invocations", {"inputs": {"left": [[1, 2], [3, 4]], "right": [1, 2]}}),
    (PAIR, "/invocations", {"instances": [BOTH]}),
    (PAIR, "/invocations", {"dataframe_split": {"columns": ["right", "left"], "data": [[1, [1, 2]]], "index": [7]}}),
    (FEATURES, "/invocations", {"dataframe_records": ROWS}),
    (FEATURES, "/invocations", {"inputs": ROWS}),
    (FEATURES, "/invocations", {"dataframe_split": {"columns": [*ROWS[0]], "data": [[*ROWS[0].values()]]}}),
    (ROW_SUMS, V2, v2(tensor())),
    (ROW_SUMS, V2, v2(tensor(shape=[1, 2, 3], data=[1, 2, 3, 4, 5, 6], datatype="BF16"))),
    (ROW_SUMS, V2, v2(tensor(data=[1.5] * 12, datatype="FP64"), id="7", parameters={"k": 1})),
    (ROW_SUMS, V2, v2(tensor(), outputs=[{"name": "outputs", "parameters": {"classification": 1}}])),
    (PAIR, V2, v2(RIGHT, LEFT)),
]


@pytest.mark.parametrize(("signature", "path", "body"), ANSWERED)
def test_the_schema_accepts_each_form_that_is_answered(signature: Any, path: str, body: Any) -> None:
    async def ask() -> tuple[int, dict[str, Any]]:
        async with endpoint((signature, pair if signature is PAIR else row_sums)) as asked:
            answer = await asked.client.post(path.format(name=signature.name), json=body)
            return answer.status_code, (await asked.client.get("/openapi.json")).json()

    status, document = asyncio.run(ask())
    assert status == 200
    content = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    schema = {**content["schema"], "components": document["components"]}
    jsonschema.validate(body, schema, cls=jsonschema.Draft202012Validator)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/invocations", {"dataframe_records": [{**ROWS[0], "price": 1}]}),
        ("/invocations", {"dataframe_records": [{"a": [1, 2, 3, 4], "b": 5}]}),
        ("/invocations", {"inputs": [[1, 2]]}),
        (V2, v2(tensor(shape=[2, 3]))),
        (V2, v2(tensor(datatype="BYTES"))),
        (V2, v2(tensor(), tensor())),
    ],
)
def test_the_schema_refuses_what_is_refused(path: str, body: Any) -> None:
    async def ask() -> tuple[int, dict[str, Any]]:
        async with endpoint((FEATURES, row_sums)) as asked:
            answer = await asked.client.post(path.format(name=FEATURES.name), json=body)
            return answer.status_code, (await asked.client.get("/openapi.json")).json()

    status, document = asyncio.run(ask())
    assert status == 422
    refuse(path, body, document)


def refuse(path: str, body: Any, document: dict[str, Any]) -> None:
    content = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    schema = {**content["schema"], "components": document["components"]}
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(body, schema, cls=jsonschema.Draft202012Validator)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/invocations", {"inputs": [ONE] * 4}),
        ("/invocations", {"inputs": {str(place): [place] * 4 for place in range(6)}}),
        (V2, v2(tensor(shape=[4, 2, 3], data=[ONE] * 4))),
    ],
)
def test_more_samples_than_the_queue_holds_are_422_on_an_idle_endpoint_and_no_request_of_the_schema(
    path: str, body: Any
) -> None:
    async def ask() -> tuple[httpx.Response, dict[str, Any]]:
        async with endpoint(max_queue=3) as asked:
            answer = await asked.client.post(path.format(name="sums"), json=body)
            return answer, (await asked.client.get("/openapi.json")).json()

    answer, document = asyncio.run(ask())
    assert (answer.status_code, answer.json()["error"]) == (
        422,
        "inputs: wanted 1 to 3 samples in a request, got 4.",
    )
    refuse(path, body, document)


def test_the_document_says_of_each_route_whether_it_needs_a_token() -> None:
    settings = HttpSettings(tokens=Tokens((Token(hashlib.sha256(b"right").hexdigest(), "somebody"),)))

    async def ask() -> tuple[dict[str, Any], dict[tuple[str, str], int]]:
        generates = make_generate_router(Registry())
        async with endpoint(settings=settings, routers=[generates]) as asked:
            headers = {"Authorization": "Bearer right"}
            document = (await asked.client.get("/openapi.json", headers=headers)).json()
            found = {}
            for path, operations in document["paths"].items():
                for method in operations:
                    answer = await asked.client.request(method, path.format(name="sums", version="1"), json={})
                    found[path, method] = answer.status_code
            return document, found

    document, found = asyncio.run(ask())
    assert document["security"] == [{"bearer": []}]
    assert {"/ping", "/predict", "/generate", "/v1/completions"} <= {path for path, _ in found}
    for (path, method), status in found.items():
        operation = document["paths"][path][method]
        assert ("401" in operation["responses"]) == (status == 401), path
        assert operation.get("security", document["security"]) == ([{"bearer": []}] if status == 401 else []), path


@pytest.mark.parametrize("path", ["/invocations", V2])
def test_as_many_samples_as_the_queue_holds_are_answered(path: str) -> None:
    async def ask() -> int:
        async with endpoint(max_queue=3, max_batch_size=1) as asked:
            body = {"inputs": [ONE] * 3} if path == "/invocations" else v2(tensor(shape=[3, 2, 3], data=[ONE] * 3))
            return (await asked.client.post(path.format(name="sums"), json=body)).status_code

    assert asyncio.run(ask()) == 200
