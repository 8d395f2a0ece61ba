"""The choice of what to send to an endpoint: given by the user, else by the endpoint's own description."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from orchestray.loadtest.example import openapi_body, posts, v2_body
from orchestray.loadtest.exchange import exchange
from orchestray.loadtest.plan import Target, parse_url
from orchestray.loadtest.results import EndpointError
from orchestray.platform.errors import ConfigError

_USUAL_PATH = "/predict"
_METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
_NO_BODY = {"GET", "DELETE", "OPTIONS"}
_REFUSED = {401, 403}
_TOKEN = "Give it with --token, or in the environment variable ORCHESTRAY_TOKEN."  # noqa: S105 - a hint


def find_target(
    url: str,
    *,
    body_files: Sequence[Path] = (),
    method: str | None = None,
    headers: Sequence[tuple[str, str]] = (),
    verify: bool = True,
    timeout_s: float = 30.0,
) -> tuple[Target, str]:
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

    Returns:
        A target with something to send, and the source of that in words.

    Raises:
        ConfigError: the URL or a file is wrong.
        EndpointError: the endpoint does not answer, or does not describe what it expects.
    """
    name = (method or "POST").upper()
    target = replace(parse_url(url), headers=tuple(headers), verify=verify, method=name)
    if name not in _METHODS:
        raise ConfigError(f"--method: must be one of {', '.join(_METHODS)}, got {method!r}")
    if name in _NO_BODY:
        if body_files:
            raise ConfigError(f"--body: {name} is sent without one")
        return target, f"{name} without a body"
    if body_files:
        try:
            bodies = tuple(file.read_bytes() for file in body_files)
        except OSError as error:
            raise ConfigError(f"--body {error.filename}: cannot be read: {error.strerror}") from None
        return replace(target, bodies=bodies), ", ".join(map(str, body_files))
    if target.path.startswith("/v2/models/"):
        return _by_metadata(target, timeout_s)
    return _by_openapi(target, timeout_s)


def _by_openapi(target: Target, timeout_s: float) -> tuple[Target, str]:
    where = f"{target.host}:{target.port}"
    document = _get_json(target, "/openapi.json", timeout_s)
    if document is None:
        raise EndpointError(
            f"{where} has no /openapi.json to take an example from. "
            "Give what to send with --body FILE (or --method GET)."
        )
    paths, path = posts(document), target.path
    listed = ", ".join(f"POST {each}" for each in paths) or "no POST with a JSON body"
    if path == "/":
        if _USUAL_PATH not in paths and len(paths) != 1:
            raise EndpointError(
                f"Which path of {where} is to be measured? Its /openapi.json has {listed}; "
                f"write it in the URL, as in {target.url.rstrip('/')}{(*paths, _USUAL_PATH)[0]}"
            )
        path = _USUAL_PATH if _USUAL_PATH in paths else paths[0]
    body = openapi_body(document, path)
    if body is None:
        raise EndpointError(
            f"The /openapi.json of {where} has no JSON body for POST {path}. "
            f"It has {listed}; or give what to send with --body FILE."
        )
    return _with_json(target, path, body), "the example in /openapi.json"


def _by_metadata(target: Target, timeout_s: float) -> tuple[Target, str]:
    model = target.path.split("?")[0].removesuffix("/").removesuffix("/infer")
    try:
        body = v2_body(_get_json(target, model, timeout_s))
    except (TypeError, KeyError, ValueError):
        raise EndpointError(
            f"GET {model} of {target.host}:{target.port} gives no metadata of a model (Open Inference Protocol v2): "
            "is there a model of that name? Or give what to send with --body FILE."
        ) from None
    return _with_json(target, f"{model}/infer", body), f"zeros, as GET {model} describes the inputs"


def _with_json(target: Target, path: str, body: Any) -> Target:
    return replace(target, path=path, bodies=(json.dumps(body, separators=(",", ":")).encode(),))


def _get_json(target: Target, path: str, timeout_s: float) -> Any:
    """Return the answer to a GET of this path; None if it is missing, or not a JSON object."""
    answer = exchange(target, path=path, timeout_s=timeout_s)
    if answer.status in _REFUSED:
        where = f"{target.host}:{target.port}"
        raise EndpointError(f"{where} answered {answer.status} to GET {path}: it wants a token. {_TOKEN}")
    value = answer.json() if answer.ok else None
    return value if isinstance(value, dict) else None


def probe(target: Target, *, timeout_s: float) -> None:
    """Send the request once, and check that the answer is a success.

    Raises:
        EndpointError: it is not; the text quotes the answer.
    """
    answer = exchange(target, timeout_s=timeout_s)
    if answer.status in _REFUSED:
        raise EndpointError(f"{target.url} answered {answer.status}: it wants a token, or another one. {_TOKEN}")
    if not answer.ok:
        said = f": {answer.text()}" if answer.body else "."
        if answer.status < 500:
            said += " Another body can be given with --body FILE, another method with --method."
        raise EndpointError(f"{target.url} answered {answer.status} to the request that was to be measured{said}")
