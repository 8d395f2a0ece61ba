"""Replicas on Ray Serve answer as the model does alone; one may be killed, and all change with the config."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil

from orchestray.platform.config.serving.load import load_serve_config
from orchestray.serving.deployments.live import LiveEndpoint
from orchestray.serving.models.load import load_served_model
from support.served import written_run

if TYPE_CHECKING:
    from orchestray.platform.cluster import Cluster


NAME = f"replicated-{os.getpid()}"


def config_of(run: Path, **more: Any) -> dict[str, Any]:
    return {"name": NAME, "models": [{"name": "digits", "run": str(run)}], **more}


def replica_pids() -> list[int]:
    titles = {process.pid: process.info["cmdline"] for process in psutil.process_iter(["cmdline"])}
    return [pid for pid, title in titles.items() if title and f"ServeReplica:orchestray-{NAME}-" in title[0]]


def test_a_killed_replica_fails_no_request_and_is_replaced_and_an_update_replaces_all(
    cluster: Cluster, tmp_path: Path
) -> None:
    run = written_run(tmp_path, "digits")
    alone = load_served_model(run)
    sample = alone.parse(alone.example)
    (wanted,) = alone.run([sample])
    assert isinstance(wanted, dict)

    async def until(what: str, live: LiveEndpoint, count: int) -> None:
        deadline_s = time.monotonic() + 120
        while live.registry["digits"].main.batcher.stats.num_runners != count:
            assert time.monotonic() < deadline_s, what
            await asyncio.sleep(0.05)

    async def scenario() -> None:
        live = LiveEndpoint(load_serve_config(config_of(run, replicas=2)))
        await live.start()
        try:
            await until("both replicas are there", live, 2)
            endpoint = live.registry["digits"]
            assert endpoint.signature == alone.signature
            answers: list[dict[str, Any]] = []
            done = asyncio.Event()

            async def client() -> None:
                while not done.is_set():
                    answers.append(await endpoint.predict(sample))

            clients = [asyncio.create_task(client()) for _ in range(4)]
            os.kill(replica_pids()[0], signal.SIGKILL)
            await until("the loss is noticed", live, 1)
            await until("another has taken its place", live, 2)
            changed = await live.apply(config_of(run, replicas=1, batching={"max_batch_size": 4}))
            assert changed == "digits version 1 is replaced"
            answers.append(await endpoint.predict(sample))
            done.set()
            await asyncio.gather(*clients)
            for answer in answers:
                np.testing.assert_allclose(answer["outputs"], wanted["outputs"], atol=1e-6)
        finally:
            live.prepare_to_end()
            await live.close()

    asyncio.run(scenario())
