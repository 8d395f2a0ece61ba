"""`orchestray serve` as a user types it, and what it says of itself."""

from __future__ import annotations

import json
import signal
import ssl
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from http.client import HTTPException
from pathlib import Path
from typing import Any

from support.cli import COMMAND, outside
from support.patience import PATIENCE_S


class Endpoint:
    """`orchestray serve ...`, ready.

    Args:
        arguments: of the command.
        cwd: where it is typed.
        local: True: without Ray.
        env: in addition to this process's.
        certificate: the one to trust, where it answers over HTTPS.
    """

    def __init__(
        self,
        *arguments: str | Path,
        cwd: Path,
        local: bool = True,
        env: dict[str, str] | None = None,
        certificate: str | None = None,
    ) -> None:
        self.tls = None if certificate is None else ssl.create_default_context(cafile=certificate)
        self.process = subprocess.Popen(
            [*COMMAND, "serve", *map(str, arguments), "--json", "--port", "0", *(["--local"] if local else [])],
            cwd=cwd,
            env={**outside(), **(env or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise AssertionError(self.process.communicate())
        self.started = line
        self.url: str = json.loads(line)["url"]

    def ask(self, **headers: str) -> int:
        """Return the status of an answer, or 0 if the connection broke."""
        try:
            with self._asked([0.0] * 64, headers) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code
        except (OSError, HTTPException):
            return 0

    def predict(self, inputs: Any) -> Any:
        """Return the outputs for one sample; fail if it is answered with an error."""
        try:
            with self._asked(inputs, {}) as answer:
                return json.load(answer)["outputs"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{error}: {error.read().decode()}") from error

    def _asked(self, inputs: Any, headers: Mapping[str, str]) -> Any:
        body = json.dumps({"inputs": inputs}).encode()
        request = urllib.request.Request(  # noqa: S310
            f"{self.url}/predict", body, {"content-type": "application/json", **headers}
        )
        return urllib.request.urlopen(request, timeout=PATIENCE_S, context=self.tls)  # noqa: S310

    def end(self, number: signal.Signals) -> tuple[int, str]:
        self.process.send_signal(number)
        _, stderr = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode, stderr


def asked(endpoint: Endpoint, count: int, **headers: str) -> list[int]:
    """Return the statuses of `count` requests, sent all at once."""
    statuses: list[int] = []
    asking = [threading.Thread(target=lambda: statuses.append(endpoint.ask(**headers))) for _ in range(count)]
    for each in asking:
        each.start()
    for each in asking:
        each.join(PATIENCE_S)
    return statuses


def until_replicas(endpoint: Endpoint, count: int) -> None:
    """Wait until the front has `count` replicas: it hears of new and of lost ones late."""
    deadline_s = time.monotonic() + PATIENCE_S
    while num_replicas(endpoint) != count:
        assert time.monotonic() < deadline_s, f"there are never {count} replicas"
        time.sleep(0.05)


def num_replicas(endpoint: Endpoint) -> int:
    return sum(metric(endpoint, "orchestray_replicas").values())


def metric(endpoint: Endpoint, name: str, **headers: str) -> dict[str, int]:
    """Return the whole numbers of a metric in /metrics, by their labels."""
    request = urllib.request.Request(f"{endpoint.url}/metrics", headers=headers)  # noqa: S310
    with urllib.request.urlopen(request, timeout=PATIENCE_S, context=endpoint.tls) as answer:  # noqa: S310
        lines = answer.read().decode().splitlines()
    found = (line[len(name) :].rpartition(" ") for line in lines if line.startswith(f"{name}{{"))
    return {labels: int(float(value)) for labels, _, value in found}
