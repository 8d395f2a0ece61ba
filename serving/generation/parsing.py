"""The body of `POST /generate`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from orchestray.serving.generation.sampling import MOST_STOPS, Sampling
from orchestray.serving.models.errors import InputError
from orchestray.serving.models.signature import kind_of

_LARGEST = 2**63 - 1
_DEFAULT_TOKENS = 64

_SCHEMA: Mapping[str, Any] = {
    "type": "object",
    "required": ["prompt"],
    "additionalProperties": False,
    "properties": {
        "prompt": {"type": "string", "minLength": 1},
        "model": {"type": "string", "description": "of several models, which"},
        "version": {"type": ["string", "integer"], "description": "of its versions, which; default: by their traffic"},
        "max_tokens": {"type": "integer", "minimum": 1},
        "temperature": {"type": "number", "minimum": 0, "default": 0, "description": "0: the likeliest token"},
        "top_k": {"type": "integer", "minimum": 0, "maximum": _LARGEST, "default": 0, "description": "0: all tokens"},
        "top_p": {
            "type": "number",
            "exclusiveMinimum": 0,
            "maximum": 1,
            "default": 1,
            "description": "draw among the likeliest tokens that have this probability together",
        },
        "seed": {"type": "integer", "minimum": 0, "maximum": _LARGEST, "description": "the same seed, the same answer"},
        "stop": {
            "type": "array",
            "maxItems": MOST_STOPS,
            "items": {"type": "string", "minLength": 1},
            "description": "texts that end the answer",
        },
        "stream": {"type": "boolean", "default": False, "description": "answer by server-sent events"},
    },
    "example": {"prompt": "import ", "max_tokens": 32, "temperature": 0.8, "top_k": 20, "seed": 1},
}


def schema_of(most_tokens: int, most_prompt_bytes: int) -> dict[str, Any]:
    """Return the JSON Schema of the body.

    Args:
        most_tokens: largest number of tokens that a request may ask for.
        most_prompt_bytes: largest prompt, in bytes of UTF-8.
    """
    properties = dict(_SCHEMA["properties"])
    description = f"the text to go on from, of {most_prompt_bytes} bytes in UTF-8 at most"
    properties["prompt"] = {**properties["prompt"], "maxLength": most_prompt_bytes, "description": description}
    limits = {"maximum": most_tokens, "default": min(_DEFAULT_TOKENS, most_tokens)}
    properties["max_tokens"] = {**properties["max_tokens"], **limits}
    example = _SCHEMA["example"]
    shown = {"prompt": example["prompt"][:most_prompt_bytes], "max_tokens": min(example["max_tokens"], most_tokens)}
    example = {**example, **shown}
    return {**_SCHEMA, "properties": properties, "example": example}


@dataclass(frozen=True)
class Asked:
    """The fields of a request."""

    prompt: str
    sampling: Sampling
    is_streaming: bool
    model: str | None
    version: str | None


def parse(body: Mapping[str, Any], most_tokens: int, most_prompt_bytes: int) -> Asked:
    """Parse a body field by field.

    Args:
        body: a JSON object.
        most_tokens: largest number of tokens that a request may ask for.
        most_prompt_bytes: largest prompt, in bytes of UTF-8.

    Raises:
        InputError: names the first field that is invalid.
    """
    known = _SCHEMA["properties"]
    for name in body:
        if name not in known:
            raise InputError(name, f"one of {', '.join(known)}", "a name that is none of them")
    if "prompt" not in body:
        raise InputError("prompt", "text", "nothing")
    prompt = _text(body["prompt"], "prompt")
    seed, model, version = body.get("seed"), body.get("model"), body.get("version")
    max_tokens = _whole(body, "max_tokens", min(_DEFAULT_TOKENS, most_tokens))
    sampling = Sampling(
        max_tokens=max_tokens,
        temperature=_number(body, "temperature", 0.0),
        top_k=_whole(body, "top_k", 0),
        top_p=_number(body, "top_p", 1.0),
        seed=None if seed is None else _whole(body, "seed", 0),
        stop=_texts(body, "stop"),
    )
    asked = Asked(
        prompt=prompt,
        sampling=sampling,
        is_streaming=_flag(body, "stream"),
        model=None if model is None else _text(model, "model"),
        version=None if version is None else _version(version),
    )
    check_limits(asked, most_tokens, most_prompt_bytes)
    return asked


def check_limits(asked: Asked, most_tokens: int, most_prompt_bytes: int) -> None:
    """Check a request against the endpoint's limits (see `parse`).

    Raises:
        InputError: a limit is exceeded.
    """
    # Each token takes memory for the life of the request, and time of the loop that all requests share.
    num_bytes = len(asked.prompt.encode())
    if num_bytes > most_prompt_bytes:
        limit = f"text of at most {most_prompt_bytes} bytes (generation.max_prompt_bytes)"
        raise InputError("prompt", limit, f"{num_bytes} bytes")
    if asked.sampling.max_tokens > most_tokens:
        raise InputError("max_tokens", f"a whole number from 1 to {most_tokens}", str(asked.sampling.max_tokens))


def _version(value: Any) -> str:
    """Return a version as text: it is a number in a config, and text in answers."""
    return value if isinstance(value, str) else str(_whole({"version": value}, "version", 0))


def _whole(body: Mapping[str, Any], name: str, default: int) -> int:
    value = body.get(name, default)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise InputError(name, "a whole number", shown(value))
    if value > _LARGEST:
        raise InputError(name, f"a whole number up to {_LARGEST}", "more")
    return value


def _number(body: Mapping[str, Any], name: str, default: float) -> float:
    value = body.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InputError(name, "a number", shown(value))
    return float(value)


def _flag(body: Mapping[str, Any], name: str) -> bool:
    value = body.get(name, False)
    if not isinstance(value, bool):
        raise InputError(name, "true or false", shown(value))
    return value


def _texts(body: Mapping[str, Any], name: str) -> tuple[str, ...]:
    value = body.get(name)
    if value is None:
        return ()
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list):
        raise InputError(name, "a list of texts", shown(value))
    return tuple(_text(each, f"{name}[{index}]") for index, each in enumerate(value))


def _text(value: Any, field: str) -> str:
    if not isinstance(value, str):
        raise InputError(field, "text", shown(value))
    return value


def shown(value: Any) -> str:
    """Describe a JSON value in words."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return f"the number {value}" if is_number else kind_of(value)
