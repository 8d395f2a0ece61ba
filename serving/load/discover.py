"""Finds what to send to an endpoint: what the user gave, else what the endpoint says of itself."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from orchestray.platform.errors import ConfigError
from orchestray.serving.load.errors import EndpointError
from orchestray.serving.load.example import openapi_body, posts, v2_body
from orchestray.serving.load.exchange import exchange, parse_url
from orchestray.serving.load.plan import Target

_USUAL_PATH = "/predict"
_METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
_NO_BODY = {"GET", "DELETE", "OPTIONS"}


@dataclass(frozen=True)
class Found:
    """A target with something to send, and where that comes from."""

    target: Target
    source: str


def find_target(
    url: str,
    *,
    body_files: Sequence[Path] = (),
    method: str | None = None,
    headers: Sequence[tuple[str, str]] = (),
    verify: bool = True,
    timeout_s: float = 30.0,
) -> Found:
    """Find out what to send to this URL.

    With files, their contents in turns. Else, for a URL with a path, the example in the server's `/openapi.json` for
    that path, or, for `/v2/models/NAME`, one made from the model's metadata; for a URL without one, the example of
    `/predict`, or of the only path that takes JSON.

    Raises:
        ConfigError: the URL or a file is wrong.
        EndpointError: the endpoint does not answer, or does not say what it wants.
    """
    target = replace(parse_url(url), headers=tuple(headers), verify=verify)
    if method is not None:
        if method.upper() not in _METHODS:
            raise ConfigError(f"--method: must be one of {', '.join(_METHODS)}, got {method!r}")
        target = replace(target, method=method.upper())
    if target.method in _NO_BODY and body_files:
        raise ConfigError(f"--body: {target.method} is sent without one")
    if target.method in _NO_BODY:
        return Found(target, f"{target.method} without a body")
    if body_files:
        shown = ", ".join(str(file) for file in body_files)
        return Found(replace(target, bodies=tuple(_read(file) for file in body_files)), shown)
    return _ask(target, timeout_s)


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise ConfigError(f"--body {file}: cannot be read: {error.strerror}") from None


def _ask(target: Target, timeout_s: float) -> Found:
    if target.path.startswith("/v2/models/"):
        return _ask_v2(target, timeout_s)
    document = _get_json(target, "/openapi.json", timeout_s)
    if document is None:
        raise EndpointError(
            f"{target.host}:{target.port} has no /openapi.json to take an example from. "
            "Give what to send with --body FILE (or --method GET)."
        )
    path = target.path if target.path != "/" else _choose(document, target)
    body = openapi_body(document, path)
    if body is None:
        raise EndpointError(
            f"The /openapi.json of {target.host}:{target.port} has no JSON body for POST {path}. "
            f"It has {_listed(posts(document))}; or give what to send with --body FILE."
        )
    made = replace(target, path=path, bodies=(json.dumps(body, separators=(",", ":")).encode(),))
    return Found(made, "the example in /openapi.json")


def _choose(document: Any, target: Target) -> str:
    paths = posts(document)
    if _USUAL_PATH in paths:
        return _USUAL_PATH
    if len(paths) == 1:
        return paths[0]
    raise EndpointError(
        f"Which path of {target.host}:{target.port} is to be measured? Its /openapi.json has {_listed(paths)}; "
        f"write it in the URL, as in {target.url.rstrip('/')}{paths[0] if paths else _USUAL_PATH}"
    )


def _listed(paths: Sequence[str]) -> str:
    return ", ".join(f"POST {path}" for path in paths) if paths else "no POST with a JSON body"


def _ask_v2(target: Target, timeout_s: float) -> Found:
    model = target.path.split("?")[0].removesuffix("/").removesuffix("/infer")
    metadata = _get_json(target, model, timeout_s)
    try:
        body = v2_body(metadata)
    except (TypeError, KeyError, ValueError):
        raise EndpointError(
            f"GET {model} of {target.host}:{target.port} gives no metadata of a model (Open Inference Protocol v2): "
            "is there a model of that name? Or give what to send with --body FILE."
        ) from None
    made = replace(target, path=f"{model}/infer", bodies=(json.dumps(body, separators=(",", ":")).encode(),))
    return Found(made, f"zeros, as GET {model} describes the inputs")


def _get_json(target: Target, path: str, timeout_s: float) -> Any:
    """What a GET of this path answers; None where it is no JSON object, or not there."""
    answer = exchange(target, path=path, timeout_s=timeout_s)
    if answer.status in {401, 403}:
        raise EndpointError(
            f"{target.host}:{target.port} answered {answer.status} to GET {path}: it wants a token. "
            "Give it with --token, or in the environment variable ORCHESTRAY_TOKEN."
        )
    value = answer.json() if answer.ok else None
    return value if isinstance(value, dict) else None
