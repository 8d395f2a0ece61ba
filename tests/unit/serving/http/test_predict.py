"""`POST /predict`: right answers, and a status and a sentence for everything that is wrong."""

from __future__ import annotations

import asyncio
import gzip
import json
import time
import zlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
import pytest
from starlette.responses import PlainTextResponse

from orchestray.serving.http import HttpProblem, HttpSettings
from orchestray.serving.http.body import check_length, inflated
from orchestray.serving.models.errors import ModelError
from orchestray.serving.models.signature import ANY, Output, Sample, Signature, TensorSpec
from orchestray.serving.routing.endpoint import Share
from support.http_endpoint import PAIR, ROW_SUMS, Held, endpoint, pair, row_sums, version_of

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

RIGHT = [[1, 2, 3], [4, 5, 6]]


def post(content: Any, path: str = "/predict", settings: HttpSettings | None = None, **more: Any) -> httpx.Response:
    async def ask() -> httpx.Response:
        async with endpoint((ROW_SUMS, row_sums), (PAIR, pair), settings=settings) as asked:
            return await asked.client.post(path, content=content, **more)

    return asyncio.run(ask())


def test_integers_are_taken_for_floats() -> None:
    answer = post('{"inputs": [[1, 2, 3], [4, 5, 6]]}')
    assert (answer.status_code, answer.json()) == (200, {"outputs": [6.0, 15.0]})
    assert answer.headers["content-type"] == "application/json"


@pytest.mark.parametrize("path", ["/predict", "/invocations"])
def test_a_model_of_any_values_gets_the_whole_numbers_that_were_sent_or_none(path: str) -> None:
    anything = (TensorSpec("inputs", ANY, ()),)
    same = Signature("same", "1", anything, anything, None)

    async def echo(samples: Sequence[Sample]) -> list[Output | Exception]:
        return [{"outputs": sample["inputs"]} for sample in samples]

    async def ask(text: str) -> httpx.Response:
        async with endpoint((same, echo)) as asked:
            sample = f"[{text}]" if path == "/invocations" else text
            return await asked.client.post(path, content=f'{{"inputs": {sample}}}')

    for text in ("18446744073709551615", "1e+22"):
        assert text in asyncio.run(ask(text)).text
    refused = asyncio.run(ask("18446744073709551616"))
    assert refused.status_code == 422
    assert "at most 64 bits" in refused.json()["error"]


def test_an_answer_names_the_version_that_gave_it() -> None:
    assert post('{"inputs": [[1, 2, 3], [4, 5, 6]]}').headers["x-model-version"] == "1"


def test_several_inputs_and_outputs_go_by_name() -> None:
    answer = post('{"inputs": {"left": [1.5, 2], "right": 100}}', "/predict?model=pair")
    assert answer.json() == {"outputs": {"product": [150.0, 200.0], "is_large": True}}


def test_a_header_names_the_model_as_the_query_does() -> None:
    answer = post('{"inputs": {"left": [1, 2], "right": 3}}', headers={"X-Model": "pair", "X-Model-Version": "1"})
    assert answer.json()["outputs"]["product"] == [3.0, 6.0]


def test_the_example_in_the_schema_works_when_it_is_pasted() -> None:
    async def ask() -> None:
        async with endpoint((ROW_SUMS, row_sums), (PAIR, pair)) as asked:
            document = (await asked.client.get("/openapi.json")).json()
            for path in ("/predict", "/invocations", "/v2/models/{name}/infer"):
                content = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
                for name, example in content["examples"].items():
                    model = {} if name == "one" else {"model": name}
                    answer = await asked.client.post(path.format(name=name), json=example["value"], params=model)
                    assert answer.status_code == 200, (path, name, answer.text)

    asyncio.run(ask())


def test_the_schema_has_the_shapes_of_the_models() -> None:
    async def ask() -> dict[str, Any]:
        async with endpoint((PAIR, pair)) as asked:
            assert "swagger" in (await asked.client.get("/docs")).text
            return dict((await asked.client.get("/openapi.json")).json())

    schemas = asyncio.run(ask())["components"]["schemas"]
    left, right = (schemas["pair.input"]["properties"][name] for name in ("left", "right"))
    assert (left["minItems"], left["maxItems"], left["items"]["type"]) == (2, 2, "number")
    assert (right["type"], right["maximum"]) == ("integer", 2**63 - 1)
    assert schemas["pair.output"]["required"] == ["product", "is_large"]


WRONG = {
    "not JSON": (b"{inputs: 1}", ["not JSON", "line 1 column 2"]),
    "empty": (b"", ["not JSON"]),
    "not UTF-8": (b'{"inputs": "\xff"}', ["not JSON"]),
    "no object": (b"[1, 2]", ["must be a JSON object", '{"inputs": <one sample>}']),
    "wrong field": (b'{"input": [[1, 2, 3], [4, 5, 6]]}', ["input: wanted", "the one field inputs"]),
    "no inputs": (b"{}", ["inputs: wanted float32 of shape [2, 3], got nothing"]),
    "one row": (b'{"inputs": [[1, 2, 3]]}', ["inputs: wanted float32 of shape [2, 3], got a list of 1"]),
    "a batch": (
        b'{"inputs": [[[1, 2, 3], [4, 5, 6]]]}',
        ["inputs: wanted float32 of shape [2, 3], got a list of 1 of those; a request has one sample"],
    ),
    "too many rows": (b'{"inputs": [[1, 2, 3], [4, 5, 6], [7, 8, 9]]}', ["got a list of 3."]),
    "short row": (b'{"inputs": [[1, 2, 3], [4, 5]]}', ["inputs[1]: wanted a list of 3", "got a list of 2"]),
    "flat": (b'{"inputs": [1, 2]}', ["inputs[0]: wanted a list of 3", "got a number"]),
    "text": (b'{"inputs": [[1, 2, "3"], [4, 5, 6]]}', ["inputs[0][2]: wanted a number", "got text"]),
    "truth value": (b'{"inputs": [[1, 2, true], [4, 5, 6]]}', ["inputs[0][2]", "got true"]),
    "null": (b'{"inputs": null}', ["inputs: wanted float32 of shape [2, 3], got null"]),
    "NaN": (b'{"inputs": [[1, 2, NaN], [4, 5, 6]]}', ["not finite"]),
    "infinity": (b'{"inputs": [[1, 2, -Infinity], [4, 5, 6]]}', ["not finite"]),
    "1e999": (b'{"inputs": [[1, 2, 1e999], [4, 5, 6]]}', ["not finite"]),
    "too large for float32": (b'{"inputs": [[1, 2, 1e300], [4, 5, 6]]}', ["inputs[0][2]: wanted a finite number"]),
    "too deep": (b"[" * 100 + b"]" * 100, ["deeper than 64"]),
    "deep and endless": (b'{"inputs": ' + b"[" * 100_000, ["deeper than 64"]),
}


@pytest.mark.parametrize(("body", "parts"), WRONG.values(), ids=WRONG)
def test_wrong_input_is_422_and_says_what_was_wanted_and_got(body: bytes, parts: list[str]) -> None:
    answer = post(body)
    assert answer.status_code == 422
    told = answer.json()
    assert all(part in told["error"] for part in parts), told
    assert told["request_id"] == answer.headers["x-request-id"]


def test_brackets_in_texts_count_for_no_depth() -> None:
    body = '{"inputs": "' + "[{" * 200 + '\\"' + "[" * 200 + '"}'
    assert "got text" in post(body).json()["error"]


@pytest.mark.parametrize(
    ("path", "parts"),
    [
        ("/predict?model=sum", ["no model sum", "did you mean sums?"]),
        ("/predict?version=7", ["no version 7 of the model sums", "there is 1"]),
        ("/nowhere", ["nothing at this address", "GET /docs"]),
    ],
)
def test_an_unknown_model_version_or_address_is_404(path: str, parts: list[str]) -> None:
    answer = post('{"inputs": [[1, 2, 3], [4, 5, 6]]}', path)
    assert answer.status_code == 404
    assert all(part in answer.json()["error"] for part in parts)


@pytest.mark.parametrize(
    ("header", "value", "wanted"),
    [
        ("X-Request-Timeout-Ms", "soon", "milliseconds"),
        ("X-Request-Timeout-Ms", "-1", "milliseconds"),
        ("X-Request-Timeout-Ms", "nan", "milliseconds"),
        ("X-Request-Timeout-Ms", "inf", "milliseconds"),
        ("X-Request-Priority", "1.5", "a whole number"),
        ("X-Request-Priority", "1_0", "a whole number"),
        ("X-Request-Priority", "1000", "from -100 to 100"),
    ],
)
def test_a_wrong_header_is_422_and_named(header: str, value: str, wanted: str) -> None:
    answer = post('{"inputs": [[1, 2, 3], [4, 5, 6]]}', headers={header: value})
    assert answer.status_code == 422
    assert answer.json()["field"] == header
    assert wanted in answer.json()["wanted"]


def test_a_wrong_method_is_405_with_those_that_are_right() -> None:
    async def ask() -> httpx.Response:
        async with endpoint() as asked:
            return await asked.client.get("/predict")

    answer = asyncio.run(ask())
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    assert "takes the method POST, not GET" in answer.json()["error"]


def bare(body: bytes) -> bytes:
    """Return a body compressed without the header of zlib, as some clients send it."""
    compressor = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return compressor.compress(body) + compressor.flush()


@pytest.mark.parametrize(
    ("coding", "compress"), [("gzip", gzip.compress), ("deflate", zlib.compress), ("deflate", bare)]
)
def test_a_compressed_body_is_answered_up_to_the_limit_of_what_it_holds(
    coding: str, compress: Callable[[bytes], bytes]
) -> None:
    headers = {"Content-Encoding": coding, "Content-Type": "application/json"}
    body = json.dumps({"inputs": RIGHT}).encode()
    assert post(compress(body), headers=headers).json() == post(body).json()
    assert post(compress(body)[:-9], headers=headers).status_code == 422
    assert post(b"\x1f\x8b", headers=headers).status_code == 422
    assert post(b"plain", headers=headers).status_code == 422
    bomb = compress(b" " * 2**20)
    assert len(bomb) < 2**12
    assert post(bomb, settings=HttpSettings(max_body_bytes=2**16), headers=headers).status_code == 413


def test_a_compressed_body_is_refused_before_more_than_the_limit_is_in_memory() -> None:
    async def receive() -> Any:
        return {"type": "http.request", "body": gzip.compress(b" " * 2**20)}

    with pytest.raises(HttpProblem, match="larger than 65536 bytes"):
        asyncio.run(inflated(receive, 2**16, b"gzip")())  # the body that it would return is in memory


@pytest.mark.parametrize("num_bytes", [1, 7, 1000])
def test_a_compressed_body_of_several_members_is_read_to_its_end(num_bytes: int) -> None:
    headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
    body = json.dumps({"inputs": RIGHT}).encode()
    members = b"".join(gzip.compress(part) for part in (body[:9], b"", body[9:], b" " * 5000))

    async def pieces(data: bytes) -> Any:
        for begin in range(0, len(data), num_bytes):
            yield data[begin : begin + num_bytes]

    assert post(pieces(members), headers=headers).json() == post(body).json()
    for wrong in (members + gzip.compress(b"}"), members + b"rest", members + b"\0" * 9, members[:-1]):
        assert post(pieces(wrong), headers=headers).status_code == 422
    small = HttpSettings(max_body_bytes=4000)
    assert post(pieces(members), settings=small, headers=headers).status_code == 413
    assert post(pieces(gzip.compress(b"") * 10_000), settings=small, headers=headers).status_code == 413


def test_a_body_of_a_great_many_members_is_read_in_linear_time() -> None:
    empty = gzip.compress(b"")
    content = empty * 200_000 + gzip.compress(json.dumps({"inputs": RIGHT}).encode())
    began_s = time.process_time()
    assert post(content, headers={"Content-Encoding": "gzip"}).status_code == 200
    assert time.process_time() - began_s < 10.0  # a copy of the rest for each member would be 400 GB


def test_a_body_that_is_compressed_in_another_way_is_415() -> None:
    assert post(b"\x1f\x8b", headers={"Content-Encoding": "br"}).status_code == 415


def test_a_body_is_too_large_by_what_it_says_or_by_what_comes() -> None:
    settings = HttpSettings(max_body_bytes=100)

    async def pieces() -> Any:
        for _ in range(11):
            yield b" " * 10
        raise AssertionError("read on, though it was too large")

    said = post(b"{" * 101, settings=settings)
    came = post(pieces(), settings=settings)
    for answer in (said, came):
        assert answer.status_code == 413
        assert "larger than 100 bytes" in answer.json()["error"]
        assert answer.headers["connection"] == "close"


@pytest.mark.parametrize("path", ["/predict", "/invocations", "/v2/models/sums/infer"])
def test_a_body_is_too_large_for_every_route_that_predicts(path: str) -> None:
    answer = post(b"{" * 101, path=path, settings=HttpSettings(max_body_bytes=100))
    assert answer.status_code == 413
    assert "larger than 100 bytes" in answer.json()["error"]


def test_what_is_not_finite_in_an_answer_is_null() -> None:
    async def logarithms(samples: Sequence[Sample]) -> list[Output | Exception]:
        with np.errstate(divide="ignore"):
            return [{"inputs": np.log(sample["inputs"])} for sample in samples]

    vector = (TensorSpec("inputs", "float32", (2,)),)
    signature = Signature("log", "1", vector, vector, [1, 1])

    async def ask() -> httpx.Response:
        async with endpoint((signature, logarithms)) as asked:
            return await asked.predict([0, 1])

    assert asyncio.run(ask()).json() == {"outputs": [None, 0.0]}


def test_a_request_on_which_the_model_raises_fails_alone() -> None:
    async def run(samples: Sequence[Sample]) -> list[Output | Exception]:
        assert len(samples) == 3  # one batch
        answers: list[Output | Exception] = list(await row_sums(samples))
        for index, sample in enumerate(samples):
            if sample["inputs"][0, 0] < 0:
                answers[index] = ModelError("secret of the model")
        return answers

    async def ask() -> list[httpx.Response]:
        async with endpoint((ROW_SUMS, run)) as asked:
            bad = [[-1, 2, 3], [4, 5, 6]]
            return list(await asyncio.gather(*(asked.predict(each) for each in (RIGHT, bad, RIGHT))))

    first, failed, last = asyncio.run(ask())
    assert first.json() == last.json() == {"outputs": [6.0, 15.0]}
    assert failed.status_code == 500
    assert failed.json()["request_id"] == failed.headers["x-request-id"]
    assert "secret" not in failed.text
    assert "Traceback" not in failed.text


def test_a_wrong_request_never_fails_the_others_of_its_moment() -> None:
    async def ask() -> list[httpx.Response]:
        async with endpoint() as asked:
            wrong = asked.client.post("/predict", content=b"{")
            return list(await asyncio.gather(asked.predict(RIGHT), wrong, asked.predict(RIGHT)))

    assert [answer.status_code for answer in asyncio.run(ask())] == [200, 422, 200]


def test_a_version_that_is_replaced_meanwhile_costs_no_request() -> None:
    async def ask() -> tuple[httpx.Response, httpx.Response]:
        held = Held()
        async with endpoint((ROW_SUMS, held), max_batch_size=1) as asked:
            running = asyncio.ensure_future(asked.predict(RIGHT))
            await held.started.wait()
            waiting = asyncio.ensure_future(asked.predict(RIGHT))
            for _ in range(50):
                await asyncio.sleep(0)
            assert asked.batcher.stats.num_queued == 1
            old = asked.registry.update({"sums": [Share(version_of(ROW_SUMS, row_sums))]})
            await asyncio.gather(*(version.close(drain=False) for version in old))
            return await running, await waiting

    for answer in asyncio.run(ask()):
        assert (answer.status_code, answer.json()) == (200, {"outputs": [6.0, 15.0]})


def test_a_length_of_more_digits_than_python_reads_is_413() -> None:
    with pytest.raises(HttpProblem) as raised:
        check_length(b"9" * 5000, 100)
    assert raised.value.status == 413


class NobodyMay:
    """A layer that a user adds: it lets nothing through."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await PlainTextResponse("not for you", status_code=403)(scope, receive, send)


def test_a_layer_added_to_the_application_is_for_predict_too() -> None:
    async def ask(*layers: Any) -> int:
        async with endpoint() as asked:
            for layer in layers:
                asked.app.add_middleware(layer)
            return (await asked.predict(ROW_SUMS.example)).status_code

    assert [asyncio.run(ask()), asyncio.run(ask(NobodyMay))] == [200, 403]


@pytest.mark.parametrize("path", ["/v1/models/sums:predict", "/v1/models/sums/versions/1:predict"])
def test_instances_are_answered_in_the_forms_of_kserve_and_refused_in_the_endpoints_own(path: str) -> None:
    answer = post(json.dumps({"instances": [RIGHT, RIGHT]}), path)
    assert (answer.status_code, answer.json()) == (200, {"predictions": [[6.0, 15.0]] * 2})
    named = post(json.dumps({"signature_name": "serving_default", "instances": [RIGHT, RIGHT]}), path)
    assert named.json() == answer.json()
    refused = post(json.dumps({"signature_name": "other", "instances": [RIGHT]}), path)
    assert (refused.status_code, refused.json()["field"]) == (422, "signature_name")
    refused = post(json.dumps({"instances": [RIGHT], "inputs": [RIGHT]}), path)
    assert (refused.status_code, refused.json()["field"]) == (422, "the body")
    unknown = post(json.dumps({"instances": [RIGHT]}), path.replace("sums", "nothing"))
    assert unknown.status_code == 404
    assert "nothing" in unknown.json()["error"]
