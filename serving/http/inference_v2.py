"""Routes of the Open Inference Protocol v2 (KServe, Triton): `/v2/...`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from orchestray.serving.http.body import parse_object, read_body
from orchestray.serving.http.predictor import Predictor, named_in_path
from orchestray.serving.http.problems import HttpProblem, wrong_input
from orchestray.serving.http.request_context import SCOPE_KEY, Call
from orchestray.serving.http.responses import json_answer, to_json
from orchestray.serving.http.settings import HttpSettings
from orchestray.serving.http.tensors import (
    Array,
    datatype_of,
    parameter,
    read_tensor,
    write_tensor,
    write_texts,
)
from orchestray.serving.models.errors import UnknownModelError
from orchestray.serving.models.signature import ANY, Output, Sample, Signature, boxed, kind_of
from orchestray.serving.routing.endpoint import ModelVersion
from orchestray.serving.routing.registry import Registry

_JSON_LENGTH = "Inference-Header-Content-Length"
_WANTED = '{"inputs": [{"name": ..., "shape": [...], "datatype": ..., "data": [...]}]}'


def v2_routes(predictor: Predictor, settings: HttpSettings, version_text: str) -> list[Route]:
    """Return all routes of the protocol; those of a model also as `/v2/models/{name}/versions/{version}/...`.

    Args:
        predictor: answers the requests.
        settings: limits and tokens.
        version_text: version of the server.
    """
    models = predictor.models

    async def server(_: Request) -> Response:
        extensions = ["binary_tensor_data", "classification"]
        return json_answer({"name": "orchestray", "version": version_text, "extensions": extensions})

    async def live(_: Request) -> Response:
        return json_answer({"live": True})

    async def ready(_: Request) -> Response:
        predictor.check_ready()
        return json_answer({"ready": True})

    async def model_ready(request: Request) -> Response:
        name, version = named_in_path(request)
        predictor.check_ready(_versions_of(models, name, version, names_others=not settings.tokens))
        return json_answer({"name": name, "ready": True})

    async def metadata(request: Request) -> Response:
        name, version = named_in_path(request)
        endpoint = models[name]
        signature = endpoint.signature if version is None else endpoint.pick(version).signature
        return json_answer(_metadata(signature, [each.version for each in endpoint.versions]))

    async def infer(request: Request) -> Response:
        call: Call = request.scope[SCOPE_KEY]
        body = await read_body(request.receive, settings.max_body_bytes)
        endpoint, version = predictor.choose(call, *named_in_path(request))
        head, blob = _divide(body, call)
        samples = _samples(head, blob, version)
        wanted = _wanted_outputs(head, version.signature)
        outputs, answered = await predictor.answer(request, call, endpoint, version, samples)
        if answered is not version:
            wanted = _wanted_outputs(head, answered.signature)
        return _answer(call, head.get("id"), outputs, wanted, answered.signature.class_names)

    routes = [
        Route("/v2", server, methods=["GET"]),
        Route("/v2/health/live", live, methods=["GET"]),
        Route("/v2/health/ready", ready, methods=["GET"]),
    ]
    for prefix in ("/v2/models/{name}", "/v2/models/{name}/versions/{version}"):
        routes += [
            Route(f"{prefix}/infer", infer, methods=["POST"]),
            Route(prefix, metadata, methods=["GET"]),
            Route(f"{prefix}/ready", model_ready, methods=["GET"]),
        ]
    return routes


def _versions_of(models: Registry, name: str, version: str | None, *, names_others: bool) -> Sequence[ModelVersion]:
    """Return the versions to which a request for the health of a model refers.

    Raises:
        UnknownModelError, HttpProblem: no such model; without a token the error does not list those that exist.
    """
    try:
        endpoint = models[name]
        return endpoint.answering if version is None else [endpoint.pick(version)]
    except UnknownModelError:
        if names_others:
            raise
        raise HttpProblem(404, "There is no such model, or not in that version.") from None


def _metadata(signature: Signature, versions: Sequence[str]) -> dict[str, Any]:
    inputs, outputs = (
        [
            {
                "name": s.name,
                "datatype": datatype_of(s.dtype),
                "shape": [-1, *(-1 if size is None else size for size in s.shape), *([1] if s.dtype == ANY else [])],
            }
            for s in specs
        ]
        for specs in (signature.inputs, signature.outputs)
    )
    return {
        "name": signature.name,
        "versions": list(versions),
        "platform": "pytorch",
        "inputs": inputs,
        "outputs": outputs,
    }


def _divide(body: bytes, call: Call) -> tuple[dict[str, Any], memoryview]:
    """Split a body into its JSON object and the bytes behind that."""
    whole, given = memoryview(body), call.headers.get(_JSON_LENGTH.lower().encode())
    num_json = len(body)
    if given is not None:
        if not given.isdigit() or len(given) > 20 or int(given) > len(body):
            raise wrong_input(_JSON_LENGTH, f"a number of bytes up to the body's {len(body)}", repr(given[:40]))
        num_json = int(given)
    return parse_object(whole[:num_json], _WANTED), whole[num_json:]


def _samples(head: dict[str, Any], blob: memoryview, version: ModelVersion) -> list[Sample]:
    """Return the samples of a request, whose tensors have a batch dimension before those of the model."""
    given, signature = head.get("inputs"), version.signature
    if not isinstance(given, list):
        raise wrong_input("inputs", "a list of tensors", "nothing" if given is None else kind_of(given))
    arrays: dict[str, Array] = {}
    for index, tensor in enumerate(given):
        name, array, num_bytes = read_tensor(tensor, f"inputs[{index}]", blob)
        blob = blob[num_bytes:]
        if name in arrays:
            raise wrong_input(f"inputs[{index}].name", "each name once", repr(name[:60]))
        arrays[name] = array
    if len(blob):
        raise wrong_input("the body", "no bytes behind those of the tensors", f"{len(blob)} more")
    _check_shapes(arrays, signature)
    num_samples = len(next(iter(arrays.values())))
    Predictor.check_number(num_samples, version)
    alone = len(signature.inputs) == 1
    rows = [{name: _row(array, row) for name, array in arrays.items()} for row in range(num_samples)]
    return [
        signature.parse(next(iter(row.values())) if alone else row, field=f"inputs (sample {index})")
        for index, row in enumerate(rows)
    ]


def _row(array: Array, row: int) -> Array:
    return boxed(array[row]) if array.dtype == object else np.asarray(array[row])


def _check_shapes(arrays: dict[str, Array], signature: Signature) -> None:
    wanted = {spec.name: spec for spec in signature.inputs}
    names = ", ".join(wanted)
    for name, array in arrays.items():
        if name not in wanted:
            raise wrong_input("inputs", f"tensors named {names}", f"one named {name[:60]!r}")
        spec = wanted[name]
        if spec.dtype == ANY and array.shape[1:] == (1,):
            array = arrays[name] = array[:, 0]
        if (array.dtype == object) != (spec.dtype == ANY):
            raise wrong_input(f"inputs.{name}.datatype", datatype_of(spec.dtype), datatype_of(str(array.dtype)))
        if not array.shape or not spec.takes(array.shape[1:]):
            sizes = ("any" if size is None else str(size) for size in spec.shape)
            shape = f"[{', '.join(['samples', *sizes])}]"
            raise wrong_input(f"inputs.{name}.shape", shape, str(list(array.shape)))
    mask = None if signature.padding is None else signature.padding.mask
    for name in wanted:
        if name not in arrays and name != mask:
            raise wrong_input("inputs", f"tensors named {names}", f"none named {name!r}")
    if len({len(array) for array in arrays.values()}) > 1:
        raise wrong_input("inputs", "tensors of as many samples each", "different numbers of samples")


@dataclass(frozen=True)
class _Wanted:
    """The form in which an output is to be sent."""

    binary: bool
    num_classes: int = 0
    """Number of the likeliest classes to send instead of the scores; 0: the scores."""


def _wanted_outputs(head: dict[str, Any], signature: Signature) -> dict[str, _Wanted]:
    """Return the outputs to send by name."""
    binary = parameter(head, "binary_data_output") is True
    specs = {spec.name: spec for spec in signature.outputs}
    asked = head.get("outputs")
    if asked is None or asked == []:
        return dict.fromkeys(specs, _Wanted(binary))
    if not isinstance(asked, list):
        raise wrong_input("outputs", "a list of outputs", kind_of(asked))
    wanted = {}
    for index, output in enumerate(asked):
        name = output.get("name") if isinstance(output, dict) else None
        if not isinstance(name, str) or name not in specs:
            raise wrong_input(f"outputs[{index}].name", f"one of {', '.join(specs)}", repr(name)[:60])
        count = parameter(output, "classification") or 0
        if type(count) is not int or count < 0 or (count and len(specs[name].shape) != 1):
            place, scores = f"outputs[{index}].parameters.classification", "of an output of one score a class"
            raise wrong_input(place, f"a number of classes, {scores}", f"{count!r}"[:60] + f" of {specs[name]}")
        chosen = parameter(output, "binary_data")
        wanted[name] = _Wanted(binary if chosen is None else chosen is True, count)
    return wanted


def _classes(scores: Array, count: int, names: Sequence[Any]) -> list[list[str]]:
    """Return the likeliest classes of each row of scores as `score:index`, with `:name` where names are known.

    See https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_classification.md.
    """
    order = np.argsort(-scores.astype(np.float64), axis=1, kind="stable")[:, :count]
    names = names if len(names) == scores.shape[1] else ()
    return [
        [f"{row[index]:f}:{index}" + (f":{names[index]}" if names else "") for index in best]
        for row, best in zip(scores, order, strict=True)
    ]


def _stacked(name: str, outputs: Sequence[Output]) -> Array:
    """Return one output of all samples; arrays of different forms, which a user's class may return, boxed.

    Whole numbers beside others become floats, since a tensor has one type; truth values do not become numbers.
    """
    arrays = [output.get(name, boxed(None)) for output in outputs]
    if len({(array.dtype.kind in "fiu", array.shape) for array in arrays}) > 1:
        arrays = [array if array.dtype == object else boxed(array.tolist()) for array in arrays]
    return np.stack(arrays)


def _answer(
    call: Call, request_id: Any, outputs: Sequence[Output], wanted: dict[str, _Wanted], class_names: Sequence[Any]
) -> Response:
    tensors, blobs = [], []
    for name, form in wanted.items():
        array = _stacked(name, outputs)
        if array.dtype == object:
            texts = [[value if isinstance(value, str) else to_json(value).decode().rstrip()] for value in array.flat]
            tensor, blob = write_texts(name, texts, binary=form.binary)
        elif form.num_classes:
            tensor, blob = write_texts(name, _classes(array, form.num_classes, class_names), binary=form.binary)
        else:
            tensor, blob = write_tensor(name, array, binary=form.binary)
        tensors.append(tensor)
        blobs.append(blob)
    head = {"model_name": call.model, "model_version": call.version, "outputs": tensors}
    if isinstance(request_id, str):
        head["id"] = request_id
    if not any(form.binary for form in wanted.values()):
        return json_answer(head)
    text = to_json(head)
    headers = {_JSON_LENGTH: str(len(text))}
    return Response(b"".join([text, *blobs]), headers=headers, media_type="application/octet-stream")
