"""The choice of what to send to an endpoint: given by the user, else by the endpoint's own description."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from orchestray.loadtest.errors import EndpointError
from orchestray.loadtest.example import openapi_body, posts, v2_body
from orchestray.loadtest.exchange import exchange, parse_url
from orchestray.loadtest.plan import Target
from orchestray.platform.errors import ConfigError

_USUAL_PATH = "/predict"
_METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
_NO_BODY = {"GET", "DELETE", "OPTIONS"}


@dataclass(frozen=True)
class Found:
    """A target with something to send, and the source of that."""

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

    If files are given, their contents are sent in turns. For a URL with a path, it is the example for that path in the
    server's `/openapi.json`. For `/v2/models/NAME` it is made from the model's metadata. For a URL without a path, it
    is the example of `/predict`, or of the only path that takes JSON.

    Args:
        url: http or https URL.
        body_files: files to send.
        method: HTTP method; default: POST.
        headers: names and values sent with each request.
        verify: False: accept any certificate.
        timeout_s: time the endpoint has to answer.

    Raises:
        ConfigError: the URL or a file is wrong.
        EndpointError: the endpoint does not answer, or does not describe what it expects.
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
    """Return the answer to a GET of this path; None if it is missing, or not a JSON object."""
    answer = exchange(target, path=path, timeout_s=timeout_s)
    if answer.status in {401, 403}:
        raise EndpointError(
            f"{target.host}:{target.port} answered {answer.status} to GET {path}: it wants a token. "
            "Give it with --token, or in the environment variable ORCHESTRAY_TOKEN."
        )
    value = answer.json() if answer.ok else None
    return value if isinstance(value, dict) else None
