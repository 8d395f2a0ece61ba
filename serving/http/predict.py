"""Routes `/predict` (one sample, one answer), and `/ping` and `/invocations` as in Amazon SageMaker and MLflow."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from orchestray.serving.http.body import parse_object, read_body
from orchestray.serving.http.frames import rows_of_csv, rows_of_json
from orchestray.serving.http.predictor import Predictor, all_of
from orchestray.serving.http.problems import wrong_input
from orchestray.serving.http.request_context import Call, call_of
from orchestray.serving.http.responses import json_answer, to_json
from orchestray.serving.http.settings import HttpSettings
from orchestray.serving.models.signature import Signature

_WANTED = '{"inputs": <one sample>}'


def predict_routes(predictor: Predictor, settings: HttpSettings) -> list[Route]:
    """Return the routes `POST /predict`, `GET /ping` and `POST /invocations`."""

    async def predict(request: Request) -> Response:
        call = call_of(request.scope)
        body = await read_body(request.receive, settings.max_body_bytes)
        endpoint, version = predictor.choose_by_request(request, call)
        if version.codec.decodes and not _is_json(kind := _kind(call)):
            value, field = bytes(body), f"the body ({kind})"
        else:
            whole = parse_object(body, settings.max_json_depth, _WANTED)
            for name in whole:
                if name != "inputs":
                    raise wrong_input(name[:100], f"the one field inputs: {_WANTED}", "a field that is not known")
            if "inputs" not in whole:
                raise wrong_input("inputs", _sample_in_words(version.signature), "nothing")
            value, field = whole["inputs"], "inputs"
        sample = await version.codec.sample_of(value, field=field, deadline_s=call.deadline_s)
        output, answered = await predictor.answer(request, call, endpoint, version, sample)
        return json_answer(to_json({"outputs": await answered.codec.answer_of(output)}))

    async def ping(_: Request) -> Response:
        predictor.check_ready()
        return json_answer(b'{"status":"ok"}\n')

    async def invocations(request: Request) -> Response:
        call = call_of(request.scope)
        body = await read_body(request.receive, settings.max_body_bytes)
        endpoint, version = predictor.choose_by_request(request, call)
        if _kind(call) == "text/csv":
            rows = rows_of_csv(body, version.signature)
        else:
            value = parse_object(body, settings.max_json_depth, '{"inputs": <list of samples>}')
            rows = rows_of_json(value, version.signature)
        predictor.check_number(len(rows), version)
        sample_of, deadline_s = version.codec.sample_of, call.deadline_s
        samples = await all_of(sample_of(row, field=place, deadline_s=deadline_s) for place, row in rows)
        outputs, answered = await predictor.answer_all(request, call, endpoint, version, samples)
        return json_answer(to_json({"predictions": await all_of(map(answered.codec.answer_of, outputs))}))

    return [
        Route("/predict", predict, methods=["POST"]),
        Route("/ping", ping, methods=["GET"]),
        Route("/invocations", invocations, methods=["POST"]),
    ]


def _kind(call: Call) -> str:
    return call.headers.get(b"content-type", b"").partition(b";")[0].strip().lower().decode("latin-1")


def _is_json(kind: str) -> bool:
    return kind in ("", "application/json", "application/x-www-form-urlencoded") or kind.endswith("+json")


def _sample_in_words(signature: Signature) -> str:
    if "decode" in signature.own_forms:
        return "what the task of the model decodes"
    if len(signature.inputs) == 1:
        return str(signature.inputs[0])
    return "an object with " + ", ".join(f"{spec.name} ({spec})" for spec in signature.inputs)
