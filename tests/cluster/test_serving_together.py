"""Endpoints that share a cluster leave each other alone, and one that its replicas cannot reach says so."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import pytest

from orchestray.platform.errors import ClusterError, OrchestrayError
from orchestray.serving.application.endpoint import LiveEndpoint
from orchestray.serving.batching import BatchListener
from orchestray.serving.config.load import load_serve_config
from orchestray.serving.models.load import load_served_model
from orchestray.serving.replicas import ray_replicas
from orchestray.serving.replicas.ray_replicas import RayReplicas, run_application
from support.patience import PATIENCE_S
from support.served import written_run

if TYPE_CHECKING:
    from orchestray.platform.cluster.cluster import Cluster

NAME = f"shared-{os.getpid()}"


def answering() -> Any:
    """Return an application that is not ours."""
    from ray import serve

    class Answering:
        def __call__(self) -> str:
            return "yes"

    deployment: Any = serve.deployment(Answering)
    return deployment.options(ray_actor_options={"num_cpus": 0}).bind()


@pytest.fixture(scope="module", autouse=True)
def holder(cluster: Cluster) -> Iterator[str]:
    """Return the name of an application of Ray Serve that is there before any endpoint, and after it."""
    from ray import serve

    serve.start(proxy_location="Disabled")
    run_application(answering(), name := f"{NAME}-holder", "/")
    yield name
    assert serve.status().applications[name].status == "RUNNING", "an endpoint has ended what others serve"
    serve.shutdown()


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


def test_of_two_endpoints_of_one_name_one_ends_and_the_other_replaces_what_is_killed_and_its_replicas_on_an_update(
    cluster: Cluster, tmp_path: Path
) -> None:
    runs = [written_run(tmp_path / str(seed), seed=seed) for seed in range(2)]

    def num_runners(live: LiveEndpoint) -> int:
        return live.registry["digits"].main.batcher.stats.num_runners

    def outputs_of(run: Path) -> Any:
        alone = load_served_model(run)
        (answer,) = alone.run([alone.parse([0.5] * 64)])
        assert isinstance(answer, dict)
        return answer["outputs"]

    async def scenario() -> None:
        first, second = (LiveEndpoint(load_serve_config(config_of(run))) for run in runs)
        wanted, other = map(outputs_of, runs)
        answers = []
        done = asyncio.Event()

        async def client() -> None:
            while not done.is_set():
                answers.append(await predict(second))
                with contextlib.suppress(TimeoutError):  # more of them would take the replicas' cores
                    await asyncio.wait_for(done.wait(), 0.05)

        try:
            await first.start()
            (of_first,) = replica_pids()
            await second.start()
            assert of_first in replica_pids(), "the second has taken the place of the first"
            assert second.registry["digits"].signature == load_served_model(runs[1]).signature
            np.testing.assert_allclose(await predict(first), wanted, atol=1e-6)
            await end(first)
            await until("the replica of the first ends", lambda: of_first not in replica_pids())
            (killed,) = replica_pids()
            clients = [asyncio.create_task(client()) for _ in range(4)]
            await until("answers", lambda: bool(answers))
            os.kill(killed, signal.SIGKILL)
            await until("the loss is noticed", lambda: num_runners(second) == 0)
            await until("another has taken its place", lambda: num_runners(second) == 1)
            changed = {**config_of(runs[1]), "batching": {"max_batch_size": 4}}
            assert await second.apply(changed) == "digits version 1 is replaced"
            answers.append(await predict(second))
            done.set()
            await asyncio.gather(*clients)
            assert not np.allclose(other, wanted, atol=1e-5)
            for answer in answers:
                np.testing.assert_allclose(answer, other, atol=1e-6)
        finally:
            done.set()
            await asyncio.gather(end(first), end(second))

    asyncio.run(scenario())


def test_replicas_that_cannot_report_are_an_error_that_says_where_and_nothing_is_left_of_them(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refuse them first, and then have nobody read what they say."""
    monkeypatch.setattr(ray_replicas, "_REPORT_WITHIN_S", 0.1)
    config = load_serve_config(config_of(written_run(tmp_path)))

    async def scenario() -> None:
        replicas = RayReplicas(lambda *_: BatchListener(), None)
        await replicas.join()
        try:
            for are_refused in (True, False):
                with socket.create_server(("127.0.0.1", 0)) as silent:
                    replicas._port = silent.getsockname()[1]
                    if are_refused:
                        silent.close()
                    address = rf"127\.0\.0\.1:{replicas._port}"
                    with pytest.raises(OrchestrayError, match=f"could not report to this process at {address}"):
                        await asyncio.wait_for(replicas.start(config.models[0], config), PATIENCE_S)
                await until("they are ended", lambda: not replica_pids())
        finally:
            await replicas.close()

    asyncio.run(scenario())


def test_who_wants_a_route_that_another_application_has_is_told_which(holder: str) -> None:
    with pytest.raises(ClusterError, match=rf"the application {holder} of Ray Serve answers at / already"):
        run_application(answering(), f"{NAME}-late", "/")
