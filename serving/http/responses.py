"""Responses and their JSON bodies."""

from __future__ import annotations

from typing import Any

import numpy as np
import orjson
from starlette.responses import Response

from orchestray.serving.models.signature import Output


def json_answer(body: bytes, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Return a response whose JSON text exists already."""
    return Response(body, status, headers, media_type="application/json")


def outputs_json(output: Output) -> bytes:
    """Return `{"outputs": ...}`: the value alone if the model has one output, else values by name.

    Arrays become text without lists of Python numbers in between; values that are not finite become null.
    """
    value = next(iter(output.values())) if len(output) == 1 else output
    return to_json({"outputs": value})


def to_json(value: Any) -> bytes:
    """Return values and arrays as a line of JSON; its line end puts a terminal's prompt below it."""
    return orjson.dumps(value, default=_plain, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE)


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise TypeError(f"no JSON for a {type(value).__name__}")
