"""Routes `/predict` (one sample, one answer), and `/ping` and `/invocations` as in Amazon SageMaker and MLflow."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from orchestray.serving.http.body import parse_object, read_body
from orchestray.serving.http.predictor import Predictor
from orchestray.serving.http.problems import HttpProblem, wrong_input
from orchestray.serving.http.request_context import call_of
from orchestray.serving.http.responses import json_answer, outputs_json, to_json
from orchestray.serving.http.settings import HttpSettings
from orchestray.serving.models.signature import Sample, Signature, kind_of

_WANTED = '{"inputs": <one sample>}'
_INVOCATIONS = ("inputs", "instances", "dataframe_split", "dataframe_records")


def predict_routes(predictor: Predictor, settings: HttpSettings) -> list[Route]:
    """Return the routes `POST /predict`, `GET /ping` and `POST /invocations`."""

    async def predict(request: Request) -> Response:
        call = call_of(request.scope)
        body = await read_body(request.receive, settings.max_body_bytes)
        endpoint, version = predictor.choose_by_request(request, call)
        value = parse_object(body, settings.max_json_depth, _WANTED)
        for name in value:
            if name != "inputs":
                raise wrong_input(name[:100], f"the one field inputs: {_WANTED}", "a field that is not known")
        if "inputs" not in value:
            raise wrong_input("inputs", _sample_in_words(version.signature), "nothing")
        sample = version.signature.parse(value["inputs"])
        output = await predictor.answer(request, call, endpoint, version, sample)
        return json_answer(outputs_json(output))

    async def ping(_: Request) -> Response:
        predictor.check_ready()
        return json_answer(b'{"status":"ok"}\n')

    async def invocations(request: Request) -> Response:
        call = call_of(request.scope)
        body = await read_body(request.receive, settings.max_body_bytes)
        endpoint, version = predictor.choose_by_request(request, call)
        kind = call.headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if kind == b"text/csv":
            samples = _samples_of_csv(body, version.signature)
        else:
            value = parse_object(body, settings.max_json_depth, '{"inputs": <list of samples>}')
            samples = _samples_of_json(value, version.signature)
        outputs, _ = await predictor.answer_all(request, call, endpoint, version, samples)
        return json_answer(to_json({"predictions": [version.signature.to_json(each) for each in outputs]}))

    return [
        Route("/predict", predict, methods=["POST"]),
        Route("/ping", ping, methods=["GET"]),
        Route("/invocations", invocations, methods=["POST"]),
    ]


def _samples_of_json(value: Mapping[str, Any], signature: Signature) -> list[Sample]:
    """Return the samples of a request to `/invocations`, in any of MLflow's four forms."""
    given = [name for name in _INVOCATIONS if name in value]
    others = value.keys() - {*_INVOCATIONS, "params"}
    if len(given) != 1 or others:
        raise wrong_input("the body", f"exactly one of {', '.join(_INVOCATIONS)}", ", ".join(sorted(value)) or "none")
    name = given[0]
    rows = value[name]
    if name == "dataframe_split":
        return [_of_row(row, signature, f"{name}.data[{i}]") for i, row in enumerate(_split(rows))]
    if name == "inputs" and isinstance(rows, dict):
        rows = _rows_of_columns(rows)
    if not isinstance(rows, list):
        raise wrong_input(name, "a list of samples", kind_of(rows))
    if name == "dataframe_records":
        return [_of_row(row, signature, f"{name}[{i}]") for i, row in enumerate(rows)]
    return [signature.parse(row, field=f"{name}[{i}]") for i, row in enumerate(rows)]


def _split(value: Any) -> list[dict[str, Any]]:
    """Return the rows of a data frame in pandas' orientation `split`, as values by column."""
    columns = value.get("columns") if isinstance(value, dict) else None
    rows = value.get("data") if isinstance(value, dict) else None
    if not isinstance(columns, list) or not isinstance(rows, list) or not all(isinstance(c, str) for c in columns):
        wanted = '{"columns": [<name>, ...], "data": [[<value>, ...], ...]}'
        raise wrong_input("dataframe_split", wanted, kind_of(value))
    for index, row in enumerate(rows):
        if not isinstance(row, list) or len(row) != len(columns):
            raise wrong_input(f"dataframe_split.data[{index}]", f"a list of {len(columns)}", kind_of(row))
    return [dict(zip(columns, row, strict=True)) for row in rows]


def _rows_of_columns(columns: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the samples in a mapping from names to lists of values of equal length."""
    lengths = {len(column) if isinstance(column, list) else -1 for column in columns.values()}
    if len(lengths) != 1 or -1 in lengths:
        raise wrong_input(
            "inputs", "a list of samples, or lists by name that are as long as each other", "other values"
        )
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _of_row(row: Any, signature: Signature, field: str) -> Sample:
    """Return the sample in a row of a data frame.

    The row has a column for each input or, if the model has only one input, for each number of it.
    """
    if not isinstance(row, dict):
        raise wrong_input(field, "an object: values by column", kind_of(row))
    names = [spec.name for spec in signature.inputs]
    if set(row) == set(names):
        return signature.parse(row if len(names) > 1 else row[names[0]], field=field)
    if len(names) == 1:
        spec = signature.inputs[0]
        values = np.array(list(row.values()), dtype=object)
        if values.size == np.prod(spec.shape, dtype=int):
            return signature.parse(values.reshape(spec.shape).tolist(), field=field)
        raise wrong_input(field, f"{np.prod(spec.shape, dtype=int)} columns (the input is {spec})", f"{len(row)}")
    raise wrong_input(field, f"the columns {', '.join(names)}", ", ".join(row))


def _samples_of_csv(body: bytes, signature: Signature) -> list[Sample]:
    """Return a sample for each line of numbers."""
    try:
        lines = [line for line in csv.reader(io.StringIO(body.decode("utf-8"))) if line]
        rows = [[_number(value) for value in line] for line in lines]
    except (UnicodeDecodeError, ValueError, csv.Error) as error:
        raise HttpProblem(422, f"The body is not CSV of numbers, without a header: {error}.") from None
    if len(signature.inputs) > 1:
        names = ", ".join(spec.name for spec in signature.inputs)
        raise wrong_input("the body", f"JSON: CSV does not say which column is of which input ({names})", "CSV")
    columns = [{str(place): value for place, value in enumerate(row)} for row in rows]
    return [_of_row(row, signature, f"line {index + 1}") for index, row in enumerate(columns)]


def _number(text: str) -> float:
    """Parse a number; an integer stays one, since models that take integers accept nothing else."""
    try:
        return int(text)
    except ValueError:
        return float(text)


def _sample_in_words(signature: Signature) -> str:
    if len(signature.inputs) == 1:
        return str(signature.inputs[0])
    return "an object with " + ", ".join(f"{spec.name} ({spec})" for spec in signature.inputs)
