"""Routes `/predict` (one sample, one answer), and those of other servers that answer a list of samples.

`/ping` and `/invocations` are of Amazon SageMaker and MLflow, `/v1/models/{name}:predict` is of KServe and TensorFlow.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from orchestray.serving.http.body import long_number, parse_object, read_body
from orchestray.serving.http.frames import Row, rows_of_csv, rows_of_json
from orchestray.serving.http.predictor import Predictor, all_of, named_by, named_in_path
from orchestray.serving.http.problems import wrong_input
from orchestray.serving.http.request_context import SCOPE_KEY, Call
from orchestray.serving.http.responses import json_answer
from orchestray.serving.http.settings import HttpSettings
from orchestray.serving.models.signature import Signature
from orchestray.serving.routing.endpoint import Endpoint, ModelVersion

_log = logging.getLogger("orchestray.serving")
_IGNORED = {"x-ignored": "params"}
_SIGNATURE = "serving_default"
"""The signature for which clients of TensorFlow Serving ask."""
_INSTANCES = '{"instances": <list of samples>}'
_WANTED = '{"inputs": <one sample>}'


def predict_routes(predictor: Predictor, settings: HttpSettings) -> list[Route]:
    """Return the routes `POST /predict`, `GET /ping`, `POST /invocations` and `POST /v1/models/{name}:predict`."""

    async def predict(request: Request) -> Response:
        call: Call = request.scope[SCOPE_KEY]
        body = await read_body(request.receive, settings.max_body_bytes)
        endpoint, version = predictor.choose(call, *named_by(request, call))
        if _kind(call).startswith("multipart/"):
            file = ", or a file as it is, as curl --data-binary sends it" if version.codec.decodes else ""
            wanted = _WANTED + file
            raise wrong_input("the body", wanted, f"a form ({_kind(call)})")
        if version.codec.decodes and not _is_json(kind := _kind(call)):
            value, field = bytes(body), f"the body ({kind})"
        else:
            whole = parse_object(body, _WANTED)
            _check_whole_numbers(body, version.signature)
            for name in whole:
                if name != "inputs":
                    raise wrong_input(name[:100], f"the one field inputs: {_WANTED}", "a field that is not known")
            if "inputs" not in whole:
                raise wrong_input("inputs", _sample_in_words(version.signature), "nothing")
            value, field = whole["inputs"], "inputs"
        sample = await version.codec.sample_of(value, field=field, deadline_s=call.deadline_s)
        outputs, answered = await predictor.answer(request, call, endpoint, version, [sample])
        return json_answer({"outputs": await answered.codec.answer_of(outputs[0])})

    async def ping(_: Request) -> Response:
        predictor.check_ready()
        return json_answer({"status": "ok"})

    return [
        Route("/predict", predict, methods=["POST"]),
        Route("/ping", ping, methods=["GET"]),
        *_row_routes(predictor, settings),
    ]


def _row_routes(predictor: Predictor, settings: HttpSettings) -> list[Route]:
    async def invocations(request: Request) -> Response:
        call: Call = request.scope[SCOPE_KEY]
        body = await read_body(request.receive, settings.max_body_bytes)
        endpoint, version = predictor.choose(call, *named_by(request, call))
        headers = {}
        if _kind(call) == "text/csv":
            given = _parameters(call)
            has_header = {"absent": False, "present": True}.get(given.get("header", ""))
            rows = rows_of_csv(body, version.signature, has_header, given.get("charset", "utf-8"))
        else:
            value = parse_object(body, '{"inputs": <list of samples>}')
            _check_whole_numbers(body, version.signature)
            rows = rows_of_json(value, version.signature)
            if value.get("params"):  # MLflow's server leaves them out too, where a model's signature names none
                headers = _IGNORED
                _log.warning("request %s: params are ignored, as models take their inputs alone", call.request_id)
        return await _answer_rows(predictor, request, endpoint, version, rows, headers)

    async def instances(request: Request) -> Response:
        body = await read_body(request.receive, settings.max_body_bytes)
        endpoint, version = predictor.choose(request.scope[SCOPE_KEY], *named_in_path(request))
        value = parse_object(body, _INSTANCES)
        if value.pop("signature_name", _SIGNATURE) != _SIGNATURE:
            raise wrong_input("signature_name", f"{_SIGNATURE}: a model has one signature", "another")
        if [*value] != ["instances"]:
            raise wrong_input("the body", f"the one field instances: {_INSTANCES}", ", ".join(sorted(value)) or "none")
        _check_whole_numbers(body, version.signature)
        return await _answer_rows(predictor, request, endpoint, version, rows_of_json(value, version.signature))

    return [
        Route("/invocations", invocations, methods=["POST"]),
        Route("/v1/models/{name}:predict", instances, methods=["POST"]),
        Route("/v1/models/{name}/versions/{version}:predict", instances, methods=["POST"]),
    ]


async def _answer_rows(
    predictor: Predictor,
    request: Request,
    endpoint: Endpoint,
    version: ModelVersion,
    rows: Sequence[Row],
    headers: dict[str, str] | None = None,
) -> Response:
    call: Call = request.scope[SCOPE_KEY]
    predictor.check_number(len(rows), version)
    sample_of, deadline_s = version.codec.sample_of, call.deadline_s
    samples = await all_of(sample_of(row, field=place, deadline_s=deadline_s) for place, row in rows)
    outputs, answered = await predictor.answer(request, call, endpoint, version, samples)
    predictions = await all_of(map(answered.codec.answer_of, outputs))
    return json_answer({"predictions": predictions}, headers=headers)


def _kind(call: Call) -> str:
    return call.headers.get(b"content-type", b"").partition(b";")[0].strip().lower().decode("latin-1")


def _parameters(call: Call) -> dict[str, str]:
    """Return the parameters of a type such as `text/csv; charset=utf-8; header=absent` (RFC 4180, section 3)."""
    _, *parts = call.headers.get(b"content-type", b"").decode("latin-1").lower().replace('"', "").split(";")
    given = (part.partition("=") for part in parts)
    return {name.strip(): value.strip() for name, _, value in given}


def _is_json(kind: str) -> bool:
    return kind in ("", "application/json", "application/x-www-form-urlencoded") or kind.endswith("+json")


def _check_whole_numbers(body: bytes, signature: Signature) -> None:
    """Check that a model that takes any value gets the whole numbers that were sent; parsed, long ones are floats.

    Raises:
        HttpProblem: 422.
    """
    if signature.takes_any_value and (number := long_number(body)) is not None:
        wanted = "whole numbers of at most 64 bits; longer ones as texts, or with an exponent if they are measured"
        raise wrong_input("the body", wanted, number[:60])


def _sample_in_words(signature: Signature) -> str:
    if "decode" in signature.own_forms:
        return "what the task of the model decodes"
    if len(signature.inputs) == 1:
        return str(signature.inputs[0])
    return "an object with " + ", ".join(f"{spec.name} ({spec})" for spec in signature.inputs)
