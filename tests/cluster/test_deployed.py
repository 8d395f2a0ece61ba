"""An ingress finds the replicas of a deployment by the cluster's store, and those that are gone keep nobody waiting."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from orchestray.platform.cluster.cluster import Cluster
from orchestray.platform.errors import OrchestrayError
from orchestray.serving.application import batch_channel, deployed, serve_apps
from orchestray.serving.application.batch_channel import BatchServer, Door, announce, doors_of, new_doors, remove, write
from orchestray.serving.application.deployed import ApplicationStarters, DeployedReplicas
from orchestray.serving.application.deployments import model_deployment
from orchestray.serving.application.endpoint import settings_of
from orchestray.serving.application.ingress import _Endpoint
from orchestray.serving.batching import Batcher, BatchListener
from orchestray.serving.config.load import load_serve_config
from orchestray.serving.http.settings import JSON
from orchestray.serving.models.signature import Output, Sample, Signature
from orchestray.serving.replicas.batch_thread import BatchThread
from orchestray.serving.routing.endpoint import ModelVersion
from support.patience import PATIENCE_S, until

SIGNATURE = Signature("doubling", "1", (), (), [0.0])
BATCH: Sample = {"x": np.ones(1, np.float32)}


class Doubling:
    num_in_flight = 1
    signature: Any = SIGNATURE

    def pin_threads(self) -> None: ...

    def run(self, samples: Sequence[Sample]) -> list[Output | Exception]:
        return [{"y": sample["x"] * 2} for sample in samples]


def door_at(place: str, port: int, key: str = "", replica: str = "one") -> Door:
    return Door(place, replica, "127.0.0.1", port, key)


@asynccontextmanager
async def announced(door: Door) -> AsyncIterator[None]:
    task = asyncio.create_task(announce(door))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


@asynccontextmanager
async def following(place: str) -> AsyncIterator[tuple[DeployedReplicas, Batcher[Sample, Output]]]:
    batcher: Batcher[Sample, Output] = Batcher()
    replicas = DeployedReplicas("doubling", place, batcher)
    task = asyncio.create_task(replicas.follow())
    try:
        yield replicas, batcher
    finally:
        task.cancel()
        await asyncio.wait([task])
        assert batcher.stats.num_runners == 0
        await batcher.close(drain=False)


def test_a_door_is_written_again_where_it_was_removed_and_goes_with_its_replica(cluster: Cluster) -> None:
    place, other = doors_of("app", "a"), doors_of("app", "ab")

    async def scenario() -> None:
        door = door_at(place, 1)
        async with announced(door), announced(replace(door, place=other)):
            await until("the door", lambda: new_doors(place, ()) == [door])
            assert new_doors(place, {"one"}) == []
            remove(door)
            await until("the door", lambda: new_doors(place, ()) == [door])
        assert new_doors(place, ()) == []

    asyncio.run(scenario())


def test_a_replica_answers_while_others_are_silent_and_one_that_ends_is_forgotten(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_channel, "_CONNECT_S", PATIENCE_S)
    place = doors_of("app", "doubling")

    async def scenario() -> None:
        server = BatchServer(BatchThread(Doubling()), SIGNATURE)
        runs = door_at(place, await server.start("127.0.0.1"), server.key, "two")
        with socket.create_server(("127.0.0.1", 0)) as silent:
            async with announced(door_at(place, silent.getsockname()[1])), following(place) as (replicas, batcher):
                write(runs)
                assert await replicas.signature == SIGNATURE
                assert (await batcher.submit(BATCH))["y"] == [2.0]
                await server.close()
                await until("the end of the runner", lambda: batcher.stats.num_runners == 0)
                await until("one door", lambda: [door.replica for door in new_doors(place, ())] == ["one"])

    asyncio.run(scenario())


def test_a_version_whose_replicas_cannot_be_reached_is_given_up(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deployed, "_LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(batch_channel, "_WRITE_EVERY_S", 0.01)
    place = doors_of("app", "far")
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]

    async def scenario() -> None:
        async with announced(door_at(place, port)), following(place) as (replicas, _):
            with pytest.raises(OrchestrayError, match=f"one does not answer at 127.0.0.1:{port}: .*reach each other"):
                await replicas.signature

    asyncio.run(scenario())


@pytest.fixture
def applications(cluster: Cluster) -> Iterator[None]:
    from ray import serve

    serve_apps.wait_for_controller(serve_apps.start_serve(cluster))
    yield
    serve.shutdown()


@pytest.mark.usefixtures("applications")
def test_deployments_are_made_while_others_ask_what_serve_runs(tmp_path: Path) -> None:
    from ray import serve

    (tmp_path / "own.py").write_text("def words(batch): ...")
    name = f"asked-{os.getpid()}"
    deployment: Any = serve.deployment(Doubling)
    serve_apps.run_application(deployment.options(ray_actor_options={"num_cpus": 0}).bind(), name)
    models = [{"name": "words", "run": f"{tmp_path / 'own.py'}:words"}]
    config = load_serve_config({"name": name, "models": models, "replicas": 2})

    def made(number: int) -> bool:
        model_deployment(config.models[0], config, f"version-{number}", reserves_cpus=True)
        return serve_apps.is_running(name)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(made, range(64)))


OWN = """
def words(batch):
    return [text.split() for text in batch]


class Broken:
    def __init__(self):
        raise ValueError("there is no such file")
"""


@pytest.mark.usefixtures("applications")
def test_a_version_that_comes_back_while_it_drains_answers_and_its_application_ends_with_the_last_unless_it_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"deployed-{os.getpid()}"
    monkeypatch.setattr(deployed, "_application", lambda: name)
    (tmp_path / "own.py").write_text(OWN)
    models = [{"name": "words", "run": f"{tmp_path / 'own.py'}:words"}]
    config = load_serve_config({"name": name, "models": models, "replicas": 2, "resources": {"cpus_per_worker": 0.1}})

    def num_running() -> int:
        return len(serve_apps.of_versions(name))

    async def answer(version: ModelVersion) -> Any:
        return await version.codec.answer_of(await version.predict(version.signature.parse("a b")))

    async def scenario() -> None:
        starters = ApplicationStarters(lambda *_: BatchListener(), {}, reserves_cpus=False)
        start = partial(starters.start, config.models[0], config)
        first, again = await start(), await start()
        await first.close()
        assert num_running() == 1
        assert await answer(again) == ["a", "b"]
        closing = asyncio.create_task(again.close())
        await asyncio.sleep(0)
        third, _ = await asyncio.gather(start(), closing)
        assert num_running() == 1
        assert await answer(third) == ["a", "b"]
        await starters.end_unused()
        assert num_running() == 1
        broken = {"name": "broken", "run": f"{tmp_path / 'own.py'}:Broken"}
        successor = config.model_dump(mode="json", exclude_unset=True) | {"models": [*models, broken]}
        settings = JSON.dump_python(settings_of(config), mode="json")
        with pytest.raises(OrchestrayError, match="there is no such file"):
            await _Endpoint.start(
                {"config": successor, "settings": settings, "deployments": {}, "reserves_cpus": False}
            )
        assert await answer(third) == ["a", "b"]
        starters.keeps = True
        await third.close()
        assert num_running() == 1
        await starters.end_with_application()
        assert num_running() == 0

    asyncio.run(scenario())
