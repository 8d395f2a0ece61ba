"""Refusals before a request is read, and their cost."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from orchestray.platform.sim import event_loop
from orchestray.serving.batching import Batcher
from orchestray.serving.http import HttpSettings, Monitor
from orchestray.serving.http.access_log import ACCESS_LOGGER
from orchestray.serving.http.auth import Token, Tokens
from orchestray.serving.http.overload.heads import RequestHints
from orchestray.serving.http.overload.pressure import OverloadDetector
from orchestray.serving.http.overload.shedding import LoadShedder
from orchestray.serving.http.request_context import ARRIVED_KEY
from orchestray.serving.routing.endpoint import ModelVersion, Share
from orchestray.serving.routing.registry import Registry
from support.http_endpoint import ROW_SUMS, row_sums, version_of

BATCH_S = 0.5


class Busy:
    """A substitute for the loop's pressure: requests with less time than this are not taken on."""

    waited_s, taken_s, num_taken, number, refuses_less = 0.02, 0.01, 0, 0, True

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.asked_s: list[float] = []
        self.queue_s: list[float] = []
        self.num_refused = self.num_again = 0

    def admits(
        self, loop: asyncio.AbstractEventLoop, allowed_s: float, queue_s: float = 0.0, priority: int = 0
    ) -> bool:
        self.asked_s.append(allowed_s)
        self.queue_s.append(queue_s)
        return allowed_s >= self.seconds

    def refused(self) -> None:
        self.num_refused += 1

    def refused_again(self) -> None:
        self.num_again += 1


class Asking:
    """Requests to a shedding before an application that notes when they came."""

    def __init__(self, busy_s: float, *versions: ModelVersion, settings: HttpSettings | None = None) -> None:
        self.registry = Registry({"sums": [Share(version) for version in versions]} if versions else None)
        self.registry.ready = bool(versions)
        self.monitor = Monitor()
        self.shedding = LoadShedder(self.monitor, settings or HttpSettings(), self.registry)
        self.busy = Busy(busy_s)
        self.shedding._pressure = self.busy  # type: ignore[assignment]
        self.sent: list[dict[str, Any]] = []
        self.passed: list[dict[str, Any]] = []

    async def __call__(self, headers: dict[str, str] | None = None, *, path: str = "/predict", **scope: Any) -> Any:
        """Send a request; return the refusal's status, or 0 where the application was asked."""

        async def app(scope: Any, receive: Any, send: Any) -> None:
            self.passed.append(scope)

        async def send(message: Any) -> None:
            self.sent.append(message)

        async def receive() -> dict[str, Any]:
            return {"type": "http.disconnect"}

        self.sent.clear()
        raw = [(name.lower().encode(), value.encode()) for name, value in (headers or {}).items()]
        whole = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": raw, **scope}
        await self.shedding(app, whole, receive, send)
        return self.sent[0]["status"] if self.sent else 0


@pytest.mark.parametrize(
    ("timeout_ms", "default_s", "asked_s"),
    [
        (None, None, 10.0),
        ("100", None, 0.1),
        ("100", 0.5, 0.1),
        (None, 0.5, 0.5),
        ("soon", None, float("inf")),  # the application says what is wrong with the header
        ("nan", None, float("inf")),
        ("-1", None, float("inf")),
    ],
)
def test_a_request_is_taken_on_by_the_time_it_has(
    timeout_ms: str | None, default_s: float | None, asked_s: float
) -> None:
    asking = Asking(0.2, settings=HttpSettings(timeout_s=default_s))
    headers = {} if timeout_ms is None else {"X-Request-Timeout-Ms": timeout_ms}
    assert asyncio.run(asking(headers)) == (503 if asked_s < 0.2 else 0)
    assert asking.busy.asked_s == [asked_s]


def test_what_is_taken_on_brings_when_it_came() -> None:
    async def ask() -> float:
        asking = Asking(0.0)
        await asking()
        return asyncio.get_running_loop().time() - asking.passed[0][ARRIVED_KEY]

    assert asyncio.run(ask()) >= Busy.waited_s


def test_what_the_connection_has_let_through_is_not_asked_twice() -> None:
    asking = Asking(1.0)
    assert asyncio.run(asking({"X-Request-Timeout-Ms": "1"}, **{ARRIVED_KEY: 1.0})) == 0
    assert asking.busy.asked_s == []


def test_pages_and_health_are_answered_whatever_the_pressure() -> None:
    assert asyncio.run(Asking(1e9)(method="GET")) == 0


def test_a_refusal_says_why_when_to_come_back_and_which_request_it_was() -> None:
    asking = Asking(1e9)
    assert asyncio.run(asking({"X-Request-Id": "mine"})) == 503
    headers, told = dict(asking.sent[0]["headers"]), json.loads(asking.sent[1]["body"])
    assert headers[b"retry-after"] == b"1"
    assert headers[b"x-request-id"] == b"mine"
    assert told == {
        "error": "More requests come than this endpoint can read. Retry in 0.03 s.",
        "request_id": "mine",
        "retry_after_s": pytest.approx(0.03),
    }
    assert 'status="503"' in asking.monitor.text()[0].decode()


@pytest.mark.parametrize("path", ["/v1/completions", "/models/text/v1/completions"])
def test_a_refusal_has_the_form_of_openai_where_that_is_asked(path: str) -> None:
    asking = Asking(1e9)
    assert asyncio.run(asking({"X-Request-Id": "mine"}, path=path)) == 503
    headers, body = dict(asking.sent[0]["headers"]), asking.sent[1]["body"]
    text = "More requests come than this endpoint can read. Retry in 0.03 s."
    error = {"message": text, "type": "server_error", "param": None, "code": None}
    assert json.loads(body) == {"error": error, "request_id": "mine"}
    assert int(headers[b"content-length"]) == len(body)


def test_a_refusal_that_a_page_may_read_is_not_given_to_others_of_its_round() -> None:
    async def ask() -> None:
        version, _ = held_version()
        asking = Asking(0.2, version, settings=HttpSettings(cors_origins=("https://a.example",)))
        page = RequestHints(0.1, None, True, origin=b"https://a.example")
        refusal = asking.shedding.refusal(asyncio.get_running_loop(), page)
        assert refusal is not None
        assert HttpAnswer(refusal.to_bytes(keep=True)).headers["access-control-allow-origin"] == "https://a.example"
        assert asking.shedding.again(page) is None
        for origin in (None, b"https://b.example"):
            again = asking.shedding.again(replace(page, origin=origin))
            assert again is not None
            assert "access-control-allow-origin" not in HttpAnswer(again).headers

    asyncio.run(ask())


def test_under_load_a_request_of_higher_priority_is_taken_on_where_one_of_lower_priority_is_refused() -> None:
    async def ask() -> list[int]:
        asking = Asking(0.0)
        pressure = asking.shedding._pressure = OverloadDetector()
        pressure._rounds_s.append(1.0)
        pressure._cost_s, pressure._lasting_s = 0.4, 1.0  # of 10 s a request: three at once are too much for one round
        return [
            *[await asking() for _ in range(5)],
            *[await asking({"X-Request-Priority": priority}) for priority in ("-1", "1", "1", "100", "1", "1", "0")],
        ]

    assert asyncio.run(ask()) == [0, 0, 0, 503, 503, 503, 0, 0, 0, 503, 503, 503]


def held_version() -> tuple[ModelVersion, asyncio.Event]:
    go = asyncio.Event()

    async def run(samples: Sequence[Any]) -> Any:
        await go.wait()
        return await row_sums(samples)

    return version_of(ROW_SUMS, run, max_batch_size=1, max_queue=1), go


async def full(version: ModelVersion) -> list[asyncio.Future[Any]]:
    """Let one request run, and one wait."""
    running = version.batcher.put({})
    for _ in range(10):
        await asyncio.sleep(0)
    assert version.batcher.stats.num_in_flight == 1
    return [running, version.batcher.put({})]


def test_what_the_queue_would_refuse_is_refused_before_it_is_read_and_counted_once() -> None:
    async def ask() -> tuple[list[int], dict[str, int], str]:
        version, _ = held_version()
        asking = Asking(0.0, version)
        first = await asking()
        waiting = await full(version)
        statuses = [first, await asking(), await asking({"X-Request-Timeout-Ms": "0"})]
        for each in waiting:
            each.cancel()
        return statuses, version.batcher.stats.num_shed, asking.monitor.text()[0].decode()

    statuses, shed, metrics = asyncio.run(ask())
    assert statuses == [0, 503, 503]
    assert shed == {"queue_full": 1, "deadline_infeasible": 1}
    assert 'orchestray_requests_total{model="sums",status="503",version="1"} 2.0' in metrics


@pytest.mark.parametrize(
    ("headers", "scope"),
    [
        ({"X-Request-Priority": "1"}, {}),  # it takes the place of another
        ({"X-Model-Version": "2"}, {}),
        ({"X-Model": "other"}, {}),
        ({}, {"query_string": b"version=2"}),
        ({}, {"path": "/v2/models/sums/infer"}),
    ],
)
def test_where_it_is_not_certain_who_answers_the_application_is_asked(
    headers: dict[str, str], scope: dict[str, Any]
) -> None:
    async def ask() -> int:
        version, _ = held_version()
        waiting = await full(version)
        status: int = await Asking(0.0, version)(headers, **scope)
        for each in waiting:
            each.cancel()
        return status

    assert asyncio.run(ask()) == 0


def test_who_needs_a_token_is_told_nothing_of_queues() -> None:
    async def ask() -> list[int]:
        version, _ = held_version()
        waiting = await full(version)
        asking = Asking(0.0, version)
        open_to_all = await asking()
        asking.shedding.follow(HttpSettings(tokens=Tokens((Token("0" * 64, "me"),))))
        guarded = await asking()
        for each in waiting:
            each.cancel()
        return [open_to_all, guarded]

    assert asyncio.run(ask()) == [503, 0]


def test_what_waits_and_what_comes_before_it_is_counted_against_a_request() -> None:
    async def ask() -> tuple[list[float], int]:
        version, _ = held_version()
        waiting = await full(version)
        for _ in range(20):
            version.batcher.model.observe(1, BATCH_S)
        asking = Asking(0.0, version)
        asking.busy.num_taken = version.batcher.max_batch_size
        await asking()
        for each in waiting:
            each.cancel()
        return asking.busy.queue_s, asking.busy.num_refused

    queue_s, num_refused = asyncio.run(ask())
    assert queue_s[0] == pytest.approx(2 * BATCH_S)  # the batch that was taken on before it, and the queue
    assert num_refused == 1  # by the queue: no work that was taken on


def test_a_refusal_before_and_one_after_are_by_the_same_rule() -> None:
    async def ask() -> bool:
        batcher: Batcher[int, int] = Batcher(max_batch_size=1, max_queue=1)
        assert batcher.refusal() is None
        first = batcher.refusal(asyncio.get_running_loop().time() - 1)
        return type(first).__name__ == "DeadlineError" and batcher.stats.num_shed == {"deadline_infeasible": 1}

    assert asyncio.run(ask())


def test_a_request_is_refused_for_those_that_were_let_through_before_it() -> None:
    async def ask() -> list[bool]:
        batcher: Batcher[int, int] = Batcher(max_batch_size=4)

        async def run(items: Sequence[int]) -> Sequence[int]:
            return items

        batcher.add_runner(run)
        for _ in range(50):
            batcher.model.observe(4, 0.01)
        deadline_s = asyncio.get_running_loop().time() + 0.05
        found = [batcher.refusal(deadline_s, num_coming=num) is None for num in (0, 4, 40)]
        await batcher.close()
        return found

    assert event_loop.run(ask()) == [True, True, False]


def test_in_a_round_that_is_full_who_asks_for_no_more_time_is_refused_alike_and_by_an_id_of_its_own() -> None:
    async def ask() -> tuple[list[bytes | None], Asking]:
        version, _ = held_version()
        asking, loop = Asking(0.2, version), asyncio.get_running_loop()
        wish = RequestHints(0.1, None, True)
        found = [asking.shedding.again(wish)]
        refusal = asking.shedding.refusal(loop, wish)
        assert refusal is not None
        others = (
            RequestHints(0.05, None, True),
            RequestHints(0.15, None, True),
            RequestHints(0.1, b"id", True),
            RequestHints(0.1, None, False),
        )
        found += [asking.shedding.again(each) for each in (wish, wish, *others)]
        asking.busy.number += 1
        return [*found, asking.shedding.again(wish)], asking

    (before, first, second, hurried, longer, named, other, after), asking = asyncio.run(ask())
    assert before is longer is named is other is after is None
    assert first is not None
    assert second is not None
    assert hurried is not None
    answers = [HttpAnswer(each) for each in (first, second, hurried)]
    assert {each.status for each in answers} == {503}
    assert len({each.told["request_id"] for each in answers}) == 3
    for each in answers:
        assert each.headers["x-request-id"] == each.told["request_id"]
        assert each.told["error"] == "More requests come than this endpoint can read. Retry in 0.03 s."
    assert asking.busy.num_again == 3
    assert 'requests_total{model="sums",status="503",version="1"} 4.0' in asking.monitor.text()[0].decode()


def test_what_the_queue_refuses_it_refuses_in_the_same_round_to_who_has_as_much_time_and_to_nobody_else() -> None:
    """Let requests with less time go before those that wait."""

    async def ask() -> tuple[list[bytes | None], dict[str, int], Asking]:
        version, _ = held_version()
        waiting = await full(version)
        asking, loop = Asking(0.0, version), asyncio.get_running_loop()
        wish = RequestHints(0.1, None, True)
        refusal = asking.shedding.refusal(loop, wish)
        assert refusal is not None
        found = [asking.shedding.again(RequestHints(seconds, None, True)) for seconds in (0.1, 0.1, 0.05, 0.15)]
        asking.busy.number += 1
        found.append(asking.shedding.again(wish))
        for each in waiting:
            each.cancel()
        return found, dict(version.batcher.stats.num_shed), asking

    (first, second, *others), num_shed, asking = asyncio.run(ask())
    assert others == [None] * 3
    assert num_shed == {"queue_full": 3}  # each counts for scaling by the load
    assert first is not None
    assert second is not None
    answers = [HttpAnswer(each) for each in (first, second)]
    assert {each.status for each in answers} == {503}
    assert {each.told["error"].partition(":")[0] for each in answers} == {"The queue is full"}
    assert len({each.told["request_id"] for each in answers}) == 2
    assert [each.headers["x-request-id"] for each in answers] == [each.told["request_id"] for each in answers]
    metrics = asking.monitor.text()[0].decode()
    assert 'requests_total{model="sums",status="503",version="1"} 3.0' in metrics


def test_every_refusal_has_its_line_in_the_log_and_counts_as_shed(caplog: pytest.LogCaptureFixture) -> None:
    async def ask() -> tuple[list[str], str]:
        version, _ = held_version()
        waiting = await full(version)
        asking, loop = Asking(0.2, version), asyncio.get_running_loop()
        hurried, patient = (RequestHints(seconds, None, True, b"/predict") for seconds in (0.1, 1.0))
        ids = []
        for wish in (patient, hurried):  # for the queue, and for the load
            refusal = asking.shedding.refusal(loop, wish, "10.0.0.1")
            assert refusal is not None
            ids.append(refusal.request_id)
        again = asking.shedding.again(hurried, "10.0.0.1")
        assert again is not None
        ids.append(HttpAnswer(again).headers["x-request-id"])
        await asking({"X-Request-Timeout-Ms": "1", "X-Request-Id": "mine"}, query_string=b"version=1")
        asking.shedding.follow(HttpSettings(access_log=False))
        await asking({"X-Request-Timeout-Ms": "1"})
        for each in waiting:
            each.cancel()
        return [*ids, "mine"], asking.monitor.text()[0].decode()

    with caplog.at_level(logging.INFO, logger=ACCESS_LOGGER):
        ids, metrics = asyncio.run(ask())
    lines = [json.loads(record.getMessage()) for record in caplog.records if record.name == ACCESS_LOGGER]
    assert [line["request_id"] for line in lines] == ids
    assert {(line["method"], line["path"], line["status"]) for line in lines} == {("POST", "/predict", 503)}
    assert [line["client"] for line in lines] == ["10.0.0.1"] * 3 + [None]
    assert all(line["bytes"] > 0 for line in lines)
    assert 'orchestray_shed_total{model="sums",reason="overload",version="1"} 3.0' in metrics
    assert 'orchestray_shed_total{model="",reason="overload",version=""} 1.0' in metrics


def test_the_log_says_how_many_bytes_a_refusal_has(caplog: pytest.LogCaptureFixture) -> None:
    async def ask() -> bytes:
        asking, loop = Asking(0.2, held_version()[0]), asyncio.get_running_loop()
        asking.shedding.refusal(loop, RequestHints(0.1, None, True))
        answer = asking.shedding.again(RequestHints(0.1, None, True))
        assert answer is not None
        return answer

    with caplog.at_level(logging.INFO, logger=ACCESS_LOGGER):
        answer = asyncio.run(ask())
    (_, again) = (json.loads(record.getMessage()) for record in caplog.records if record.name == ACCESS_LOGGER)
    assert again["bytes"] == len(answer.partition(b"\r\n\r\n")[2])


class HttpAnswer:
    """The answer in bytes that are exactly one."""

    def __init__(self, data: bytes) -> None:
        head, _, body = data.partition(b"\r\n\r\n")
        first, *lines = head.decode().split("\r\n")
        self.status = int(first.split()[1])
        self.headers = dict(line.split(": ", 1) for line in lines)
        assert int(self.headers["content-length"]) == len(body)
        self.told: dict[str, Any] = json.loads(body)


@pytest.mark.parametrize("refuses_less", [True, False])
def test_who_has_less_time_than_one_that_was_refused_is_refused_alike_only_where_that_holds_for_less(
    refuses_less: bool,
) -> None:
    async def ask() -> list[bool]:
        version, _ = held_version()
        asking, loop = Asking(2.0, version), asyncio.get_running_loop()
        asking.busy.refuses_less = refuses_less
        assert asking.shedding.refusal(loop, RequestHints(1.0, None, True)) is not None
        return [asking.shedding.again(RequestHints(seconds, None, True)) is not None for seconds in (0.5, 1.0, 1.5)]

    assert asyncio.run(ask()) == [refuses_less, True, False]


def test_who_is_read_later_with_as_much_time_has_no_earlier_deadline_whatever_rounds_say() -> None:
    """Give it no earlier deadline: else it would displace one that was promised to be in time."""
    asking = Asking(0.0)
    told_s = []
    for now_s, waited_s in [(1.0, 0.0), (1.001, 0.02), (1.05, 0.02), (1.051, 0.0), (1.052, 0.03)]:
        asking.busy.waited_s = waited_s
        told_s.append(asking.shedding.arrived_s(now_s))
    assert told_s == pytest.approx([1.0, 1.0, 1.03, 1.051, 1.051])
