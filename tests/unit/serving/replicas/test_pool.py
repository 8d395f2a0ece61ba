"""Replicas over a socket: they take whole batches, come and go at any moment, and no request is lost with them."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
import numpy as np
import pytest

from orchestray.platform.errors import CheckpointError, OrchestrayError
from orchestray.serving.batching import Batcher, BatchListener, Greedy, RunTimeoutError
from orchestray.serving.http import make_app
from orchestray.serving.models import ModelError, Signature, TensorSpec
from orchestray.serving.replicas import wire
from orchestray.serving.replicas.pool import ReplicaPool
from orchestray.serving.replicas.ray_replica import Replica, ReplicaSettings
from orchestray.serving.replicas.replica import FrontAddress, ReplicaWorker, greeting, report_failure
from orchestray.serving.routing.endpoint import ModelVersion, Share
from orchestray.serving.routing.registry import Registry
from support.patience import PATIENCE_S

SPEC = TensorSpec("inputs", "float32", (2,))
SIGNATURE = Signature("doubled", "1", (SPEC,), (TensorSpec("outputs", "float32", (2,)),), [0.0, 0.0])


class Doubles:
    """A model that answers with twice the input, refuses what is negative, and may be held."""

    signature = SIGNATURE

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.go_on.set()
        self.batches: list[int] = []
        self.values: list[float] = []
        self.begun = threading.Event()

    def pin_threads(self) -> None:
        pass

    def run(self, samples: Sequence[dict[str, Any]]) -> list[Any]:
        self.begun.set()
        self.go_on.wait(PATIENCE_S)
        self.batches.append(len(samples))
        self.values += [float(sample["inputs"][0]) for sample in samples]
        return [
            ModelError("negative") if sample["inputs"][0] < 0 else {"outputs": sample["inputs"] * 2}
            for sample in samples
        ]


class Front(BatchListener):
    """A pool with one version, and the replicas that report to it."""

    def __init__(self, pool: ReplicaPool, port: int) -> None:
        self.pool = pool
        self.address = FrontAddress("127.0.0.1", port, pool.secret, "group")
        self.batcher: Batcher[Any, Any] = Batcher(policy=Greedy(), max_batch_size=8)
        self.tasks: list[asyncio.Task[bool]] = []
        self.lost: list[str] = []
        self.has_lost = asyncio.Event()

    def add(self, model: Any, name: str) -> ReplicaWorker:
        worker = ReplicaWorker(self.address, model, name)
        self.tasks.append(asyncio.create_task(worker.serve()))
        return worker

    async def version(self) -> ModelVersion:
        async def nothing() -> None:
            pass

        return await asyncio.wait_for(self.pool.version("group", self.batcher, nothing, self), PATIENCE_S)

    def runner_failed(self, runner: str, error: BaseException) -> None:
        self.lost.append(runner)
        self.has_lost.set()

    def ask(self, value: float) -> asyncio.Future[Any]:
        return self.batcher.put(SIGNATURE.parse([value, 1]))


@asynccontextmanager
async def fronts() -> AsyncIterator[Front]:
    pool = ReplicaPool()
    front = Front(pool, await pool.listen("127.0.0.1"))
    try:
        yield front
    finally:
        await front.batcher.close(drain=False)
        await pool.close()
        await asyncio.wait_for(asyncio.gather(*front.tasks, return_exceptions=True), PATIENCE_S)


def begun(model: Doubles) -> Any:
    return asyncio.to_thread(model.begun.wait, PATIENCE_S)


def test_a_replica_says_what_its_model_takes_and_answers_whole_batches() -> None:
    async def scenario() -> None:
        async with fronts() as front:
            model = Doubles()
            front.add(model, "one")
            version = await front.version()
            assert version.signature == SIGNATURE
            asked = [front.ask(value) for value in (1, -2, 3, 4, 5)]
            answers = await asyncio.gather(*asked, return_exceptions=True)
            assert [type(answer) for answer in answers] == [dict, ModelError, dict, dict, dict]
            np.testing.assert_array_equal(answers[4]["outputs"], [10, 2])
            assert model.batches == [5]

    asyncio.run(scenario())


def test_answers_of_one_batch_may_differ_in_names_types_and_shapes_as_in_one_process() -> None:
    class Ragged(Doubles):
        def run(self, samples: Sequence[dict[str, Any]]) -> list[Any]:
            super().run(samples)
            return [ragged(int(sample["inputs"][0])) for sample in samples]

    def ragged(size: int) -> dict[str, Any]:
        return {f"sized {size % 2}": np.full(size, size, np.float32 if size < 3 else np.float64)}

    async def scenario() -> None:
        async with fronts() as front:
            model = Ragged()
            front.add(model, "one")
            await front.version()
            sizes = (3, 3, 1, 2, 1)
            answers = await asyncio.wait_for(asyncio.gather(*map(front.ask, sizes)), PATIENCE_S)
            assert model.batches == [5]
            for size, answer in zip(sizes, answers, strict=True):
                ((name, wanted),) = ragged(size).items()
                assert (answer.keys(), answer[name].dtype) == ({name}, wanted.dtype)
                np.testing.assert_array_equal(answer[name], wanted)
            assert front.lost == []

    asyncio.run(scenario())


def test_a_model_that_raises_on_a_whole_batch_keeps_its_replica() -> None:
    class Raising(Doubles):
        def run(self, samples: Sequence[dict[str, Any]]) -> list[Any]:
            answers = super().run(samples)
            if len(self.batches) == 1:
                raise MemoryError
            return answers

    async def scenario() -> None:
        async with fronts() as front:
            front.add(Raising(), "one")
            await front.version()
            asked = asyncio.gather(*map(front.ask, (1, 2)), return_exceptions=True)
            failed = await asyncio.wait_for(asked, PATIENCE_S)
            assert [type(answer) for answer in failed] == [ModelError] * 2
            assert str(failed[0]) == "The model raised MemoryError on this batch."
            assert float((await asyncio.wait_for(front.ask(3), PATIENCE_S))["outputs"][0]) == 6
            assert front.lost == []

    asyncio.run(scenario())


class Raises(Doubles):
    """A model as it is served: what was raised is the cause of its answer."""

    def run(self, samples: Sequence[dict[str, Any]]) -> list[Any]:
        try:
            float(f"secret of the model {'x' * 100_000}, and its end")
        except ValueError as error:
            failed = ModelError("The model raised.")
            failed.__cause__ = error
            return [failed] * len(samples)
        raise AssertionError("it is no number")


def test_what_a_model_raised_in_a_replica_is_in_the_front_s_log_under_the_id_of_the_request_and_nowhere_else(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario() -> httpx.Response:
        async with fronts() as front:
            front.add(Raises(), "one")
            registry = Registry({"doubled": [Share(await front.version())]})
            transport = httpx.ASGITransport(make_app(registry), raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://endpoint") as client:
                return await client.post("/predict", json={"inputs": [1, 2]}, headers={"X-Request-Id": "the-id"})

    answer = asyncio.run(scenario())
    assert (answer.status_code, "secret" in answer.text) == (500, False)
    assert answer.json()["error"].endswith("The log has more, under the request's id.")
    (record,) = (each for each in caplog.records if "the-id" in each.message)
    told = logging.Formatter().format(record)
    for part in ("ValueError: could not convert string to float: 'secret of the model", "test_pool.py", "and its end"):
        assert part in told
    assert len(told) < 20_000


def test_what_keeps_a_later_replica_from_starting_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with fronts() as front:
            front.add(Doubles(), "one")
            await front.version()
            for text in ("it was written anew", "it was written anew", "no room"):
                reader, writer = await asyncio.open_connection(front.address.host, front.address.port)
                await wire.send(writer, {**greeting(front.address), "error": text, "exit_status": 1})
                assert await asyncio.wait_for(reader.read(), PATIENCE_S) == b""  # it was heard
                writer.close()
            assert float((await front.ask(3))["outputs"][0]) == 6

    asyncio.run(scenario())
    assert caplog.text.count("it was written anew") == 1
    assert caplog.text.count("no room") == 1


def test_the_batch_of_a_replica_that_vanishes_is_run_by_another() -> None:
    async def scenario() -> None:
        async with fronts() as front:
            lost, other = Doubles(), Doubles()
            lost.go_on.clear()
            front.add(lost, "lost")
            await front.version()
            asked = [front.ask(value) for value in range(6)]
            await begun(lost)
            front.tasks[0].cancel()  # its connection ends, as when its process is killed
            front.add(other, "other")
            answers = await asyncio.wait_for(asyncio.gather(*asked), PATIENCE_S)
            assert [float(answer["outputs"][0]) for answer in answers] == [0, 2, 4, 6, 8, 10]
            assert other.batches == [6]
            assert front.batcher.stats.num_runners == 1
            lost.go_on.set()

    asyncio.run(scenario())


def test_a_replica_that_is_lost_while_it_has_nothing_to_do_is_told_of_and_one_that_leaves_is_not() -> None:
    async def scenario(*, leaves: bool) -> list[str]:
        async with fronts() as front:
            worker = front.add(Doubles(), "idle")
            await front.version()
            if leaves:
                await worker.leave()
            else:
                front.tasks[0].cancel()  # as when it is killed: its connection ends
                await asyncio.wait_for(front.has_lost.wait(), PATIENCE_S)
        return front.lost

    assert asyncio.run(scenario(leaves=False)) == ["idle"]
    assert asyncio.run(scenario(leaves=True)) == []


def test_a_replica_that_leaves_answers_what_it_has_and_gets_no_more() -> None:
    async def scenario() -> None:
        async with fronts() as front:
            model = Doubles()
            model.go_on.clear()
            worker = front.add(model, "leaving")
            await front.version()
            first = front.ask(1)
            await begun(model)
            leaving = asyncio.create_task(worker.leave())
            second = front.ask(2)
            await asyncio.sleep(0)
            model.go_on.set()
            assert float((await asyncio.wait_for(first, PATIENCE_S))["outputs"][0]) == 2
            await asyncio.wait_for(leaving, PATIENCE_S)
            assert not second.done()
            front.add(Doubles(), "next")
            assert float((await asyncio.wait_for(second, PATIENCE_S))["outputs"][0]) == 4

    asyncio.run(scenario())


def test_who_does_not_know_the_secret_is_no_replica() -> None:
    async def scenario() -> None:
        async with fronts() as front:
            front.add(Doubles(), "one")
            await front.version()
            address = FrontAddress("127.0.0.1", front.address.port, "guessed", "group")
            worker = ReplicaWorker(address, Doubles(), "stranger")
            await asyncio.wait_for(worker.serve(), PATIENCE_S)
            assert front.batcher.stats.num_runners == 1
            reader, writer = await asyncio.open_connection("127.0.0.1", front.address.port)
            writer.write(b"GET / HTTP/1.1\r\n\r\n" * 10)
            assert await asyncio.wait_for(reader.read(), PATIENCE_S) == b""
            writer.close()

    asyncio.run(scenario())


def test_a_replica_whose_model_cannot_be_served_says_why() -> None:
    async def scenario() -> None:
        async with fronts() as front:
            waiting = asyncio.create_task(front.version())
            await asyncio.sleep(0)
            await report_failure(front.address, CheckpointError("the weights are damaged"))
            with pytest.raises(OrchestrayError, match="the weights are damaged"):
                await waiting

    asyncio.run(scenario())


def test_frames_keep_types_shapes_and_values() -> None:
    async def scenario() -> None:
        received: asyncio.Queue[Any] = asyncio.Queue()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await received.put(await wire.receive(reader))
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        _, writer = await asyncio.open_connection(*server.sockets[0].getsockname()[:2])
        samples = [{"a": np.full((2, 3), i, np.float64), "b": np.array(i, np.int8)} for i in range(3)]
        samples[2:2] = [{"a": np.zeros((0, 1))}, {"b": np.ones(4, np.int8)}]  # unlike the others
        await wire.send(writer, {"kind": "x"}, samples)
        header, got = await received.get()
        assert header["kind"] == "x"
        for sent, back in zip(samples, got, strict=True):
            for name, array in sent.items():
                assert back[name].dtype == array.dtype
                np.testing.assert_array_equal(back[name], array)
        writer.close()
        server.close()

    asyncio.run(scenario())


def test_a_replica_that_took_too_long_reports_again_and_one_whose_front_is_gone_ends() -> None:
    async def scenario() -> None:
        async with fronts() as front:
            front.batcher = Batcher(policy=Greedy(), run_timeout_s=2.0)
            model = Doubles()
            model.go_on.clear()
            front.add(model, "slow")
            await front.version()
            with pytest.raises(RunTimeoutError):
                await front.ask(1)
            model.go_on.set()
            assert float((await asyncio.wait_for(front.ask(2), PATIENCE_S))["outputs"][0]) == 4
            await front.pool.close()
            assert await asyncio.wait_for(front.tasks[0], PATIENCE_S) is False

    asyncio.run(scenario())


def hosted(front: Front, model: Any, run_timeout_s: float | None, gone: threading.Event) -> Replica:
    """Host a replica as Ray Serve does; it sets `gone` where it takes the front to be."""
    replica = Replica(ReplicaSettings(front.address, {}, run_timeout_s), "hosted", gone.set)
    replica.host(model)
    return replica


def test_a_replica_reports_when_its_health_is_first_asked_for_and_not_before_its_model_is_there() -> None:
    async def scenario() -> None:
        async with fronts() as front:
            gone = threading.Event()
            await Replica(ReplicaSettings(front.address, {}, None), "loading", gone.set).check_health()
            replica = hosted(front, Doubles(), None, gone)
            assert front.batcher.stats.num_runners == 0
            for _ in range(2):  # however often it is asked, it reports once
                await replica.check_health()
            await front.version()
            assert float((await asyncio.wait_for(front.ask(3), PATIENCE_S))["outputs"][0]) == 6
            assert front.batcher.stats.num_runners == 1
            await asyncio.wait_for(replica.leave(), PATIENCE_S)
            assert not gone.is_set()

    asyncio.run(scenario())


@pytest.mark.parametrize("run_timeout_s", [0.0, PATIENCE_S, None])
def test_a_replica_is_unhealthy_while_a_batch_has_run_for_longer_than_it_may(run_timeout_s: float | None) -> None:
    async def scenario() -> None:
        async with fronts() as front:
            model = Doubles()
            replica = hosted(front, model, run_timeout_s, threading.Event())
            await replica.check_health()
            await front.version()
            model.go_on.clear()
            asked = front.ask(1)
            await begun(model)
            if run_timeout_s == 0.0:
                with pytest.raises(RuntimeError, match=r"a batch has run for \d+\.\d s"):
                    await replica.check_health()
            else:
                await replica.check_health()
            model.go_on.set()
            await asyncio.wait_for(asked, PATIENCE_S)
            await replica.check_health()  # it has ended: it may have the next
            await asyncio.wait_for(replica.leave(), PATIENCE_S)

    asyncio.run(scenario())


@pytest.mark.parametrize("is_gone", [True, False])
def test_a_replica_whose_connection_has_ended_is_unhealthy_and_ends_all_where_the_front_is_gone(is_gone: bool) -> None:
    async def scenario() -> None:
        async with fronts() as front:
            gone = threading.Event()
            replica = hosted(front, Doubles(), None, gone)
            await replica.check_health()
            await front.version()
            if is_gone:
                await front.pool.close()
                assert await asyncio.to_thread(gone.wait, PATIENCE_S)
            else:
                await asyncio.wait_for(replica.leave(), PATIENCE_S)
            with pytest.raises(RuntimeError, match="the connection to the front has ended"):
                await replica.check_health()
            assert gone.is_set() is is_gone

    asyncio.run(scenario())


def test_replicas_get_equal_parts_of_a_light_load_and_a_client_its_answers_in_order() -> None:
    async def scenario() -> None:
        async with fronts() as front:
            models = [Doubles() for _ in range(3)]
            for number, model in enumerate(models):
                front.add(model, f"replica-{number}")
            await front.version()
            while front.batcher.stats.num_runners < len(models):  # noqa: ASYNC110 - the batcher tells nobody
                await asyncio.sleep(0)
            for value in range(60):  # one at a time: any of them could answer all
                assert float((await asyncio.wait_for(front.ask(value), PATIENCE_S))["outputs"][0]) == 2 * value
            assert [len(model.batches) for model in models] == [20, 20, 20]

            async def client(number: int) -> list[float]:
                """Ask for the next when the answer to the last is there."""
                asked = range(100 * number, 100 * number + 25)
                return [float((await front.ask(value))["outputs"][0]) for value in asked]

            told = await asyncio.wait_for(asyncio.gather(*map(client, range(8))), PATIENCE_S)
            assert told == [[2.0 * (100 * number + nth) for nth in range(25)] for number in range(8)]

            def after(value: int) -> Any:
                return lambda _: ended.append(value)

            ended: list[int] = []
            for model in models:
                model.values.clear()
            asked = [front.ask(value) for value in range(200)]  # at once, over all of them
            for value, answer in enumerate(asked):
                answer.add_done_callback(after(value))
            answers = await asyncio.wait_for(asyncio.gather(*asked), PATIENCE_S)
            assert [float(answer["outputs"][0]) for answer in answers] == [2.0 * value for value in range(200)]
            for model in models:  # one may be ahead of another; each answers in the order in which they came
                assert model.values == sorted(model.values)
                assert [value for value in ended if value in set(model.values)] == model.values
            assert sum(len(model.values) for model in models) == 200

    asyncio.run(scenario())
