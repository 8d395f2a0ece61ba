"""Clients of an endpoint under Ray Serve, by real HTTP."""

from __future__ import annotations

import json
import re
import threading
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

from support.patience import PATIENCE_S, until

INPUTS = [0.5] * 64
"""A sample of the model `digits`."""


def ask(url: str, inputs: Any = INPUTS, headers: Mapping[str, str] = {}) -> Any:
    body = json.dumps({"inputs": inputs}).encode()
    request = urllib.request.Request(f"{url}/predict", body, {"content-type": "application/json", **headers})  # noqa: S310
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:  # noqa: S310
        return json.load(answer)["outputs"]


def num_replicas(url: str) -> int:
    with urllib.request.urlopen(f"{url}/metrics", timeout=PATIENCE_S) as answer:  # noqa: S310
        lines = answer.read().decode().splitlines()
    return sum(int(float(line.rpartition(" ")[2])) for line in lines if line.startswith("orchestray_replicas{"))


def pids_of_replicas(url: str) -> set[int]:
    """Return the processes of the replicas, as the endpoint names them."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=PATIENCE_S) as answer:  # noqa: S310
        text = answer.read().decode()
    return {int(pid) for pid in re.findall(r'^orchestray_replica_info\{.*pid="(\d+)"', text, re.MULTILINE)}


class Clients:
    """Clients that ask again and again, each when it was answered, until they are ended.

    A client tries again where nobody listens.
    """

    def __init__(self, url: str, count: int, inputs: Any = INPUTS) -> None:
        self.answers: list[Any] = []
        self.failures: list[str] = []
        self._url, self._inputs = url, inputs
        self._done = threading.Event()
        self._threads = [threading.Thread(target=self._work) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def _work(self) -> None:
        while not self._done.wait(0.02):
            try:
                self.answers.append(ask(self._url, self._inputs))
            except urllib.error.HTTPError as error:
                self.failures.append(f"{error.code}: {error.read().decode()}")
            except OSError:
                continue

    async def until_more(self, count: int) -> None:
        wanted = len(self.answers) + count
        await until("answers", lambda: len(self.answers) >= wanted)

    def end(self) -> None:
        self._done.set()
        for thread in self._threads:
            thread.join(PATIENCE_S)
