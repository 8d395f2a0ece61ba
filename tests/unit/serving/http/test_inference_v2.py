"""The Open Inference Protocol v2, with a foreign client and by hand."""

from __future__ import annotations

import asyncio
import json
import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import httpx
import ml_dtypes
import numpy as np
import pytest
import tritonclient.http as triton

from orchestray.serving.http.problems import HttpProblem
from orchestray.serving.http.tensors import read_tensor
from orchestray.serving.models.signature import Output, Sample
from support.http_endpoint import PAIR, ROW_SUMS, endpoint, listening, pair, row_sums


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    named = replace(ROW_SUMS, name="named", class_names=("cat", "dog"))
    with listening((ROW_SUMS, row_sums), (PAIR, pair), (named, row_sums)) as url:
        client = triton.InferenceServerClient(url.removeprefix("http://"))
        yield client
        client.close()


def tensor(name: str, array: np.ndarray[Any, Any], *, binary: bool) -> Any:
    from tritonclient.utils import np_to_triton_dtype

    made = triton.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
    made.set_data_from_numpy(array, binary_data=binary)
    return made


@pytest.mark.parametrize("binary_output", [True, False])
@pytest.mark.parametrize(
    ("dtype", "binary_input"),
    [
        *product(["float32", "float64", "int32", "uint8"], [True, False]),
        ("float16", True),  # which that client sends as bytes alone
    ],
)
def test_a_foreign_client_gets_every_sample_of_its_batch_answered(
    client: Any, binary_input: bool, binary_output: bool, dtype: str
) -> None:
    inputs = np.arange(5 * 2 * 3).reshape(5, 2, 3).astype(dtype)
    wanted = triton.InferRequestedOutput("outputs", binary_data=binary_output)
    answer = client.infer("sums", [tensor("inputs", inputs, binary=binary_input)], outputs=[wanted], request_id="7")
    np.testing.assert_array_equal(answer.as_numpy("outputs"), inputs.sum(axis=2).astype("float32"))
    assert answer.get_response()["id"] == "7"
    assert answer.get_response()["model_version"] == "1"


@pytest.mark.parametrize("binary", [True, False])
def test_a_foreign_client_uses_several_inputs_and_outputs(client: Any, binary: bool) -> None:
    left, right = np.array([[1, 2], [30, 40]], dtype="float32"), np.array([3, 4], dtype="int64")
    inputs = [tensor("right", right, binary=binary), tensor("left", left, binary=not binary)]
    answer = client.infer("pair", inputs, model_version="1")
    np.testing.assert_array_equal(answer.as_numpy("product"), left * right[:, None])
    np.testing.assert_array_equal(answer.as_numpy("is_large"), [False, True])


def test_a_foreign_client_sends_bfloat16(client: Any) -> None:
    inputs = np.array([[[1, 2, 3], [0.5, -4, 256]]], dtype=ml_dtypes.bfloat16)  # all of which it holds exactly
    made = triton.InferInput("inputs", [1, 2, 3], "BF16")
    made.set_data_from_numpy(inputs)
    np.testing.assert_array_equal(client.infer("sums", [made]).as_numpy("outputs"), [[6, 252.5]])
    assert post(json.dumps(with_input(datatype="BF16")).encode()).json()["outputs"][0]["data"] == [6.0, 15.0]


@pytest.mark.parametrize("binary", [True, False])
def test_a_foreign_client_gets_the_likeliest_classes_as_texts(client: Any, binary: bool) -> None:
    inputs = np.array([[[1, 0, 0], [0, 0, 2]], [[3, 0, 0], [0, -1, 0]]], dtype="float32")
    for model, count, texts in [
        ("named", 1, [[b"2.000000:1:dog"], [b"3.000000:0:cat"]]),
        ("sums", 9, [[b"2.000000:1", b"1.000000:0"], [b"3.000000:0", b"-1.000000:1"]]),
    ]:
        wanted = triton.InferRequestedOutput("outputs", binary_data=binary, class_count=count)
        answer = client.infer(model, [tensor("inputs", inputs, binary=True)], outputs=[wanted])
        assert [
            [str(each).encode() if isinstance(each, str) else each for each in row]
            for row in answer.as_numpy("outputs").tolist()
        ] == texts


def test_a_foreign_client_finds_out_what_there_is(client: Any) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("pair")
    assert client.is_model_ready("pair", "1")
    assert not client.is_model_ready("other")
    assert client.get_server_metadata()["extensions"] == ["binary_tensor_data", "classification"]
    assert client.get_model_metadata("pair") == {
        "name": "pair",
        "versions": ["1"],
        "platform": "pytorch",
        "inputs": [
            {"name": "left", "datatype": "FP32", "shape": [-1, 2]},
            {"name": "right", "datatype": "INT64", "shape": [-1]},
        ],
        "outputs": [
            {"name": "product", "datatype": "FP32", "shape": [-1, 2]},
            {"name": "is_large", "datatype": "BOOL", "shape": [-1]},
        ],
    }


def test_a_foreign_client_is_told_what_is_wrong(client: Any) -> None:
    from tritonclient.utils import InferenceServerException

    with pytest.raises(InferenceServerException, match=r"inputs.inputs.shape: wanted \[samples, 2, 3\], got \[5, 6\]"):
        client.infer("sums", [tensor("inputs", np.zeros((5, 6), dtype="float32"), binary=True)])
    with pytest.raises(InferenceServerException, match="There is no model other"):
        client.infer("other", [tensor("inputs", np.zeros((1, 2, 3), dtype="float32"), binary=True)])


def post(content: bytes, headers: dict[str, str] | None = None, path: str = "sums/infer") -> httpx.Response:
    async def ask() -> httpx.Response:
        async with endpoint((ROW_SUMS, row_sums), (PAIR, pair)) as asked:
            return await asked.client.post(f"/v2/models/{path}", content=content, headers=headers)

    return asyncio.run(ask())


def with_input(**changes: Any) -> dict[str, Any]:
    given = {"name": "inputs", "shape": [1, 2, 3], "datatype": "FP32", "data": [1, 2, 3, 4, 5, 6], **changes}
    return {"inputs": [{key: value for key, value in given.items() if value is not None}]}


@pytest.mark.parametrize("data", [[1, 2, 3, 4, 5, 6], [[[1, 2, 3], [4, 5, 6]]], [1.0, 2, 3, 4, 5, 6.0]])
def test_values_come_flat_or_nested(data: Any) -> None:
    answer = post(json.dumps(with_input(data=data)).encode())
    assert answer.json()["outputs"] == [{"name": "outputs", "datatype": "FP32", "shape": [1, 2], "data": [6.0, 15.0]}]


def test_all_outputs_come_as_bytes_where_the_request_says_so() -> None:
    request = {**with_input(), "parameters": {"binary_data_output": True}}
    answer = post(json.dumps(request).encode())
    length = int(answer.headers["inference-header-content-length"])
    head = json.loads(answer.content[:length])
    assert head["outputs"][0]["parameters"] == {"binary_data_size": 8}
    assert struct.unpack("<2f", answer.content[length:]) == (6.0, 15.0)


@pytest.mark.parametrize(
    "data",
    [
        [[[1, 2], [3, 4], [5, 6]]],
        [[1, 2, 3], [4, 5, 6]],
        [[[1, 2, 3]], [[4, 5, 6]]],
        [[[1, 2, 3, 4], [5, 6]]],
        [[[1, 2, 3], 4, 5, 6]],
        [[[[1, 2, 3], [4, 5, 6]]]],
    ],
)
def test_values_nested_in_another_way_than_the_shape_says_are_422(data: Any) -> None:
    answer = post(json.dumps(with_input(data=data)).encode())
    assert (answer.status_code, answer.json()["field"].startswith("inputs[0].data")) == (422, True)


@pytest.mark.parametrize("data", [[["ab"]], [["a"], "b"], [[["a"], ["b"]]], [["a", "b", "c"]], ["ab"], [["a", ["b"]]]])
def test_texts_are_never_split_into_letters(data: Any) -> None:
    given = {"name": "inputs", "datatype": "BYTES", "shape": [1, 2]}
    assert read_tensor({**given, "data": [["ab", "c"]]}, "inputs[0]", memoryview(b""))[1].tolist() == [["ab", "c"]]
    with pytest.raises(HttpProblem, match=r"^inputs\[0\]\.data: "):
        read_tensor({**given, "data": data}, "inputs[0]", memoryview(b""))


WRONG: dict[str, tuple[Any, str]] = {
    "no inputs": ({}, "inputs: wanted a list of tensors, got nothing"),
    "no list": ({"inputs": {}}, "inputs: wanted a list of tensors, got an object"),
    "none in it": ({"inputs": []}, "none named 'inputs'"),
    "no tensor": ({"inputs": [1]}, "inputs[0]: wanted an object with name"),
    "no name": (with_input(name=None), "inputs[0].name: wanted a text, got null"),
    "wrong name": (with_input(name="x"), "wanted tensors named inputs, got one named 'x'"),
    "no type": (with_input(datatype=None), "inputs[0].datatype: wanted one of BOOL"),
    "texts": (with_input(datatype="BYTES", data=["a"] * 6), "inputs.inputs.datatype: wanted FP32, got BYTES"),
    "list as type": (with_input(datatype=["FP32"]), "inputs[0].datatype"),
    "no shape": (with_input(shape=None), "inputs[0].shape: wanted a list of up to 16 sizes"),
    "negative": (with_input(shape=[-1, 2, 3]), "inputs[0].shape: wanted a list of up to 16 sizes from 0 to"),
    "truth value as size": (with_input(shape=[True, 2, 3]), "inputs[0].shape"),
    "other shape": (with_input(shape=[1, 3, 2]), "inputs.inputs.shape: wanted [samples, 2, 3], got [1, 3, 2]"),
    "no batch": (with_input(shape=[2, 3]), "wanted [samples, 2, 3], got [2, 3]"),
    "no dimension": (with_input(shape=[], data=[1]), "wanted [samples, 2, 3], got []"),
    "no samples": (with_input(shape=[0, 2, 3], data=[]), "wanted 1 to 1024 samples in a request, got 0"),
    "too few": (with_input(data=[1, 2]), "inputs[0].data: wanted 6 values (shape [1, 2, 3]), got 2"),
    "huge shape": (with_input(shape=[2**40, 2**40]), "inputs[0].data: wanted 1208925819614629174706176 values"),
    "huge size": (with_input(shape=[0, 2**63], data=[]), "inputs[0].shape: wanted a list of up to 16 sizes"),
    "huge empty shape": (with_input(shape=[0, 2**40, 2**40], data=[]), "sizes whose product is at most"),
    "no data": (with_input(data=None), "inputs[0].data: wanted a list of values, got nothing"),
    "text": (with_input(data=[1, 2, 3, 4, 5, "6"]), "inputs[0].data[5]: wanted a value of type float32, got text"),
    "ragged": (with_input(data=[[1, 2, 3], 4, 5, 6]), "inputs[0].data: wanted one list of values, or lists nested as"),
    "fraction": (with_input(datatype="INT32", data=[1, 2, 3, 4, 5, 6.5]), "inputs[0].data[5]: wanted a value of type"),
    "overflow": (with_input(datatype="INT8", data=[1, 2, 3, 4, 5, 600]), "wanted values that fit int8"),
    "truth values": (with_input(datatype="BOOL", data=[True] * 6), "values of type bool"),
    "twice": ({"inputs": with_input()["inputs"] * 2}, "wanted each name once"),
    "binary and data": (with_input(parameters={"binary_data_size": 24}), "data, or parameters.binary_data_size"),
    "no bytes": (with_input(data=None, parameters={"binary_data_size": 24}), "at most the 0 bytes that follow"),
    "other size": (with_input(data=None, parameters={"binary_data_size": 4}), "wanted 24 (FP32 of shape [1, 2, 3])"),
    "wrong output": ({**with_input(), "outputs": [{"name": "x"}]}, "outputs[0].name: wanted one of outputs, got 'x'"),
    "output no object": ({**with_input(), "outputs": [["outputs"]]}, "outputs[0].name"),
    "outputs no list": ({**with_input(), "outputs": "outputs"}, "outputs: wanted a list of outputs, got text"),
    "classes": (
        {**with_input(), "outputs": [{"name": "outputs", "parameters": {"classification": -3}}]},
        "outputs[0].parameters.classification",
    ),
}


@pytest.mark.parametrize(("request_", "told"), WRONG.values(), ids=WRONG)
def test_wrong_input_is_422_and_says_what_was_wanted_and_got(request_: Any, told: str) -> None:
    answer = post(json.dumps(request_).encode())
    assert answer.status_code == 422
    assert told in answer.json()["error"]


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("x/infer", "There is no model x; there is sums, pair."),
        ("sum/infer", "There is no model sum; did you mean sums?"),
        ("sums/versions/9/infer", "There is no version 9 of the model sums; there is 1."),
        ("x/versions/1/infer", "There is no model x; there is sums, pair."),
    ],
)
def test_an_unknown_model_or_version_is_404_and_says_what_there_is(path: str, told: str) -> None:
    answer = post(json.dumps(with_input()).encode(), path=path)
    assert (answer.status_code, answer.json()["error"]) == (404, told)


@pytest.mark.parametrize("length", ["x", "-1", "1000000", "9" * 30, "3"])
def test_a_wrong_length_of_the_json_is_422(length: str) -> None:
    answer = post(json.dumps(with_input()).encode(), {"Inference-Header-Content-Length": length})
    assert answer.status_code == 422


def test_bytes_that_are_not_finite_or_too_many_are_422() -> None:
    head = json.dumps(with_input(data=None, parameters={"binary_data_size": 24})).encode()
    headers = {"Inference-Header-Content-Length": str(len(head))}
    not_finite = post(head + struct.pack("<6f", 1, 2, 3, 4, 5, float("nan")), headers)
    assert (not_finite.status_code, not_finite.json()["wanted"]) == (422, "a finite number")
    assert not_finite.json()["field"] == "inputs (sample 0)[1][2]"
    more = post(head + struct.pack("<7f", *range(7)), headers)
    assert "wanted no bytes behind those of the tensors, got 4 more" in more.json()["error"]


def texts(*values: bytes, shape: list[int]) -> tuple[dict[str, Any], bytes]:
    """Return a tensor of texts, and the bytes behind its JSON."""
    blob = b"".join(struct.pack("<I", len(value)) + value for value in values)
    size = {"binary_data_size": len(blob)}
    return {"name": "inputs", "datatype": "BYTES", "shape": shape, "parameters": size}, blob


def test_texts_of_any_length_are_read_and_other_bytes_refused() -> None:
    tensor, blob = texts("é".encode(), b"", b"ab", shape=[3])
    name, array, num_bytes = read_tensor(tensor, "inputs[0]", memoryview(blob + b"next"))
    assert (name, array.tolist(), num_bytes) == ("inputs", ["é", "", "ab"], len(blob))
    with pytest.raises(HttpProblem, match="wanted texts in UTF-8"):  # and not read as other texts
        read_tensor(texts(b"\xff\xd8", shape=[1])[0], "inputs[0]", memoryview(texts(b"\xff\xd8", shape=[1])[1]))
    with pytest.raises(HttpProblem, match="the shape of 3 texts"):
        read_tensor({**tensor, "shape": [2]}, "inputs[0]", memoryview(blob))


def test_many_short_texts_are_read_in_linear_time() -> None:
    num_texts = 400_000
    tensor, blob = texts(*[b""] * num_texts, shape=[num_texts])
    began_s = time.process_time()
    assert len(read_tensor(tensor, "inputs[0]", memoryview(blob))[1]) == num_texts
    assert time.process_time() - began_s < 4.0  # a copy of the rest for each text would be 320 GB


def test_every_byte_but_0_is_true() -> None:
    tensor = {"name": "flags", "shape": [4], "datatype": "BOOL", "parameters": {"binary_data_size": 4}}
    _, values, num_bytes = read_tensor(tensor, "inputs[0]", memoryview(bytes([0, 1, 2, 255])))
    assert num_bytes == 4
    assert values.view(np.uint8).tolist() == [0, 1, 1, 1]


@pytest.mark.parametrize(
    ("answers", "datatype", "sent"),
    [
        ([1, 2], "INT64", [1, 2]),
        ([1, 2.5], "FP64", [1.0, 2.5]),
        ([True, False], "BOOL", [True, False]),
        ([True, 2.5], "BYTES", ["true", "2.5"]),
        ([7, False], "BYTES", ["7", "false"]),
    ],
)
def test_answers_of_several_types_are_one_tensor_in_which_truth_values_are_no_numbers(
    answers: list[Any], datatype: str, sent: list[Any]
) -> None:
    async def run(samples: Sequence[Sample]) -> list[Output | Exception]:
        return [{"outputs": np.array(answer)} for answer in answers]

    async def ask() -> httpx.Response:
        async with endpoint((ROW_SUMS, run)) as asked:
            body = with_input(shape=[2, 2, 3], data=[*range(12)])
            return await asked.client.post("/v2/models/sums/infer", json=body)

    [told] = asyncio.run(ask()).json()["outputs"]
    assert (told["datatype"], told["data"]) == (datatype, sent)
