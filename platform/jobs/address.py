"""The address of a cluster's job server, requests to it, and its token; all without importing Ray."""

from __future__ import annotations

import contextlib
import json
import os
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from orchestray.platform.errors import ClusterError, ConfigError

ADDRESS_VARIABLE = "RAY_API_SERVER_ADDRESS"

_ANSWER_TIMEOUT_S = 15.0


def job_address(address: str | None) -> str:
    """Return the URL of the job server that `address`, or else the environment, names.

    Raises:
        ConfigError: no address is given, or it has another form.
    """
    given = address or os.environ.get(ADDRESS_VARIABLE)
    if not given:
        raise ConfigError(
            f"No cluster is named. Give the address of its dashboard, --address http://HOST:8265, "
            f"or set {ADDRESS_VARIABLE}."
        )
    url = (given if "://" in given else f"http://{given}").rstrip("/")
    try:
        parts = urlsplit(url)
        usable = parts.scheme in {"http", "https"} and parts.hostname not in {None, "auto", "local"} and parts.port != 0
    except ValueError:
        usable = False
    if not usable:
        raise ConfigError(
            f"The address {given!r} is not that of a job server. It looks like http://HOST:8265, "
            "and `ray start --head` prints it as that of the dashboard."
        )
    return url


def _token() -> str | None:
    """Return the token that Ray would find: RAY_AUTH_TOKEN, the file RAY_AUTH_TOKEN_PATH, ~/.ray/auth_token."""
    if os.environ.get("RAY_AUTH_TOKEN"):
        return os.environ["RAY_AUTH_TOKEN"].strip()
    path = os.environ.get("RAY_AUTH_TOKEN_PATH")
    with contextlib.suppress(OSError, RuntimeError):
        return (Path(path) if path else Path.home() / ".ray" / "auth_token").read_text(encoding="utf-8").strip() or None
    return None


def use_token() -> None:
    """Make Ray's client send the token, if there is one; call this before Ray is imported.

    A cluster requires a token if one was found at its start, but the client sends one only if RAY_AUTH_MODE says so.
    """
    if not os.environ.get("RAY_AUTH_MODE") and _token():
        os.environ["RAY_AUTH_MODE"] = "token"


def headers() -> dict[str, str]:
    """Return the headers of every request: the token, if Ray's client would send it."""
    token = _token() if os.environ.get("RAY_AUTH_MODE", "").lower() == "token" else None
    return {"Authorization": f"Bearer {token}"} if token else {}


def ask(address: str, path: str, *, method: str = "GET", timeout_s: float | None = None) -> Any:
    """Return the server's answer to a request, which is JSON; raises what `urlopen` does."""
    request = urllib.request.Request(f"{address}/api/{path}", headers=headers(), method=method)  # noqa: S310 - http(s)
    with urllib.request.urlopen(request, timeout=timeout_s or _ANSWER_TIMEOUT_S) as response:  # noqa: S310
        return json.load(response)


def check_answers(address: str) -> str:
    """Return the server's Ray version, within seconds; Ray's client would wait far longer."""
    try:
        return str(ask(address, "version")["ray_version"])
    except urllib.error.HTTPError as error:
        if error.code in {401, 403}:
            raise ClusterError(token_refused(address)) from error
        reason = f"it answered {error.code} {error.reason}"
    except urllib.error.URLError as error:
        raise ClusterError(_silent(address, error.reason)) from error
    except OSError as error:
        raise ClusterError(_silent(address, error)) from error
    except Exception as error:  # noqa: BLE001 - anything may listen there: not HTTP, not JSON, not of this form
        reason = f"its answer is not understood ({type(error).__name__})"
    raise ClusterError(
        f"What listens at {address} is not Ray's job server: {reason}. Give the address of the dashboard "
        "(port 8265 unless chosen otherwise), as `ray start --head` prints it."
    )


def _silent(address: str, reason: object) -> str:
    return (
        f"No Ray job server answers at {address} ({reason}). Start a cluster with `ray start --head`, or correct "
        f"--address (or {ADDRESS_VARIABLE}); it is that of the cluster's dashboard."
    )


def token_refused(address: str) -> str:
    mode = os.environ.get("RAY_AUTH_MODE", "")
    if mode and mode.lower() != "token":
        return f"The cluster at {address} asks for a token, and RAY_AUTH_MODE is {mode!r} here. Set it to token."
    where = "copy the file ~/.ray/auth_token of the machine it was started on to the same place here"
    if _token():
        return f"The cluster at {address} has another token than the one found here: {where}, or set RAY_AUTH_TOKEN."
    return f"The cluster at {address} asks for a token, and there is none here: {where}, or set RAY_AUTH_TOKEN."
