"""Numbers that are counted, and what pages are sent of batches as they happen."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter
from prometheus_client.parser import text_string_to_metric_families

from orchestray.platform.sim import event_loop
from orchestray.serving.batching import Batcher, Greedy
from orchestray.serving.batching.listener import Process
from orchestray.serving.http import HttpProblem, Monitor, make_app
from support.http_endpoint import ROW_SUMS, Held, endpoint, row_sums

RIGHT = [[1, 2, 3], [4, 5, 6]]


def values(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_metrics_have_the_names_and_labels_of_the_contract_and_count_right() -> None:
    async def ask() -> str:
        held = Held()
        async with endpoint((ROW_SUMS, held), max_batch_size=4) as asked:
            first = asyncio.ensure_future(asked.predict(RIGHT))
            await held.started.wait()
            rest = [asyncio.ensure_future(asked.predict(RIGHT)) for _ in range(4)]
            for _ in range(50):
                await asyncio.sleep(0)
            held.go.set()
            await asyncio.gather(first, *rest)
            await asked.client.post("/predict", content=b"{")
            await asked.client.post("/predict?model=other", json={"inputs": 1})
            await asked.predict(RIGHT, headers={"X-Request-Timeout-Ms": "0"})
            return (await asked.client.get("/metrics")).text

    found = values(asyncio.run(ask()))
    of_model = (("model", "sums"), ("version", "1"))
    assert found["orchestray_requests_total", (of_model[0], ("status", "200"), of_model[1])] == 5
    assert found["orchestray_requests_total", (of_model[0], ("status", "422"), of_model[1])] == 1
    assert found["orchestray_requests_total", (("model", ""), ("status", "404"), ("version", ""))] == 1
    assert found["orchestray_request_seconds_count", of_model] == 7
    assert found["orchestray_queue_seconds_count", of_model] == 5
    assert found["orchestray_batch_size_count", of_model] == 2
    assert found["orchestray_batch_size_sum", of_model] == 5
    assert found["orchestray_shed_total", (of_model[0], ("reason", "deadline_infeasible"), of_model[1])] == 1
    for gauge in ("wait_seconds", "queue_length", "in_flight", "replicas", "service_base_seconds"):
        assert (f"orchestray_{gauge}", of_model) in found


def test_an_application_made_anew_counts_on_and_tells_nothing_twice() -> None:
    async def ask() -> str:
        async with endpoint() as asked:
            await asked.predict(RIGHT)
            make_app(asked.registry, monitor=asked.monitor)
            return asked.monitor.text()[0].decode()

    told = [line.rpartition(" ")[0] for line in asyncio.run(ask()).splitlines() if not line.startswith("#")]
    assert len(told) == len(set(told))


def test_each_replica_there_is_has_counters_of_what_it_has_run_and_one_that_is_gone_has_none() -> None:
    async def ask() -> list[str]:
        async with endpoint() as asked:
            other = asked.batcher.add_runner(row_sums, name="other", process=Process("a1", 7))
            sample = asked.registry.default.signature.parse(RIGHT)
            for size in (1, 2, 3):  # one after the other: the runner that has been idle for longest runs each
                await asyncio.gather(*(asked.batcher.put(sample) for _ in range(size)))
            told = [asked.monitor.text()[0].decode()]
            asked.batcher.add_runner(row_sums, name="other")  # it reports again, and its end was not noticed
            told.append(asked.monitor.text()[0].decode())
            await other.remove()
            return [*told, asked.monitor.text()[0].decode()]

    def counted(text: str) -> dict[tuple[str, str], float]:
        assert len(values(text)) == sum(not line.startswith("#") for line in text.splitlines()), "nothing is told twice"
        prefix = "orchestray_replica_"
        return {
            (name.removeprefix(prefix), dict(labels)["replica"]): value
            for (name, labels), value in values(text).items()
            if name.startswith(prefix)
        }

    found = asyncio.run(ask())
    both, twice, one = map(counted, found)
    assert 'node="a1",pid="7",replica="other",' in found[0]
    own = {("batches_total", "runner-0"): 2, ("samples_total", "runner-0"): 1 + 3}
    assert both == twice == {**own, ("batches_total", "other"): 1, ("samples_total", "other"): 2, ("info", "other"): 1}
    assert one == {**own, ("batches_total", "other"): 0, ("samples_total", "other"): 0}


def test_names_that_no_model_has_make_no_series() -> None:
    async def ask() -> str:
        async with endpoint() as asked:
            for number in range(50):
                await asked.client.post(f"/predict?model=m{number}", json={"inputs": 1})
            return asked.monitor.text()[0].decode()

    assert "m7" not in asyncio.run(ask())


def lines(event: bytes) -> dict[str, Any]:
    name, data = event.decode().strip().split("\n")
    assert name == "event: batches"
    found: dict[str, Any] = json.loads(data.removeprefix("data: "))
    return found


def test_a_page_gets_what_was_and_then_what_happens() -> None:
    async def ask() -> tuple[dict[str, Any], dict[str, Any]]:
        async with endpoint() as asked:
            await asked.predict(RIGHT)
            events = asked.monitor.live.events()
            was = lines(await anext(events))
            await asyncio.gather(asked.predict(RIGHT), asked.predict(RIGHT))
            happened = lines(await anext(events))
            asked.monitor.live.close()
            assert [event async for event in events] == []
            return was, happened

    was, happened = asyncio.run(ask())
    assert [batch["size"] for batch in was["batches"]] == [1]
    assert [batch["size"] for batch in happened["batches"]] == [2]
    assert happened["requests"] == 3
    assert happened["batches"][0]["model"] == "sums"


def test_a_page_that_leaves_is_forgotten_and_one_that_does_not_read_keeps_little() -> None:
    async def follow() -> int:
        live = Monitor().live
        events = live.events()
        await anext(events)
        for _ in range(10_000):
            live.batch(model="m", version="1", size=1, queue_s=[0.0], service_s=0.001, wait_s=0.0, failed=False)
        kept = len(lines(await anext(events))["batches"])
        await events.aclose()
        assert not live._followers
        return kept

    assert asyncio.run(follow()) == 240


def test_routers_that_are_added_pass_the_same_checks_and_are_documented() -> None:
    router = APIRouter()

    @router.post("/generate")
    async def generate(length: int) -> dict[str, int]:
        """Make a text."""
        if length > 10:
            raise HttpProblem(422, "length: wanted at most 10.")
        return {"length": length}

    async def ask() -> None:
        async with endpoint(routers=[router]) as asked:
            assert (await asked.client.post("/generate?length=3")).json() == {"length": 3}
            too_long = await asked.client.post("/generate?length=30")
            wrong = await asked.client.post("/generate?length=x")
            assert (too_long.status_code, wrong.status_code) == (422, 422)
            assert too_long.json()["request_id"] == too_long.headers["x-request-id"]
            assert "length" in wrong.json()["error"]
            paths = (await asked.client.get("/openapi.json")).json()["paths"]
            assert {"/generate", "/predict"} <= paths.keys()

    asyncio.run(ask())


def test_a_runner_that_hangs_with_batches_given_ahead_is_one_batch_that_failed() -> None:
    async def hangs(items: Sequence[int]) -> list[int]:
        await asyncio.sleep(1000)
        return list(items)

    async def answers(items: Sequence[int]) -> list[int]:
        return list(items)

    async def ask() -> str:
        monitor = Monitor()
        listener = monitor.listener("sums", "1")
        batcher = Batcher[int, int](policy=Greedy(), max_batch_size=4, run_timeout_s=1.0, listener=listener)
        batcher.add_runner(hangs, pace_s=lambda: 0.0, replace=lambda: answers)
        await asyncio.gather(*(batcher.submit(number) for number in range(32)), return_exceptions=True)
        await batcher.close()
        assert not listener._queued_s  # type: ignore[attr-defined] # what was begun has ended
        return monitor.text()[0].decode()

    found = values(event_loop.run(ask()))
    of_model = (("model", "sums"), ("version", "1"))
    assert found["orchestray_batch_errors_total", of_model] == 1
    assert found["orchestray_runner_failures_total", of_model] == 1
    assert found["orchestray_service_seconds_count", of_model] == 8
