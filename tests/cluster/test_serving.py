"""Replicas that several fronts share answer as the model does alone; one may be killed, and all change."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil

from orchestray.platform.process.sockets import listen
from orchestray.serving.config.load import load_serve_config
from orchestray.serving.lifecycle.fronts import FrontedEndpoint
from orchestray.serving.models.load import load_served_model
from support.patience import PATIENCE_S
from support.served import written_run

if TYPE_CHECKING:
    from orchestray.platform.cluster.cluster import Cluster


NAME = f"replicated-{os.getpid()}"
_PAUSE_S = 0.05
"""Between two requests of a client."""


def config_of(run: Path, **more: Any) -> dict[str, Any]:
    return {"name": NAME, "models": [{"name": "digits", "run": str(run)}], **more}


def replica_pids(kind: str = "") -> list[int]:
    titles = {process.pid: process.info["cmdline"] for process in psutil.process_iter(["cmdline"])}
    return [pid for pid, title in titles.items() if title and f"ServeReplica:orchestray-{NAME}-{kind}" in title[0]]


def test_two_fronts_share_two_replicas_one_of_which_is_killed_and_an_update_reaches_both(
    cluster: Cluster, tmp_path: Path
) -> None:
    runs = [written_run(tmp_path, f"run-{seed}", seed=seed) for seed in range(2)]
    models = [load_served_model(run) for run in runs]
    wanted = [model.run([model.parse(model.example)])[0] for model in models]
    body = json.dumps({"inputs": models[0].example})
    with listen("127.0.0.1", 0, key="http.host") as free:
        port = free.getsockname()[1]
    answers: list[tuple[int, Any]] = []
    done = threading.Event()

    def client() -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
        while not done.wait(_PAUSE_S):
            connection.request("POST", "/predict", body, {"content-type": "application/json"})
            answer = connection.getresponse()
            answers.append((answer.status, json.loads(answer.read())))
        connection.close()

    def config_with(run: Path, replicas: int = 2) -> dict[str, Any]:
        return config_of(run, replicas=replicas, http={"port": port, "fronts": 2})

    async def until(count: int) -> None:
        deadline_s, before = time.monotonic() + PATIENCE_S, len(answers)
        while len(answers) < before + count:
            assert time.monotonic() < deadline_s
            await asyncio.sleep(0.05)

    async def scenario() -> None:
        live = FrontedEndpoint(load_serve_config(config_with(runs[0])), port)
        clients = [threading.Thread(target=client) for _ in range(4)]
        try:
            await live.start()
            for each in clients:
                each.start()
            await until(20)
            os.kill(replica_pids("digits")[0], signal.SIGKILL)
            await until(20)
            assert await live.apply(config_with(runs[1], replicas=1)) == "digits version 1 is replaced"
            changed = len(answers) + len(clients)  # each had at most one under way
            await until(20)
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
