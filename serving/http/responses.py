"""Responses and their JSON bodies."""

from __future__ import annotations

from typing import Any

import numpy as np
import orjson
from starlette.responses import Response


def json_answer(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Return a response with values and arrays as JSON."""
    return Response(to_json(value), status, headers, media_type="application/json")


def to_json(value: Any) -> bytes:
    """Return values and arrays as a line of JSON; its line end puts a terminal's prompt below it."""
    return orjson.dumps(value, default=_plain, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE)


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise TypeError(f"no JSON for a {type(value).__name__}")
