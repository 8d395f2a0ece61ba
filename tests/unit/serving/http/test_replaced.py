"""Requests whose version is replaced after they were read and before it is asked: who answers, and under what name."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import httpx
import pytest

from orchestray.serving.http import Monitor
from orchestray.serving.models.codec import Codec
from orchestray.serving.models.signature import Output, Sample, Signature
from orchestray.serving.routing.endpoint import ModelVersion, Share
from support.http_endpoint import ROW_SUMS, Asked, Run, endpoint, row_sums, version_of

SAMPLE = ROW_SUMS.example
TENSOR = {"name": "inputs", "shape": [1, 2, 3], "datatype": "FP32", "data": [1, 2, 3, 4, 5, 6]}
SUMS = [6.0, 15.0]


async def negated(samples: Sequence[Sample]) -> list[Output | Exception]:
    return [{"outputs": -sample["inputs"].sum(axis=1)} for sample in samples]


async def negated_by_another_name(samples: Sequence[Sample]) -> list[Output | Exception]:
    return [{"negated": -sample["inputs"].sum(axis=1)} for sample in samples]


def replacing(asked: Asked, new: ModelVersion, *, after: int = 0) -> ModelVersion:
    """Replace the version of the endpoint by another when it has been asked `after` times."""
    old = asked.registry.default.main
    put, times = old.batcher.put, itertools.count()

    def replaced(*given: Any, **more: Any) -> Any:
        if next(times) == after:
            asked.registry.update({"sums": [Share(new)]})
            old.batcher._core.closed = True
        return put(*given, **more)

    old.batcher.put = replaced  # type: ignore[method-assign]
    return new


def post(
    path: str, body: Any, by: str, *, run: Run = negated, outputs: str = "outputs", after: int = 0, **more: Any
) -> httpx.Response:
    spec = replace(ROW_SUMS.outputs[0], name=outputs)

    async def ask() -> httpx.Response:
        async with endpoint() as asked:
            replacing(asked, version_of(replace(ROW_SUMS, version=by, outputs=(spec,)), run, Monitor()), after=after)
            return await asked.client.post(path, json=body, **more)

    return asyncio.run(ask())


WAYS = [("/predict", {"inputs": SAMPLE}), ("/invocations", {"inputs": [SAMPLE, SAMPLE]})]
V2 = ("/v2/models/sums/infer", {"inputs": [TENSOR]})


@pytest.mark.parametrize(("path", "body"), [*WAYS, V2])
def test_who_names_no_version_is_answered_by_the_new_one_under_its_name(path: str, body: Any) -> None:
    answer = post(path, body, "2")
    assert answer.status_code == 200
    assert answer.headers["x-model-version"] == "2"
    assert "-6.0" in answer.text
    assert answer.json().get("model_version", "2") == "2"


@pytest.mark.parametrize(
    ("path", "body", "headers"),
    [
        *[(f"{path}?version=1", body, {}) for path, body in WAYS],
        *[(path, body, {"X-Model-Version": "1"}) for path, body in WAYS],
        ("/v2/models/sums/versions/1/infer", V2[1], {}),
    ],
)
def test_who_names_a_version_that_is_gone_meanwhile_is_told_so(path: str, body: Any, headers: dict[str, str]) -> None:
    answer = post(path, body, "2", headers=headers)
    assert answer.status_code == 404
    assert answer.json()["error"] == "There is no version 1 of the model sums; there is 2."


def test_who_names_a_version_that_was_started_anew_meanwhile_is_answered_by_it() -> None:
    answer = post("/predict?version=1", {"inputs": SAMPLE}, "1")
    assert (answer.status_code, answer.headers["x-model-version"]) == (200, "1")
    assert answer.json()["outputs"] == [-each for each in SUMS]


def test_a_new_version_whose_outputs_have_another_name_answers_under_it() -> None:
    for outputs in ([], [{"name": "outputs"}]):
        body = {**V2[1], "outputs": outputs}
        answer = post(V2[0], body, "2", run=negated_by_another_name, outputs="negated")
        if not outputs:
            assert answer.status_code == 200, answer.text
            assert answer.json()["model_version"] == "2"
            assert [(one["name"], one["data"]) for one in answer.json()["outputs"]] == [("negated", [-6.0, -15.0])]
        else:
            assert answer.status_code == 422
            assert "outputs[0].name" in answer.text
            assert "negated" in answer.text


DECODED = replace(ROW_SUMS, own_forms=("decode",))
COLUMNS = replace(ROW_SUMS, feature_names=dict.fromkeys("abcdef", 1))
TURNED = replace(ROW_SUMS, feature_names=dict.fromkeys("fedcba", 1))
FRAME = {"dataframe_records": [dict(zip("abcdef", range(6), strict=True))]}


@pytest.mark.parametrize(
    ("old", "new", "path", "body"),
    [
        (DECODED, DECODED, "/predict", {"inputs": "a text"}),
        (DECODED, DECODED, "/invocations", {"inputs": ["a text"]}),
        (DECODED, ROW_SUMS, "/predict", {"inputs": "a text"}),
        (ROW_SUMS, DECODED, "/predict", {"inputs": SAMPLE}),
        (COLUMNS, TURNED, "/invocations", FRAME),
        (COLUMNS, ROW_SUMS, "/invocations", FRAME),
    ],
)
def test_what_one_version_has_read_is_never_run_by_another_that_reads_it_otherwise(
    old: Signature, new: Signature, path: str, body: Any
) -> None:
    def decoding(version: ModelVersion) -> ModelVersion:
        if "decode" in version.signature.own_forms:
            version.codec = Codec(version.signature, lambda _: SAMPLE)
        return version

    async def ask() -> list[httpx.Response]:
        async with endpoint((old, row_sums)) as asked:
            decoding(asked.registry.default.main)
            replacing(asked, decoding(version_of(replace(new, version="2"), negated, Monitor())))
            return [await asked.client.post(path, json=body) for _ in range(2)]

    between, after = asyncio.run(ask())
    assert (between.status_code, between.headers["retry-after"]) == (503, "1")
    assert after.headers["x-model-version"] == "2"
    assert after.status_code == (422 if new is ROW_SUMS else 200)


def test_columns_of_the_same_names_in_the_same_order_are_answered_by_the_new_version() -> None:
    async def ask() -> httpx.Response:
        async with endpoint((COLUMNS, row_sums)) as asked:
            replacing(asked, version_of(replace(COLUMNS, version="2"), negated, Monitor()))
            return await asked.client.post("/invocations", json=FRAME)

    assert asyncio.run(ask()).json() == {"predictions": [[-3.0, -12.0]]}


def test_the_samples_of_a_request_are_answered_by_one_version_although_it_is_replaced_amid_them() -> None:
    body = {"inputs": [SAMPLE, SAMPLE, SAMPLE]}
    answer = post("/invocations", body, "2", after=1)
    assert (answer.status_code, answer.headers["x-model-version"]) == (200, "2")
    assert answer.json()["predictions"] == [[-each for each in SUMS]] * 3
