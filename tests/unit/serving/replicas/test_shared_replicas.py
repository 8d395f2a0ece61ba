"""Replicas that several fronts share: the longest wait is next, and no front or replica is lost with a request."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np

from orchestray.serving.batching import Batcher, Fixed, Greedy
from orchestray.serving.models import Signature, TensorSpec
from orchestray.serving.replicas.directory import Directory
from orchestray.serving.replicas.membership import Agree
from orchestray.serving.replicas.pool import ReplicaPool
from orchestray.serving.replicas.replica import FrontAddress
from orchestray.serving.replicas.shared_replica import SharedReplicaWorker
from support.patience import PATIENCE_S

SPEC = TensorSpec("inputs", "float32", (2,))
SIGNATURE = Signature("doubled", "1", (SPEC,), (TensorSpec("outputs", "float32", (2,)),), [0.0, 0.0])


class Doubles:
    """A model that answers with twice the input, may be held, and remembers what came."""

    signature = SIGNATURE

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.go_on.set()
        self.begun = threading.Event()
        self.batches: list[list[float]] = []

    def pin_threads(self) -> None:
        pass

    def run(self, samples: Sequence[dict[str, Any]]) -> list[Any]:
        self.batches.append([float(sample["inputs"][0]) for sample in samples])
        self.begun.set()
        self.go_on.wait(PATIENCE_S)
        return [{"outputs": sample["inputs"] * 2} for sample in samples]


class Front:
    def __init__(self, pool: ReplicaPool, policy: Any) -> None:
        self.pool = pool
        self.batcher: Batcher[Any, Any] = Batcher(policy=policy, max_batch_size=8)

    def ask(self, value: float) -> asyncio.Future[Any]:
        return self.batcher.put(SIGNATURE.parse([value, 1]))


class Endpoint:
    """A directory, fronts and replicas in one process, over real sockets."""

    def __init__(self, directory: Directory, port: int) -> None:
        self.directory = directory
        self.address = FrontAddress("127.0.0.1", port, directory.secret, "group")
        self.fronts: list[Front] = []
        self.replicas: list[asyncio.Task[bool]] = []
        self.workers: list[SharedReplicaWorker] = []
        self.joined: list[Any] = []

    async def add_front(self, policy: Any = None) -> Front:
        front = Front(ReplicaPool(self.directory.secret), policy or Greedy())
        port = await front.pool.listen("127.0.0.1")
        self.fronts.append(front)

        async def apply(_: dict[str, Any], agree: Agree) -> None:
            await agree()

        member = await self.directory.join(self.address, ("127.0.0.1", port), apply)
        self.joined.append(member)
        return front

    def add_replica(self, model: Doubles, name: str) -> None:
        worker = SharedReplicaWorker(self.address, model, name)
        self.workers.append(worker)
        self.replicas.append(asyncio.create_task(worker.serve()))

    async def heard(self, num_fronts: int) -> None:
        """Wait until the replica knows that `num_fronts` fronts have a request that waits."""
        links = self.workers[0]._links
        while sum(link.since_s is not None for link in links) < num_fronts:  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(0)

    async def ready(self) -> None:
        async def nothing() -> None: ...

        await asyncio.wait_for(
            asyncio.gather(*(front.pool.version("group", front.batcher, nothing) for front in self.fronts)), 30
        )


@asynccontextmanager
async def endpoints() -> AsyncIterator[Endpoint]:
    directory = Directory()
    endpoint = Endpoint(directory, await directory.listen("127.0.0.1"))
    try:
        yield endpoint
    finally:
        for front in endpoint.fronts:
            await front.batcher.close(drain=False)
            await front.pool.close()
        for member in endpoint.joined:
            member.close()
        await directory.close()
        await asyncio.wait_for(asyncio.gather(*endpoint.replicas, return_exceptions=True), PATIENCE_S)


def begun(model: Doubles) -> Any:
    return asyncio.to_thread(model.begun.wait, PATIENCE_S)


async def all_of(asked: Sequence[asyncio.Future[Any]]) -> list[float]:
    return [float(answer["outputs"][0]) for answer in await asyncio.wait_for(asyncio.gather(*asked), PATIENCE_S)]


def test_the_front_whose_oldest_request_waits_longest_is_next_and_batches_are_formed_when_they_can_be_run() -> None:
    async def scenario() -> None:
        async with endpoints() as endpoint:
            one, two = await endpoint.add_front(), await endpoint.add_front()
            model = Doubles()
            endpoint.add_replica(model, "replica")
            await endpoint.ready()
            model.go_on.clear()
            first = one.ask(0)
            await begun(model)
            asked = [two.ask(10)]
            await endpoint.heard(1)  # what the other front asks is younger
            asked += [one.ask(value) for value in (1, 2)]
            await endpoint.heard(2)
            asked += [two.ask(11)]  # comes while the replica is busy, and shares the batch of the older one
            model.go_on.set()
            assert await all_of([first, *asked]) == [0, 20, 2, 4, 22]
            assert model.batches == [[0], [10, 11], [1, 2]]

    asyncio.run(scenario())


def test_a_front_that_waits_for_more_requests_lets_others_have_the_replica() -> None:
    async def scenario() -> None:
        async with endpoints() as endpoint:
            patient, other = await endpoint.add_front(Fixed(3600.0)), await endpoint.add_front()
            model = Doubles()
            endpoint.add_replica(model, "replica")
            await endpoint.ready()
            asked = [patient.ask(1)]
            await asyncio.sleep(0.05)  # it holds the replica, and waits
            asked += [other.ask(2)]
            assert await all_of(asked) == [2, 4]

    asyncio.run(scenario())


def test_a_front_that_is_lost_holds_up_nobody_and_one_that_comes_gets_replicas() -> None:
    async def scenario() -> None:
        async with endpoints() as endpoint:
            lost, other = await endpoint.add_front(Fixed(3600.0)), await endpoint.add_front()
            model = Doubles()
            endpoint.add_replica(model, "replica")
            await endpoint.ready()
            unanswered = lost.ask(1)
            await asyncio.sleep(0.05)  # it holds the replica
            endpoint.joined[0].close()
            await lost.pool.close()
            assert await all_of([other.ask(value) for value in range(20)]) == [2.0 * value for value in range(20)]
            late = await endpoint.add_front()
            endpoint.fronts = [late]
            await endpoint.ready()
            assert await all_of([late.ask(3)]) == [6]
            unanswered.cancel()
            endpoint.fronts = [lost, other, late]

    asyncio.run(scenario())


def test_a_replica_that_is_lost_loses_no_request_of_any_front_and_one_that_leaves_answers_what_it_has() -> None:
    async def scenario() -> None:
        async with endpoints() as endpoint:
            fronts = [await endpoint.add_front() for _ in range(2)]
            lost, model = Doubles(), Doubles()
            endpoint.add_replica(lost, "lost")
            await endpoint.ready()
            lost.go_on.clear()
            asked = [front.ask(value) for value in range(12) for front in fronts]
            await begun(lost)
            endpoint.replicas[0].cancel()  # its connections end, as when its process is killed
            endpoint.add_replica(model, "other")
            assert await all_of(asked) == [2.0 * value for value in range(12) for _ in fronts]
            lost.go_on.set()
            model.begun.clear()
            model.go_on.clear()
            last = fronts[0].ask(5)
            await begun(model)
            leaving = asyncio.create_task(endpoint.workers[1].leave())
            await asyncio.sleep(0)
            model.go_on.set()
            assert await all_of([last]) == [10]
            await asyncio.wait_for(leaving, PATIENCE_S)
            assert await asyncio.wait_for(endpoint.replicas[1], PATIENCE_S) is True
            assert [front.batcher.stats.num_runners for front in fronts] == [0, 0]

    asyncio.run(scenario())


def test_many_clients_of_many_fronts_get_their_own_answers_from_many_replicas() -> None:
    async def scenario() -> None:
        async with endpoints() as endpoint:
            fronts = [await endpoint.add_front() for _ in range(3)]
            models = [Doubles() for _ in range(3)]
            for index, model in enumerate(models):
                endpoint.add_replica(model, f"replica-{index}")
            await endpoint.ready()

            async def client(number: int) -> list[float]:
                got = []
                for step in range(40):
                    answer = await fronts[(number + step) % 3].ask(1000 * number + step)
                    got.append(float(answer["outputs"][0]))
                return got

            answers = await asyncio.wait_for(asyncio.gather(*(client(number) for number in range(8))), PATIENCE_S)
            wanted = [[2.0 * (1000 * number + step) for step in range(40)] for number in range(8)]
            np.testing.assert_array_equal(answers, wanted)
            asked = sum(len(batch) for model in models for batch in model.batches)
            assert asked == 8 * 40  # each was run once

    asyncio.run(scenario())


def test_a_shared_replica_answers_what_its_model_gives_for_a_batch_and_is_free_again_after_one_that_raises() -> None:
    class Odd(Doubles):
        """A model that answers unalike, and raises on batches with a negative value."""

        def run(self, samples: Sequence[dict[str, Any]]) -> list[Any]:
            answers = super().run(samples)
            if min(self.batches[-1]) < 0:
                raise MemoryError
            return [{"outputs": answer["outputs"].repeat(1 + place)} for place, answer in enumerate(answers)]

    async def scenario() -> None:
        async with endpoints() as endpoint:
            one, two = await endpoint.add_front(), await endpoint.add_front()
            endpoint.add_replica(Odd(), "replica")
            await endpoint.ready()
            for front in (one, two):
                unlike = [front.ask(value) for value in (1, 2, 3)]
                assert await all_of(unlike) == [2, 4, 6]
                assert [len(each.result()["outputs"]) for each in unlike] == [2, 4, 6]
                (failed,) = await asyncio.wait_for(asyncio.gather(front.ask(-1), return_exceptions=True), PATIENCE_S)
                assert str(failed) == "The model raised MemoryError on this batch."

    asyncio.run(scenario())
