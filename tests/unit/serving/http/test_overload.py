"""Deadlines, full queues, clients that leave, endpoints that end: 503, 504, 499."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import httpx
import numpy as np
import pytest

from orchestray.platform.sim import event_loop
from orchestray.serving.application.endpoint import LiveEndpoint
from orchestray.serving.batching import DeadlineError
from orchestray.serving.config.load import load_serve_config
from orchestray.serving.http import HttpSettings
from orchestray.serving.models.signature import Output, Sample
from support.http_endpoint import PAIR, ROW_SUMS, Asked, Held, endpoint, pair, row_sums
from support.patience import PATIENCE_S
from support.served import written_run

RIGHT = [[1, 2, 3], [4, 5, 6]]


async def turns(num_turns: int = 50) -> None:
    """Let everything that can go on go on."""
    for _ in range(num_turns):
        await asyncio.sleep(0)


def test_a_full_queue_is_503_at_once_with_when_to_come_back() -> None:
    async def ask() -> tuple[httpx.Response, list[httpx.Response]]:
        held = Held()
        async with endpoint((ROW_SUMS, held), max_batch_size=1, max_queue=1) as asked:
            first = [asyncio.ensure_future(asked.predict(RIGHT))]
            await held.started.wait()
            first.append(asyncio.ensure_future(asked.predict(RIGHT)))
            await turns()
            refused = await asked.predict(RIGHT)
            held.go.set()
            return refused, list(await asyncio.gather(*first))

    refused, answered = asyncio.run(ask())
    assert [answer.status_code for answer in answered] == [200, 200]
    assert refused.status_code == 503
    assert int(refused.headers["retry-after"]) >= 1
    assert refused.json()["retry_after_s"] > 0
    assert "The queue is full: 1 requests wait" in refused.json()["error"]


class LateError(DeadlineError):
    """An error that is seen to go."""

    known: ClassVar[list[weakref.ref[LateError]]] = []

    def __init__(self) -> None:
        super().__init__(1.0)
        self.known.append(weakref.ref(self))


def test_a_request_that_is_refused_after_it_was_read_leaves_nothing_that_is_to_be_collected() -> None:
    """Leave no cycles: under overload there are thousands, and the collector stops everything else meanwhile."""

    async def run(samples: Sequence[Sample]) -> list[Output | Exception]:
        return [LateError() for _ in samples]

    async def ask() -> tuple[int, list[LateError | None]]:
        async with endpoint((ROW_SUMS, run)) as asked:
            gc.disable()
            try:
                status = (await asked.predict(RIGHT)).status_code
                await turns()
                return status, [each() for each in LateError.known]
            finally:
                gc.enable()

    LateError.known.clear()
    assert asyncio.run(ask()) == (503, [None])


def test_more_urgent_requests_take_the_place_of_others() -> None:
    async def ask() -> list[int]:
        held = Held()
        async with endpoint((ROW_SUMS, held), max_batch_size=1, max_queue=1) as asked:
            running = asyncio.ensure_future(asked.predict(RIGHT))
            await held.started.wait()
            waiting = asyncio.ensure_future(asked.predict(RIGHT))
            await turns()
            urgent = asyncio.ensure_future(asked.predict(RIGHT, headers={"X-Request-Priority": "1"}))
            await turns()
            held.go.set()
            return [answer.status_code for answer in await asyncio.gather(running, waiting, urgent)]

    assert asyncio.run(ask()) == [200, 503, 200]


def test_a_deadline_that_has_passed_already_is_503() -> None:
    async def ask() -> httpx.Response:
        async with endpoint() as asked:
            return await asked.predict(RIGHT, headers={"X-Request-Timeout-Ms": "0"})

    answer = asyncio.run(ask())
    assert answer.status_code == 503
    assert "deadline cannot be met" in answer.json()["error"]
    assert "retry-after" in answer.headers


@pytest.mark.parametrize("by_header", [True, False])
def test_a_deadline_that_passes_while_the_model_runs_is_504(by_header: bool) -> None:
    async def ask() -> tuple[httpx.Response, list[int]]:
        held = Held()
        settings = None if by_header else HttpSettings(timeout_s=2.0)
        async with endpoint((ROW_SUMS, held), settings=settings) as asked:
            late = await asked.predict(RIGHT, headers={"X-Request-Timeout-Ms": "2000"} if by_header else {})
            return late, held.batches

    answer, batches = event_loop.run(ask())
    assert answer.status_code == 504
    assert "passed while" in answer.json()["error"]
    assert batches == [1]


def test_the_deadline_of_the_config_is_that_of_requests_that_name_none_until_a_change(tmp_path: Path) -> None:
    run = written_run(tmp_path)
    config = {"name": "endpoint", "models": [{"name": "digits", "run": str(run)}], "http": {"timeout_ms": 0.001}}

    async def ask() -> tuple[list[int], str]:
        live = LiveEndpoint(load_serve_config(config))
        await live.start()
        try:
            async with httpx.AsyncClient(transport=httpx.ASGITransport(live), base_url="http://endpoint") as client:

                async def predict(**headers: str) -> int:
                    return (await client.post("/predict", json={"inputs": [0.5] * 64}, headers=headers)).status_code

                before = [await predict(), await predict(**{"X-Request-Timeout-Ms": str(PATIENCE_S * 1e3)})]
                told = await live.apply({**config, "http": {}})
                return [*before, await predict()], told
        finally:
            await live.close()

    assert asyncio.run(ask()) == ([503, 200, 200], "a request that names no deadline has none")


def test_a_model_that_hangs_is_504_and_one_that_breaks_500() -> None:
    async def broken(samples: Sequence[Sample]) -> list[Output | Exception]:
        raise RuntimeError("secret of the model")

    async def ask() -> tuple[httpx.Response, httpx.Response]:
        async with endpoint((ROW_SUMS, Held()), run_timeout_s=0.02) as asked:
            hung = await asked.predict(RIGHT)
        async with endpoint((ROW_SUMS, broken)) as asked:
            return hung, await asked.predict(RIGHT)

    hung, failed = asyncio.run(ask())
    assert (hung.status_code, failed.status_code) == (504, 500)
    assert "secret" not in failed.text


def test_an_endpoint_that_is_not_ready_is_503_but_lives() -> None:
    async def ask() -> dict[str, httpx.Response]:
        async with endpoint() as asked:
            asked.registry.ready = False
            paths = ["/ping", "/v2/health/ready", "/v2/models/sums/ready", "/v2/health/live"]
            answers = {path: await asked.client.get(path) for path in paths}
            return {**answers, "/predict": await asked.predict(RIGHT)}

    answers = asyncio.run(ask())
    assert answers.pop("/v2/health/live").status_code == 200
    for answer in answers.values():
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "1"


def test_a_model_whose_replicas_are_gone_for_good_is_not_ready_and_others_are() -> None:
    async def ask() -> list[dict[str, httpx.Response]]:
        found = []
        async with endpoint((ROW_SUMS, row_sums), (PAIR, pair)) as asked:
            (version,) = asked.registry["sums"].versions
            paths = ["/ping", "/v2/health/ready", "/v2/models/sums/ready", "/v2/models/sums/versions/1/ready"]
            paths += ["/v2/health/live", "/v2/models/pair/ready"]

            async def answers() -> None:
                got = {path: await asked.client.get(path) for path in paths}
                got["/predict"] = await asked.predict(RIGHT)
                got["/predict?model=pair"] = await asked.client.post(
                    "/predict?model=pair", json={"inputs": PAIR.example}
                )
                found.append(got)

            await answers()
            for runner in [*version.batcher._core.runners]:
                await runner.remove()
            await asyncio.sleep(60)
            await answers()
            version.rests = True  # none comes while nobody asks
            paths = paths[:4]
            found.append({path: await asked.client.get(path) for path in paths})
            version.rests = False
            version.batcher.add_runner(row_sums)
            await answers()
        return found

    before, gone, resting, again = event_loop.run(ask())
    statuses = {path: answer.status_code for path, answer in gone.items()}
    lives = {path: statuses.pop(path) for path in ("/v2/health/live", "/v2/models/pair/ready", "/predict?model=pair")}
    assert set(lives.values()) == {200}
    assert set(statuses.values()) == {503}
    assert "No replica of the model sums, version 1, is there" in gone["/predict"].json()["error"]
    assert "retry-after" in gone["/predict"].headers
    for answers in (before, resting, again):
        assert {answer.status_code for answer in answers.values()} == {200}


class Connection:
    """A request without a socket, whose client can leave."""

    def __init__(self, asked: Asked, body: bytes, more_body: bool = False) -> None:
        self._messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._messages.put_nowait({"type": "http.request", "body": body, "more_body": more_body})
        self.sent: list[Any] = []
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "path": "/predict",
            "raw_path": b"/predict",
            "query_string": b"",
            "root_path": "",
            "scheme": "http",
            "headers": [],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 8000),
        }
        self.task = asyncio.ensure_future(asked.app(scope, self._messages.get, self._send))

    async def _send(self, message: Any) -> None:
        self.sent.append(message)

    def leave(self) -> None:
        self._messages.put_nowait({"type": "http.disconnect"})


BODY = b'{"inputs": [[1, 2, 3], [4, 5, 6]]}'


def test_a_client_that_leaves_takes_its_request_out_of_the_queue() -> None:
    async def ask() -> tuple[list[int], str]:
        held = Held()
        async with endpoint((ROW_SUMS, held), max_batch_size=4) as asked:
            running = asyncio.ensure_future(asked.predict(RIGHT))
            await held.started.wait()
            leaving = [Connection(asked, BODY) for _ in range(3)]
            staying = Connection(asked, BODY)
            await turns()
            assert asked.batcher.stats.num_queued == 4
            for each in leaving:
                each.leave()
            await asyncio.gather(*(each.task for each in leaving))
            assert asked.batcher.stats.num_queued == 1
            assert all(each.sent == [] for each in leaving)
            held.go.set()
            await asyncio.gather(running, staying.task)
            assert staying.sent[0]["status"] == 200
            return held.batches, asked.monitor.text()[0].decode()

    batches, metrics = asyncio.run(ask())
    assert batches == [1, 1]
    assert 'orchestray_requests_total{model="sums",status="499",version="1"} 3.0' in metrics


def test_a_client_that_leaves_within_its_body_is_no_error() -> None:
    async def ask() -> list[Any]:
        async with endpoint() as asked:
            connection = Connection(asked, b'{"inputs":', more_body=True)
            connection.leave()
            await connection.task
            return connection.sent

    assert asyncio.run(ask()) == []


def test_a_cancellation_by_the_server_is_not_taken_for_one_by_the_client() -> None:
    async def ask() -> bool:
        held = Held()
        async with endpoint((ROW_SUMS, held)) as asked:
            connection = Connection(asked, BODY)
            await held.started.wait()
            connection.task.cancel()
            await asyncio.wait({connection.task})
            return connection.task.cancelled()

    assert asyncio.run(ask())


def test_thousands_of_clients_that_leave_leave_no_task_behind() -> None:
    async def ask() -> tuple[set[Any], int]:
        held = Held()
        async with endpoint((ROW_SUMS, held), max_batch_size=1, max_queue=5000, settings=QUIET) as asked:
            before = asyncio.all_tasks()
            for _ in range(4):
                leaving = [Connection(asked, BODY) for _ in range(500)]
                await turns(10)
                for each in leaving:
                    each.leave()
                await asyncio.gather(*(each.task for each in leaving))
            held.go.set()
            await turns()
            return asyncio.all_tasks() - before, asked.batcher.stats.num_queued

    left, num_queued = asyncio.run(ask())
    assert left == set()
    assert num_queued == 0


QUIET = HttpSettings(access_log=False)


def test_answers_are_those_of_single_requests_whatever_shares_a_batch() -> None:
    async def ask() -> tuple[list[Any], list[int]]:
        held = Held(row_sums)
        async with endpoint((ROW_SUMS, held), max_batch_size=8) as asked:
            inputs = [[[i, 1, 2], [3, 4, -i]] for i in range(20)]
            asking = [asyncio.ensure_future(asked.predict(each)) for each in inputs]
            await held.started.wait()
            await turns()
            held.go.set()
            answers = [answer.json()["outputs"] for answer in await asyncio.gather(*asking)]
            assert answers == np.array(inputs).sum(axis=2).tolist()
            return answers, held.batches

    _, batches = asyncio.run(ask())
    assert max(batches) == 8
    assert sum(batches) == 20
