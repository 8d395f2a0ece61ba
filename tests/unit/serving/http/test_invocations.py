"""`/ping` and `/invocations`, as Amazon SageMaker and MLflow use them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import httpx
import pytest

from orchestray.serving.http.frames import rows_of_csv
from orchestray.serving.models.signature import ANY, Output, Sample, Signature, TensorSpec
from support.http_endpoint import PAIR, ROW_SUMS, endpoint, pair, row_sums

ONE = [[1, 2, 3], [4, 5, 6]]
TWO = [[0, 0, 1], [0, 0, 2]]


NAMED = replace(ROW_SUMS, name="named", feature_names={"a": 1, "b": 2, "c": 1, "d": 1, "e": 1})
FRAME = {"e": [6, 2], "b": [[2, 3], [0, 1]], "a": [1, 0], "d": [5, False], "c": [4, 0]}
"""The samples ONE and TWO by column, in another order than the model's."""
ROWS = [dict(zip(FRAME, row, strict=True)) for row in zip(*FRAME.values(), strict=True)]


def post(body: Any, model: str = "sums", content_type: str = "application/json") -> httpx.Response:
    async def ask() -> httpx.Response:
        async with endpoint((ROW_SUMS, row_sums), (PAIR, pair), (NAMED, row_sums)) as asked:
            content = body if isinstance(body, str) else json.dumps(body)
            headers = {"Content-Type": content_type}
            return await asked.client.post(f"/invocations?model={model}", content=content, headers=headers)

    return asyncio.run(ask())


@pytest.mark.parametrize(
    "body",
    [
        {"inputs": [ONE, TWO]},
        {"instances": [ONE, TWO]},
        {"inputs": [ONE, TWO], "params": {}},
        {"dataframe_split": {"columns": ["inputs"], "data": [[ONE], [TWO]]}},
        {"dataframe_split": {"columns": [0, 1, 2, 4, 3, 5], "data": [[1, 2, 3, 5, 4, 6], [0, 0, 1, 0, 0, 2]]}},
        {"dataframe_records": [{"inputs": ONE}, {"inputs": TWO}]},
    ],
)
def test_every_form_of_a_request_of_mlflow_is_answered(body: Any) -> None:
    assert post(body).json() == {"predictions": [[6.0, 15.0], [1.0, 2.0]]}


@pytest.mark.parametrize(
    "body",
    [
        {"dataframe_records": ROWS},
        {"dataframe_split": {"columns": [*FRAME], "data": [[*row.values()] for row in ROWS], "index": [7, 9]}},
        {"inputs": FRAME},
        {"inputs": ROWS},
        {"instances": ROWS},
        {"dataframe_split": {"columns": ["inputs"], "data": [[ONE], [TWO]]}},
        {"inputs": [ONE, TWO]},
    ],
)
def test_columns_are_put_in_order_by_the_names_that_a_run_keeps(body: Any) -> None:
    assert post(body, "named").json() == {"predictions": [[6.0, 15.0], [1.0, 2.0]]}


def test_a_header_of_csv_names_the_columns() -> None:
    named = "e,d,c,b,a\n5,4,3,2,1\n0.5,True,0,0,0\n"
    vector = replace(ROW_SUMS, inputs=(TensorSpec("inputs", "float32", (5,)),))
    vector = replace(vector, feature_names=dict.fromkeys("abcde", 1))

    async def plain(samples: Sequence[Sample]) -> list[Output | Exception]:
        return [{"outputs": sample["inputs"]} for sample in samples]

    async def ask() -> httpx.Response:
        async with endpoint((vector, plain)) as asked:
            content = named.encode("utf-8-sig")
            return await asked.client.post("/invocations", content=content, headers={"Content-Type": "text/csv"})

    assert asyncio.run(ask()).json() == {"predictions": [[1.0, 2.0, 3.0, 4.0, 5.0], [0.0, 0.0, 0.0, 1.0, 0.5]]}


@pytest.mark.parametrize(
    ("content_type", "body", "rows"),
    [
        ("text/csv", "1,,3\n4,5,6\n", [[1, None, 3], [4, 5, 6]]),
        ("text/csv", ",1\n2,\n", [[None, 1], [2, None]]),
        ("text/csv", ",0,1\n0,2.5,3\n", [{"": 0, "0": 2.5, "1": 3}]),
        ("text/csv; header=absent", "good,1\nbad,2\n", [["good", 1], ["bad", 2]]),
        ('Text/CSV; charset=utf-8; header="present"', "0,1\n5,6\n", [{"0": 5, "1": 6}]),
        (
            "text/csv",
            "name,most\nNan,inf\nInfinity,1e400\n",
            [{"name": "Nan", "most": "inf"}, {"name": "Infinity", "most": "1e400"}],
        ),
        ("text/csv", f"image\n{'A' * 200_000}\n", [{"image": "A" * 200_000}]),
    ],
)
def test_each_line_of_csv_that_is_no_header_is_a_sample(content_type: str, body: str, rows: list[Any]) -> None:
    anything = (TensorSpec("inputs", ANY, ()),)

    async def same(samples: Sequence[Sample]) -> list[Output | Exception]:
        return [{"outputs": sample["inputs"]} for sample in samples]

    async def ask() -> httpx.Response:
        async with endpoint((Signature("same", "1", anything, anything, None), same)) as asked:
            return await asked.client.post("/invocations", content=body, headers={"Content-Type": content_type})

    assert asyncio.run(ask()).json() == {"predictions": rows}


@pytest.mark.parametrize("body", ["", "\n\n", "\ufeff"])
def test_csv_of_nothing_has_no_samples(body: str) -> None:
    anything = (TensorSpec("inputs", ANY, ()),)
    for signature in (ROW_SUMS, Signature("any", "1", anything, anything, None)):
        assert rows_of_csv(body.encode(), signature) == []
    refused = post(body, content_type="text/csv")
    assert (refused.status_code, refused.json()["got"]) == (422, "0")


def test_parameters_that_no_model_takes_are_ignored_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    answer = post({"inputs": [ONE], "params": {"scale": 2}})
    assert (answer.json(), answer.headers["x-ignored"]) == ({"predictions": [[6.0, 15.0]]}, "params")
    assert "params are ignored" in caplog.text
    assert "x-ignored" not in post({"inputs": [ONE], "params": {}}).headers
    refused = post({"inputs": [ONE], "params": [2]})
    assert (refused.status_code, refused.json()["field"]) == (422, "params")


def test_a_text_with_an_underscore_is_no_number_of_csv() -> None:
    pixels = replace(ROW_SUMS, feature_names={f"{row}_{column}": 1 for row in range(2) for column in range(3)})

    async def ask(body: str) -> httpx.Response:
        async with endpoint((pixels, row_sums)) as asked:
            return await asked.client.post("/invocations", content=body, headers={"Content-Type": "text/csv"})

    header = ",".join(reversed([*pixels.feature_names]))
    assert asyncio.run(ask(f"{header}\n6,5,4,3,2,1\n")).json() == {"predictions": [[6.0, 15.0]]}
    wrong = asyncio.run(ask(f"{header}\n6,5,4,3,2,1_5\n"))
    assert (wrong.status_code, "'1_5' is no number" in wrong.json()["error"]) == (422, True)


def test_columns_of_another_name_are_422() -> None:
    def error(*rows: dict[str, Any], model: str = "named") -> Any:
        answer = post({"dataframe_records": rows}, model)
        assert answer.status_code == 422
        return answer.json()["error"]

    wanted = "dataframe_records[1]: wanted 5 columns, a, b, c, d, e, got"
    assert error(ROWS[0], {**ROWS[1], "price": 1}) == f"{wanted} one named 'price' as well."
    assert error(ROWS[0], {name: ROWS[1][name] for name in "abcd"}) == f"{wanted} none named 'e'."
    assert error({**ROWS[0], "b": [2]}) == "dataframe_records[0].b: wanted 2 numbers, got a list of 1."
    assert "no feature_names to put columns in order by, got the columns e, b" in error(*ROWS, model="sums")
    twice = {"dataframe_split": {"columns": ["a", "a"], "data": [[1, 2]]}}
    assert "each column once" in post(twice, "named").json()["error"]


def test_lines_of_csv_are_samples() -> None:
    answer = post("1,2,3,4,5,6\n0,0,1,0,0,2\n", content_type="text/csv; charset=utf-8")
    assert answer.json() == {"predictions": [[6.0, 15.0], [1.0, 2.0]]}


@pytest.mark.parametrize("charset", ["UTF-8", "utf8", "utf-16", '"iso-8859-1"', "windows-1252"])
def test_csv_is_read_in_the_encoding_that_its_type_says(charset: str) -> None:
    named = replace(ROW_SUMS, feature_names={"é": 1, **{str(place): 1 for place in range(5)}})

    async def ask() -> httpx.Response:
        async with endpoint((named, row_sums)) as asked:
            body = "0,1,2,3,4,é\n2,3,4,5,6,1\n".encode(charset.strip('"'))
            headers = {"Content-Type": f"Text/CSV; header=present; charset={charset}"}
            return await asked.client.post("/invocations", content=body, headers=headers)

    assert asyncio.run(ask()).json() == {"predictions": [[6.0, 15.0]]}


def test_whole_numbers_of_csv_are_taken_by_a_model_of_integers() -> None:
    async def doubled(samples: Sequence[Sample]) -> list[Output | Exception]:
        return [{"outputs": 2 * sample["inputs"]} for sample in samples]

    specs = [(TensorSpec(name, "int64", (2,)),) for name in ("inputs", "outputs")]
    signature = Signature("counts", "1", *specs, [1, 2])

    async def ask(body: str) -> httpx.Response:
        async with endpoint((signature, doubled)) as asked:
            return await asked.client.post("/invocations", content=body, headers={"Content-Type": "text/csv"})

    assert asyncio.run(ask("1,-2\n3,4\n")).json() == {"predictions": [[2, -4], [6, 8]]}
    assert asyncio.run(ask("1,2.5\n")).status_code == 422


def test_csv_for_a_model_with_several_inputs_is_422() -> None:
    answer = post("1,2,3\n", "pair", "text/csv")
    assert answer.status_code == 422
    assert "a header with the names of the inputs, left, right" in answer.json()["error"]


@pytest.mark.parametrize(
    "body",
    [
        {"inputs": {"left": [[1, 2], [3, 4]], "right": [1, 100]}},
        {"dataframe_records": [{"left": [1, 2], "right": 1}, {"right": 100, "left": [3, 4]}]},
    ],
)
def test_columns_are_the_inputs_of_a_model_with_several(body: Any) -> None:
    predictions = post(body, "pair").json()["predictions"]
    assert predictions == [
        {"product": [1.0, 2.0], "is_large": False},
        {"product": [300.0, 400.0], "is_large": True},
    ]


@pytest.mark.parametrize(
    ("body", "content_type", "told"),
    [
        ({}, "application/json", "wanted exactly one of inputs, instances"),
        ({"inputs": [ONE], "instances": [ONE]}, "application/json", "wanted exactly one of"),
        ({"inputs": [ONE], "more": 1}, "application/json", "wanted exactly one of"),
        ({"inputs": 3}, "application/json", "inputs: wanted a list of samples, got a number"),
        ({"inputs": []}, "application/json", "wanted 1 to 1024 samples in a request, got 0"),
        ({"inputs": [ONE, [[1, 2], [3, 4]]]}, "application/json", "inputs[1][0]: wanted a list of 3"),
        ({"inputs": {"a": [1], "b": [1, 2]}}, "application/json", "as long as each other"),
        ({"dataframe_split": [1]}, "application/json", 'dataframe_split: wanted {"columns"'),
        ({"dataframe_split": {"columns": ["a"], "data": [[1, 2]]}}, "application/json", "dataframe_split.data[0]"),
        ({"dataframe_records": [{"a": 1}]}, "application/json", "dataframe_records[0]: wanted rows without names"),
        ({"dataframe_records": [1]}, "application/json", "dataframe_records[0]: wanted an object"),
        ("1,2\n1,x\n", "text/csv", "not CSV of numbers"),
        ("1,2,3\n", "text/csv", "line 1: wanted 6 columns"),
        ("1,2,3,4,5,nan\n", "text/csv", "line 1[1][2]: wanted a finite number"),
        ("a;b\n", "text/csv", "lines of values behind the header, which is the first line, got none"),
        ("1,2\n", "text/csv; charset=utf-7", "charset: wanted one of utf-8, utf8, us-ascii"),
        ("[", "application/json", "not JSON"),
    ],
)
def test_wrong_input_is_422_and_says_what_was_wanted_and_got(body: Any, content_type: str, told: str) -> None:
    answer = post(body, content_type=content_type)
    assert answer.status_code == 422
    assert told in answer.json()["error"]


def test_ping_answers_when_requests_would_be() -> None:
    async def ask() -> httpx.Response:
        async with endpoint() as asked:
            return await asked.client.get("/ping")

    assert asyncio.run(ask()).json() == {"status": "ok"}
