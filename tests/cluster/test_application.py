"""An endpoint under Ray Serve: it answers in three ways, survives what is killed, changes, and scales."""

from __future__ import annotations

import asyncio
import os
import signal
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import pytest
import torch
from torch import nn

from orchestray.platform.errors import ClusterError, OrchestrayError
from orchestray.platform.process.sockets import free_ports, listen
from orchestray.serving import app
from orchestray.serving.application import deployments, serve_apps
from orchestray.serving.application.build import application
from orchestray.serving.config.load import load_serve_config
from orchestray.serving.lifecycle import on_ray
from orchestray.serving.lifecycle.on_ray import OnRay
from orchestray.serving.models.load import load_served_model
from orchestray.trainers.saved.run import load_run
from support.patience import PATIENCE_S, until
from support.serve_clients import INPUTS, Clients, ask, num_replicas, pids_of_replicas
from support.served import written_run

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from orchestray.platform.cluster.cluster import Cluster

NAME = f"app-{os.getpid()}"
SLOW = """
import time
import torch
from torch import nn

class Slow(nn.Linear):
    def forward(self, inputs):
        time.sleep(0.05)  # a replica answers at most 20 a second
        return super().forward(inputs)

class Task:
    def build_model(self): return Slow(2, 2)
    def example_inputs(self): return torch.ones(2)
    def dataset(self, split): raise AssertionError("an endpoint asks for no data")
    def to_batch(self, columns): raise AssertionError("an endpoint asks for no data")
    def loss(self, outputs, batch): raise AssertionError("an endpoint asks for no loss")
    def metrics(self, outputs, batch): raise AssertionError("an endpoint asks for no metrics")
"""


@pytest.fixture(scope="module", autouse=True)
def proxy(cluster: Cluster) -> Iterator[int]:
    """Return the port of Serve's proxy, on a Serve with an application of others before any endpoint, and after it."""
    from ray import serve

    class Answering:
        def __call__(self) -> str:
            return "yes"

    (port,) = free_ports(1)
    serve.start(http_options={"port": port})
    deployment: Any = serve.deployment(Answering)
    held = deployment.options(ray_actor_options={"num_cpus": 0}).bind()
    serve_apps.run_application(held, name := f"held-{NAME}", "/held")
    yield port
    assert serve.status().applications[name].status == "RUNNING", "an endpoint has ended what others serve"
    serve.shutdown()


def config_of(run: Path, **sections: Any) -> dict[str, Any]:
    return {"name": NAME, "models": [{"name": "digits", "run": str(run)}], **sections}


@asynccontextmanager
async def running(config: dict[str, Any]) -> AsyncIterator[tuple[OnRay, str]]:
    """Yield an endpoint and its URL; end it."""
    listening = listen("127.0.0.1", 0, key="http.host")
    port = listening.getsockname()[1]
    side = OnRay(load_serve_config(config, [f"http.port={port}"]), listening, None)
    try:
        yield side, await side.start()
    finally:
        await side.end()


def outputs_of(run: Path) -> Any:
    """Return the answer of the model alone."""
    alone = load_served_model(run)
    (answer,) = alone.run([alone.signature.parse(INPUTS)])
    assert isinstance(answer, dict)
    return answer["outputs"]


def pids(of: str) -> set[int]:
    """Return the processes of a deployment: `ingress`, or the begin of a version's name."""
    found = set()
    for process in psutil.process_iter(["cmdline"]):
        title = " ".join(process.info["cmdline"] or [])
        if f"ServeReplica:{NAME}" in title and f":{of}" in title:
            found.add(process.pid)
    return found


async def replace_one(side: OnRay, url: str) -> None:
    """Have another replica take the place of one of two, whose names the sentence on a wrong name has."""
    with pytest.raises(OrchestrayError, match="has no replica other; there are digits-1-") as told:
        await side.replace("other")
    before, replica = pids("digits-1-"), str(told.value).rpartition(" ")[2]
    assert await side.replace(replica) == f"the replica {replica} has ended, and Ray Serve starts another"

    def is_replaced() -> bool:
        there = pids("digits-1-")
        return len(there) == 2 and len(there & before) == 1 and num_replicas(url) == 2

    await until("another takes its place", is_replaced)


async def kill_the_controller() -> None:
    """Kill Serve's controller, and wait until the one that takes its place has found every replica again."""
    import ray
    from ray import serve

    controller = ray.get_actor("SERVE_CONTROLLER_ACTOR", namespace="serve")  # held: a call by a lost handle may hang

    def pid() -> int:
        return int(ray.get(controller.get_pid.remote()))

    def has_recovered() -> bool:
        deployments_ = serve.status().applications[NAME].deployments.values()
        return all(set(deployment.replica_states) == {"RUNNING"} for deployment in deployments_)

    os.kill(before := pid(), signal.SIGKILL)
    await until("another controller", lambda: pid() != before and has_recovered())


def test_an_application_of_serve_run_answers_alike_at_its_port_by_the_proxy_and_by_its_handle(
    proxy: int, tmp_path: Path
) -> None:
    from ray import serve

    run = written_run(tmp_path, "digits")
    (port,) = free_ports(1)
    arguments = {"run": str(run), "http": {"port": port}, "resources.cpus_per_worker": "0.5"}
    handle = serve.run(app(arguments), name=NAME, route_prefix="/app")
    try:
        wanted = outputs_of(run)
        for url in (f"http://127.0.0.1:{port}", f"http://127.0.0.1:{proxy}/app"):
            np.testing.assert_allclose(ask(url), wanted, atol=1e-6)
            for path in ("/", "/docs", "/openapi.json", "/v2/models/digits"):
                with urllib.request.urlopen(url + path, timeout=PATIENCE_S) as answer:  # noqa: S310
                    assert answer.status == 200
            with pytest.raises(urllib.error.HTTPError, match="422"):
                ask(url, [1.0])
        np.testing.assert_allclose(handle.predict.remote(INPUTS).result(), wanted, atol=1e-6)
        with pytest.raises(OrchestrayError, match="inputs: wanted float32 of shape"):
            handle.predict.remote([1.0]).result()
        with pytest.raises(OrchestrayError, match="There is no model other"):
            handle.predict.remote(INPUTS, model="other").result()
    finally:
        serve.delete(NAME)


def test_replicas_of_an_application_lose_one_under_load_and_every_request_is_answered_rightly(
    cluster: Cluster, tmp_path: Path
) -> None:
    from ray import serve

    run = written_run(tmp_path, "digits")
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    config = config_of(run, replicas=2, http={"port": port}, resources={"cpus_per_worker": 0.1})

    async def scenario() -> None:
        await until("both replicas are there", lambda: num_replicas(url) == 2)
        assert pids_of_replicas(url) == pids("digits-1-")
        clients = Clients(url, 4)
        try:
            await clients.until_more(20)
            os.kill(min(pids("digits-1-")), signal.SIGKILL)
            await clients.until_more(40)
            await until("another takes its place", lambda: len(pids("digits-1-")) == 2 and num_replicas(url) == 2)
            await clients.until_more(20)
        finally:
            clients.end()
        assert clients.failures == []
        np.testing.assert_allclose(clients.answers, [outputs_of(run)] * len(clients.answers), atol=1e-6)

    serve.run(app(config), name=NAME, route_prefix=None)
    try:
        asyncio.run(scenario())
    finally:
        serve.delete(NAME)


def test_an_endpoint_changes_without_a_failed_request_and_stays_so_though_controller_and_ingress_are_killed(
    cluster: Cluster, tmp_path: Path
) -> None:
    runs = [written_run(tmp_path / str(seed), "digits", seed=seed) for seed in range(2)]
    wanted = [*map(outputs_of, runs)]

    def is_of(answer: Any, number: int) -> bool:
        return np.allclose(answer, wanted[number], atol=1e-6)

    async def scenario() -> None:
        async with running(config_of(runs[0], replicas=1)) as (side, url):
            clients = Clients(url, 4)
            try:
                await clients.until_more(10)
                assert await side.apply(config_of(runs[1], replicas=2)) == "digits version 1 is replaced"
                np.testing.assert_allclose(ask(url), wanted[1], atol=1e-6)
                assert len(pids("digits-1-")) == 2
                assert clients.failures == []
                await replace_one(side, url)
                assert clients.failures == []
                with pytest.raises(OrchestrayError, match=r"models\.0\.run: there is no run in"):
                    await side.apply(config_of(tmp_path / "nothing"))
                (ingress,) = pids("ingress")
                of_models = pids("digits-1-")
                await kill_the_controller()
                await clients.until_more(20)
                np.testing.assert_allclose(ask(url), wanted[1], atol=1e-6)
                assert (pids("ingress"), pids("digits-1-")) == ({ingress}, of_models), "a new controller finds them"
                assert clients.failures == []
                os.kill(ingress, signal.SIGKILL)
                await until("another ingress", lambda: bool(pids("ingress") - {ingress}))
                await clients.until_more(20)
                np.testing.assert_allclose(ask(url), wanted[1], atol=1e-6)
                assert pids("digits-1-") == of_models, "it has found the replicas of the one before"
                assert clients.failures == []
                assert all(is_of(answer, 0) or is_of(answer, 1) for answer in clients.answers)
                assert await side.apply(config_of(runs[0])) == "digits version 1 is replaced"
                await until("replicas that are not needed end", lambda: not pids("digits-1-"))
            finally:
                clients.end()

    assert not np.allclose(wanted[0], wanted[1], atol=1e-4)
    asyncio.run(scenario())
    asyncio.run(until("nothing is left", lambda: not pids("")))


def test_an_ingress_that_serve_replaces_leaves_the_replicas_to_its_successor(cluster: Cluster, tmp_path: Path) -> None:
    config = config_of(written_run(tmp_path, "digits", seed=1), replicas=2)

    def num_applications() -> int:
        from ray import serve

        return sum(name.startswith(serve_apps.version_prefix(NAME)) for name in serve.status().applications)

    async def scenario() -> None:
        async with running(config) as (_, url):
            (ingress,) = pids("ingress")
            of_models = pids("digits-1-")
            checked = load_serve_config(config, [f"http.port={url.rpartition(':')[2]}"])
            again = application(checked, reserves_cpus=False, composed=False, here=True)
            clients = Clients(url, 4)
            try:
                await clients.until_more(10)
                await asyncio.to_thread(serve_apps.run_application, again, NAME, f"/{NAME}")
                await until("the end of the first ingress", lambda: ingress not in pids("ingress"))
                await clients.until_more(20)
                assert (num_applications(), pids("digits-1-")) == (1, of_models)
                assert all("about to end" in failure for failure in clients.failures)
            finally:
                clients.end()
        assert num_applications() == 0

    asyncio.run(scenario())


@pytest.mark.slow
def test_a_bad_version_is_taken_back_to_replicas_that_stayed_and_an_ingress_after_it_knows(
    cluster: Cluster, tmp_path: Path
) -> None:
    (tmp_path / "models.py").write_text(
        "def good(batch):\n    return ['good' for _ in batch]\n\ndef bad(batch):\n    raise RuntimeError('bad')\n"
    )

    def config(**shares: int) -> dict[str, Any]:
        models = [
            {"name": "m", "run": f"{tmp_path / 'models.py'}:{name}", "version": number, "traffic": share}
            for number, (name, share) in enumerate(shares.items(), 1)
        ]
        return {"name": NAME, "models": models, "replicas": 2, "update": {"rollback": {"error_rate": 5}}}

    async def scenario() -> None:
        async with running(config(good=100)) as (side, url):
            stayed = pids("m-1-")
            clients = Clients(url, 2, "x")
            try:
                await clients.until_more(10)
                assert clients.failures == []
                assert "m version 2 is new" in await side.apply(config(good=50, bad=50))
                await until("the bad version is gone", lambda: not pids("m-2-"))
                failed = len(clients.failures)
                assert failed >= 2
                await clients.until_more(50)
                assert len(clients.failures) == failed
                assert {*clients.answers} == {"good"}
                assert (await side.warnings())[0].startswith("m version 2 was taken back at")
                (ingress,) = pids("ingress")
                os.kill(ingress, signal.SIGKILL)
                await until("another ingress", lambda: bool(pids("ingress") - {ingress}))
                await clients.until_more(20)
                assert len(clients.failures) == failed
                assert (pids("m-1-"), pids("m-2-")) == (stayed, set())
            finally:
                clients.end()

    asyncio.run(scenario())


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_model_that_cannot_be_served_is_a_sentence_and_nothing_is_left_of_it(
    cluster: Cluster, tmp_path: Path, replicas: int
) -> None:
    file = str(tmp_path / "broken.py")
    task = {"type": f"{file}:Task", "arguments": {}, "file": file, "source": "class Task: pass"}
    run = written_run(tmp_path, "broken", tensors=dict(nn.Linear(2, 2).state_dict()), model_json={"task": task})

    async def scenario() -> None:
        with pytest.raises(OrchestrayError, match=r"^\S+broken cannot be served: .*lacks method") as failed:
            async with running(config_of(run, replicas=replicas)):
                pass
        assert "Traceback" not in str(failed.value)
        await until("nothing is left", lambda: not pids(""))

    asyncio.run(scenario())


def test_a_function_of_ones_own_has_replicas_and_a_task_decodes_for_them(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def words(batch):\n    return [text.split() for text in batch]\n")
    (tmp_path / "task.py").write_text(
        f"{SLOW}\n    def decode(self, request): return torch.full((2,), float(request))\n"
    )
    run = written_run(tmp_path / "runs", "task", task={"type": f"{tmp_path / 'task.py'}:Task"})
    models = [{"name": "own", "run": f"{tmp_path / 'own.py'}:words"}, {"name": "task", "run": str(run)}]

    async def scenario() -> None:
        async with running({**config_of(run, replicas=2), "models": models}) as (_, url):
            assert ask(url, "a b") == ["a", "b"]
            module = load_run(run).load_model()
            wanted = module(torch.full((2,), 3.0)).tolist()
            assert ask(url, "3", {"x-model": "task"}) == pytest.approx(wanted, abs=1e-6)

    asyncio.run(scenario())


def test_why_a_replica_that_is_to_replace_another_does_not_start_is_logged_once(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(on_ray, "_LOOK_EVERY_S", 0.2)
    own = tmp_path / "own.py"
    own.write_text("def words(batch):\n    return [text.split() for text in batch]\n")
    models = [{"name": "own", "run": f"{own}:words"}]

    async def scenario() -> None:
        async with running({"name": NAME, "models": models, "replicas": 2}) as (_, url):
            own.write_text("def words(batch):\n    return [text for text in batch]\n")
            os.kill(pids("own-1-").pop(), signal.SIGKILL)
            tried = set(pids("own-1-"))

            def has_tried_twice() -> bool:
                tried.update(pids("own-1-"))
                return len(tried) > 2

            await until("it is started again and again", has_tried_twice)
            assert await asyncio.to_thread(ask, url, "a b") == ["a", "b"]

    asyncio.run(scenario())
    (told,) = [line for line in caplog.messages if "does not start" in line]
    assert told.startswith("A replica of own-1-")
    assert "own.py" in told


def test_an_endpoint_left_at_once_leaves_no_application_though_its_command_does_not_wait(
    cluster: Cluster, tmp_path: Path
) -> None:
    from ray import serve

    (tmp_path / "own.py").write_text("def words(batch):\n    return [text.split() for text in batch]\n")
    models = [{"name": "own", "run": f"{tmp_path / 'own.py'}:words"}]

    async def scenario() -> None:
        async with running({"name": NAME, "models": models, "replicas": 2}):
            await asyncio.to_thread(serve_apps.leave_at_once, NAME)
            states = {name: app.status for name, app in serve.status().applications.items() if name.startswith(NAME)}
            assert {*states.values()} <= {"DELETING"}
            await until("nothing is left", lambda: not pids(""))

    asyncio.run(scenario())


def test_a_second_endpoint_of_one_name_is_refused_and_the_first_goes_on(cluster: Cluster, tmp_path: Path) -> None:
    run = written_run(tmp_path, "digits")

    async def scenario() -> None:
        async with running(config_of(run)) as (_, url):
            with pytest.raises(ClusterError, match=f"Ray Serve has an application {NAME} on this cluster already"):
                async with running(config_of(run)):
                    pass
            np.testing.assert_allclose(ask(url), outputs_of(run), atol=1e-6)

    asyncio.run(scenario())


def test_who_wants_a_route_that_another_application_has_is_told_which(cluster: Cluster) -> None:
    from ray import serve

    deployment: Any = serve.deployment(lambda: "yes")
    with pytest.raises(ClusterError, match=rf"the application held-{NAME} of Ray Serve answers at /held already"):
        serve_apps.run_application(deployment.bind(), f"{NAME}-late", "/held")


@pytest.mark.slow
def test_a_load_that_one_replica_cannot_take_brings_another_and_silence_sends_it_away(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deployments, "_DOWN_AFTER_S", 1.0)
    file = str(tmp_path / "slow.py")
    task = {"type": f"{file}:Task", "arguments": {}, "file": file, "source": SLOW}
    run = written_run(tmp_path, "digits", tensors=dict(nn.Linear(2, 2).state_dict()), model_json={"task": task})
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    config = config_of(
        run,
        replicas={"min": 1, "max": 2, "target_latency_ms": 60},
        batching={"max_batch_size": 1},
        http={"port": port},
        resources={"cpus_per_worker": 0.1},
    )

    async def scenario() -> None:
        await until("one replica", lambda: num_replicas(url) == 1)
        clients = Clients(url, 4, [1.0, 1.0])
        try:
            await until("a second replica", lambda: num_replicas(url) == 2)
        finally:
            clients.end()
        assert clients.failures == []
        await until("one replica again", lambda: num_replicas(url) == 1)
        assert all(answer == clients.answers[0] for answer in [*clients.answers, ask(url, [1.0, 1.0])])

    from ray import serve

    serve.run(app(config), name=NAME, route_prefix=None)
    try:
        asyncio.run(scenario())
    finally:
        serve.delete(NAME)


@pytest.mark.slow
def test_after_silence_the_last_replica_goes_and_a_request_or_another_ingress_brings_it_back(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ray import serve

    monkeypatch.setattr(deployments, "IDLE_BEFORE_ZERO_S", 3.0)
    run = written_run(tmp_path, "digits")
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    config = config_of(run, replicas={"min": 0, "max": 1}, http={"port": port}, resources={"cpus_per_worker": 0.1})

    async def scenario() -> None:
        first = ask(url)
        await until("no replica", lambda: num_replicas(url) == 0)
        with pytest.raises(urllib.error.HTTPError) as refused:  # a process takes longer to start
            ask(url, headers={"x-request-timeout-ms": "50"})
        assert refused.value.code == 503
        assert int(refused.value.headers["retry-after"]) >= 1
        await until("a replica", lambda: num_replicas(url) == 1)  # the refused one was enough to ask for it
        assert ask(url) == first
        await until("no replica again", lambda: num_replicas(url) == 0)
        (ingress,) = pids("ingress")
        os.kill(ingress, signal.SIGKILL)
        clients = Clients(url, 1)
        try:
            await until("another ingress", lambda: bool(pids("ingress") - {ingress}))
            await clients.until_more(1)
        finally:
            clients.end()
        assert clients.failures == []

    serve.run(app(config), name=NAME, route_prefix=None)
    try:
        asyncio.run(scenario())
    finally:
        serve.delete(NAME)
