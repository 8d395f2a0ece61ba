"""Endpoints that share a cluster leave each other alone, and one that its replicas cannot reach says so."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from orchestray.platform.config.serving.load import load_serve_config
from orchestray.platform.errors import ClusterError, OrchestrayError
from orchestray.serving.batching import BatchListener
from orchestray.serving.deployments import ray_replicas
from orchestray.serving.deployments.live import LiveEndpoint
from orchestray.serving.deployments.ray_replicas import RayReplicas, run_application
from support.patience import PATIENCE_S
from support.served import written_run

if TYPE_CHECKING:
    from orchestray.platform.cluster.cluster import Cluster

NAME = f"shared-{os.getpid()}"


def config_of(run: Path) -> dict[str, Any]:
    models = [{"name": "digits", "run": str(run)}]
    return {"name": NAME, "models": models, "replicas": {"min": 1, "max": 1}}


def replica_pids() -> set[int]:
    title = f"ServeReplica:orchestray-{NAME}-"
    return {each.pid for each in psutil.process_iter(["cmdline"]) if title in " ".join(each.info["cmdline"] or [])}


async def until(what: str, condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s, what
        await asyncio.sleep(0.05)


async def predict(live: LiveEndpoint) -> Any:
    async with asyncio.timeout(PATIENCE_S):
        endpoint = live.registry["digits"]
        return (await endpoint.predict(endpoint.signature.parse([0.5] * 64)))["outputs"]


async def end(live: LiveEndpoint) -> None:
    live.prepare_to_end()
    await live.close()


def test_of_two_endpoints_of_one_name_on_a_cluster_one_ends_and_the_other_still_replaces_what_is_killed(
    cluster: Cluster, tmp_path: Path
) -> None:
    def num_runners(live: LiveEndpoint) -> int:
        return live.registry["digits"].main.batcher.stats.num_runners

    async def scenario() -> None:
        first, second = (
            LiveEndpoint(load_serve_config(config_of(written_run(tmp_path, f"run-{seed}", seed=seed))))
            for seed in range(2)
        )
        try:
            await first.start()
            (of_first,) = replica_pids()
            wanted = await predict(first)
            await second.start()
            assert of_first in replica_pids(), "the second has taken the place of the first"
            assert (await predict(first) == wanted).all()
            other = await predict(second)
            assert (other != wanted).any()
            await end(first)
            await until("the replica of the first ends", lambda: of_first not in replica_pids())
            (killed,) = replica_pids()
            os.kill(killed, signal.SIGKILL)
            await until("the loss is noticed", lambda: num_runners(second) == 0)
            assert (await predict(second) == other).all()
        finally:
            await asyncio.gather(end(first), end(second))

    asyncio.run(scenario())


@pytest.mark.parametrize("way", ["they are refused", "nobody reads what they say"])
def test_replicas_that_cannot_report_are_an_error_that_says_where_and_nothing_is_left_of_them(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    monkeypatch.setattr(ray_replicas, "_REPORT_WITHIN_S", 3.0)
    config = load_serve_config(config_of(written_run(tmp_path)))

    async def scenario() -> None:
        replicas = RayReplicas(lambda *_: BatchListener(), None)
        await replicas.join()
        try:
            with socket.create_server(("127.0.0.1", 0)) as silent:
                replicas._port = silent.getsockname()[1]
                if way == "they are refused":
                    silent.close()
                address = rf"127\.0\.0\.1:{replicas._port}"
                with pytest.raises(OrchestrayError, match=f"could not report to this process at {address}"):
                    await asyncio.wait_for(replicas.start(config.models[0], config), PATIENCE_S)
            await until("they are ended", lambda: not replica_pids())
        finally:
            await replicas.close()

    asyncio.run(scenario())


def test_who_wants_a_route_that_another_application_has_is_told_which(cluster: Cluster) -> None:
    class Answering:
        def __call__(self) -> str:
            return "yes"

    async def scenario() -> None:
        from ray import serve

        replicas = RayReplicas(lambda *_: BatchListener(), None)
        await replicas.join()
        try:
            holder, late = (replicas.application_name(f"{NAME}-{which}") for which in ("holder", "late"))
            deployment: Any = serve.deployment(Answering)
            application = deployment.options(ray_actor_options={"num_cpus": 0}).bind()
            await asyncio.to_thread(run_application, application, holder, "/")
            with pytest.raises(ClusterError, match=rf"the application {holder} of Ray Serve answers at / already"):
                await asyncio.to_thread(run_application, application, late, "/")
        finally:
            await replicas.close()

    asyncio.run(scenario())
