"""Behind HAProxy fronts share replicas that answer as the model does alone; one may be killed, and all change."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import pytest

from orchestray.platform.process.sockets import free_ports
from orchestray.serving.config.load import load_serve_config
from orchestray.serving.lifecycle import fronts
from orchestray.serving.lifecycle.fronts import FrontedEndpoint
from orchestray.serving.models.load import load_served_model
from support.patience import PATIENCE_S
from support.served import written_run

if TYPE_CHECKING:
    from orchestray.platform.cluster.cluster import Cluster


NAME = f"replicated-{os.getpid()}"
MINE = {"authorization": "Bearer mine"}
_PAUSE_S = 0.05
"""Between two requests of a client."""


def config_of(run: Path, port: int, replicas: int) -> dict[str, Any]:
    http = {"port": port, "fronts": 2, "host": "0.0.0.0", "proxy": "haproxy"}  # noqa: S104
    return {"name": NAME, "models": [{"name": "digits", "run": str(run)}], "replicas": replicas, "http": http}


def replica_pids(kind: str = "") -> list[int]:
    titles = {process.pid: process.info["cmdline"] for process in psutil.process_iter(["cmdline"])}
    return [pid for pid, title in titles.items() if title and f"ServeReplica:orchestray-{NAME}-{kind}" in title[0]]


def listeners(port: int) -> set[str]:
    """Return the names of the programs that take connections at a port."""

    def is_one(connections: Iterable[Any]) -> bool:
        return any(each.status == psutil.CONN_LISTEN and each.laddr.port == port for each in connections)

    processes = psutil.process_iter(["name", "net_connections"])
    return {each.info["name"] for each in processes if is_one(each.info["net_connections"] or ())}


def ask(port: int, path: str, body: str | None = None, headers: Mapping[str, str] = MINE) -> tuple[int, str]:
    """Return the status and the text of an answer; a request with a body is a POST."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    connection.request("GET" if body is None else "POST", path, body, {"content-type": "application/json", **headers})
    answer = connection.getresponse()
    found = answer.status, answer.read().decode()
    connection.close()
    return found


async def until(what: str, condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not await asyncio.to_thread(condition):
        assert time.monotonic() < deadline_s, f"{what}: never"
        await asyncio.sleep(0.05)


def test_behind_haproxy_two_fronts_answer_who_has_the_token_by_replicas_of_which_one_is_killed_and_all_are_replaced(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port, *of_haproxy = free_ports(3)
    names = ("RAY_SERVE_HAPROXY_STATS_PORT", "RAY_SERVE_HAPROXY_METRICS_PORT")
    for name, own in zip(names, of_haproxy, strict=True):
        monkeypatch.setitem(fronts._HAPROXY, name, str(own))
    monkeypatch.setenv("ORCHESTRAY_TOKEN", "mine")
    runs = [written_run(tmp_path, f"run-{seed}", seed=seed) for seed in range(2)]
    models = [load_served_model(run) for run in runs]
    wanted = [model.run([model.parse(model.example)])[0] for model in models]
    body = json.dumps({"inputs": models[0].example})
    answers: list[tuple[int, Any]] = []
    done = threading.Event()

    fronts_seen: set[str] = set()

    def client() -> None:
        while not done.wait(_PAUSE_S):
            status, text = ask(port, "/predict", body)
            answers.append((status, json.loads(text)))

    def both_fronts_are_seen() -> bool:
        found = re.findall(r'orchestray_requests_total{front="(.+?)".*status="200"', ask(port, "/metrics")[1])
        fronts_seen.update(found)
        return len(fronts_seen) == 2

    async def until_more(count: int) -> None:
        wanted = len(answers) + count
        await until("answers", lambda: len(answers) >= wanted)

    async def scenario() -> None:
        live = FrontedEndpoint(load_serve_config(config_of(runs[0], port, replicas=2)), port)
        clients = [threading.Thread(target=client) for _ in range(4)]
        try:
            await live.start()
            await until("HAProxy listens", lambda: "haproxy" in listeners(port))
            assert (await asyncio.to_thread(ask, port, "/predict", body, {}))[0] == 401
            for each in clients:
                each.start()
            await until("answers of both fronts", both_fronts_are_seen)
            os.kill(replica_pids("digits")[0], signal.SIGKILL)
            await until_more(20)
            assert await live.apply(config_of(runs[1], port, replicas=1)) == "digits version 1 is replaced"
            changed = len(answers) + len(clients)  # each had at most one under way
            await until_more(20)
        finally:
            done.set()
            for each in clients:
                if each.ident is not None:
                    await asyncio.to_thread(each.join, 60)
            live.prepare_to_end()
            await live.close()
        assert {status for status, _ in answers} == {200}
        of_first, of_second = (
            [np.allclose(answer["outputs"], one["outputs"], atol=1e-5) for _, answer in answers] for one in wanted
        )
        assert all(first or second for first, second in zip(of_first, of_second, strict=True))
        assert of_first[0]
        assert all(of_second[changed:])

    asyncio.run(scenario())
