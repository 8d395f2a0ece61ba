"""Rollback on a real endpoint under load: a bad version loses its share, and nothing else."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from orchestray.serving.api import update
from orchestray.serving.application.watch import Watch
from orchestray.serving.config.schema import RollbackSection
from orchestray.serving.generation.engine import Engine
from orchestray.serving.generation.sampling import Sampling
from orchestray.serving.http import Monitor
from orchestray.serving.routing import rollback
from orchestray.serving.routing.endpoint import ModelVersion
from support import bad_task
from support.batching import in_virtual_time
from support.http_endpoint import ROW_SUMS, Held, row_sums, version_of
from support.patience import PATIENCE_S
from support.served import written_run
from unit.serving.application.test_endpoint import ask, serving
from unit.serving.generation.test_router_versions import Held as HeldDecoder

BODY = {"inputs": [1.0] * 4}


def text_of(port: int, path: str) -> str:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    connection.request("GET", path)
    return connection.getresponse().read().decode()


def num_models() -> int:
    """Return the number of models in this process: each has a thread."""
    return sum(thread.name.startswith("model-digits") for thread in threading.enumerate())


@pytest.mark.parametrize(
    ("bad", "share", "why"),
    [
        ({"fails": True}, 20, "requests failed, more than 1 %"),
        ({"late_s": 0.06}, 100, "requests took more than 50 ms"),
    ],
)
def test_a_bad_version_under_load_goes_back_by_itself_with_no_failure_beyond_its_share(
    tmp_path: Path, bad: dict[str, Any], share: int, why: str
) -> None:
    kind = f"{Path(bad_task.__file__)}:Bad"
    good_run = written_run(tmp_path, "good", task={"type": kind})
    bad_run = written_run(tmp_path, "bad", task={"type": kind, **bad})
    first = {"name": "digits", "run": str(good_run), "version": 1, "traffic": 100 - share}
    second = {"name": "digits", "run": str(bad_run), "version": 2, "traffic": share}
    bounds = {"rollback": {"error_rate": 1.0, "p99_ms": 50.0}}
    before = {"name": "endpoint", "http": {"port": 0}, "models": [{**first, "traffic": 100}]}
    after = {**before, "models": [first, second] if share < 100 else [second], "update": bounds}
    answers: list[tuple[str, int]] = []
    with serving(tmp_path, before) as port:
        done = threading.Event()

        def client() -> None:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
            while not done.is_set():
                connection.request("POST", "/predict", json.dumps(BODY), {"content-type": "application/json"})
                answer = connection.getresponse()
                answer.read()
                answers.append((answer.headers["x-model-version"], answer.status))

        thread = threading.Thread(target=client)
        thread.start()
        try:
            assert "digits version 2 is new" in update(after, runs_dir=tmp_path)
            changed_s = time.monotonic()
            while 'orchestray_rollbacks_total{model="digits",version="2"} 1.0' not in text_of(port, "/metrics"):
                assert time.monotonic() < changed_s + PATIENCE_S
                done.wait(0.05)
            num_before = len(answers) + 1
            while len(answers) < num_before + 20:
                done.wait(0.01)
        finally:
            done.set()
            thread.join(PATIENCE_S)
        assert set(answers[num_before:]) == {("1", 200)}
        assert {status for version, status in answers if version == "1"} == {200}
        assert ask(port, "/predict?version=2", BODY)[0] == 404
        told = update(before, runs_dir=tmp_path)
        assert "digits version 2 was taken back at " in told
        assert why in told
        assert update(before, runs_dir=tmp_path) == "nothing has changed"


def test_versions_that_stand_the_watch_stay_and_those_before_them_end(tmp_path: Path) -> None:
    task = {"type": f"{Path(bad_task.__file__)}:Bad"}
    runs = [str(written_run(tmp_path, name, task=task)) for name in ("one", "two")]
    config = {"name": "endpoint", "http": {"port": 0}, "update": {"rollback": {"error_rate": 1.0, "watch_s": 0.3}}}
    with serving(tmp_path, {**config, "models": [{"name": "digits", "run": runs[0], "version": 1}]}) as port:
        before = num_models()
        update({**config, "models": [{"name": "digits", "run": runs[1], "version": 2}]}, runs_dir=tmp_path)
        until_s = time.monotonic() + PATIENCE_S
        while num_models() > before:
            assert time.monotonic() < until_s
            time.sleep(0.02)
        assert ask(port, "/predict?version=1", BODY)[0] == 404
        assert ask(port, body=BODY)[0] == 200
        assert "orchestray_rollbacks_total{" not in text_of(port, "/metrics")


@pytest.mark.parametrize(("stands", "watch_s"), [(True, 20.0), (False, 4.0)])
def test_a_generator_that_stands_still_goes_back_and_a_long_answer_is_no_silence(
    monkeypatch: pytest.MonkeyPatch, stands: bool, watch_s: float
) -> None:
    monkeypatch.setattr(rollback, "_RECENT_S", 2.0)

    async def reason() -> str | None:
        decoder, version, monitor = HeldDecoder(0), version_of(ROW_SUMS, row_sums), Monitor()
        version.generator = Engine(decoder, num_threads=1)
        found: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()

        async def go_back(_: ModelVersion, why: str) -> None:
            found.set_result(why)

        async def is_over() -> None:
            found.set_result(None)

        if not stands:
            decoder.go_on.set()
        answer = version.generator.generate("x", Sampling(max_tokens=10**6))
        await anext(answer)
        Watch([version], RollbackSection(error_rate=1.0, watch_s=watch_s), monitor, go_back, is_over)
        try:
            return await found
        finally:
            decoder.go_on.set()
            await version.close(drain=False)

    assert asyncio.run(reason()) == ("no request was answered for 2 s" if stands else None)


def watch(version: ModelVersion, monitor: Monitor, gone: list[str]) -> Watch:
    """Watch a version; `gone` gets the reason why it is taken back."""

    async def go_back(_: ModelVersion, why: str) -> None:
        gone.append(why)

    async def is_over() -> None:
        gone.append("it is over")

    return Watch([version], RollbackSection(error_rate=1.0, p99_ms=100.0), monitor, go_back, is_over)


@pytest.mark.parametrize("fails", [True, False])
def test_what_follows_a_judgement_is_done_to_its_end_though_it_ends_the_watch(fails: bool) -> None:
    @in_virtual_time
    async def scenario() -> None:
        version, monitor, done = version_of(ROW_SUMS, row_sums), Monitor(), list[str]()

        async def follow(name: str) -> None:
            assert started.end() == [version]
            assert monitor.on_answer is None
            await asyncio.sleep(1.0)
            done.append(name)

        async def go_back(_: ModelVersion, why: str) -> None:
            await follow(why)

        async def is_over() -> None:
            await follow("it is over")

        started = Watch([version], RollbackSection(error_rate=1.0, watch_s=3.0), monitor, go_back, is_over)
        for _ in range(100 if fails else 0):
            monitor.answered("sums", "1", 500, 0.0)
        await asyncio.sleep(5.0)
        assert len(done) == 1
        assert ("requests failed" in done[0]) == fails

    scenario()


@in_virtual_time
async def test_a_watch_that_is_ended_judges_nothing_any_more() -> None:
    version, monitor, gone = version_of(ROW_SUMS, row_sums), Monitor(), list[str]()
    started = watch(version, monitor, gone)
    for _ in range(100):
        monitor.answered("sums", "1", 500, 0.0)
    assert started.end() == [version]
    await asyncio.sleep(100.0)
    assert gone == []


@in_virtual_time
async def test_a_version_that_rests_is_not_taken_back_for_its_own_start_and_one_that_hangs_after_it_is() -> None:
    version, monitor, gone = version_of(ROW_SUMS, row_sums), Monitor(), list[str]()
    version.rests = True
    version.batcher.expect_start(8.0)
    await version.batcher._core.runners[0].remove()

    watch(version, monitor, gone)
    sample = ROW_SUMS.parse(ROW_SUMS.example)
    asked = [asyncio.ensure_future(version.predict(sample)) for _ in range(3)]
    await asyncio.sleep(0.1)
    for _ in range(3):  # before the watch has looked
        monitor.answered("sums", "1", 503, 0.001)
    await asyncio.sleep(9.0)
    version.batcher.add_runner(row_sums)
    for answer in asked:
        await answer
        monitor.answered("sums", "1", 200, 9.1)
    await asyncio.sleep(1.0)
    assert gone == []
    await version.batcher._core.runners[0].remove()
    version.batcher.add_runner(Held())
    hangs = asyncio.ensure_future(version.predict(sample))
    await asyncio.sleep(6.0)
    assert gone == ["no request was answered for 5 s"]
    hangs.cancel()


@pytest.mark.parametrize(("rests", "seconds"), [(False, 5), (True, 15)])
def test_a_version_whose_replicas_do_not_come_back_is_taken_back_and_later_if_it_may_rest(
    rests: bool, seconds: int
) -> None:
    @in_virtual_time
    async def scenario() -> None:
        version, gone = version_of(ROW_SUMS, row_sums), list[str]()
        version.rests = rests
        await version.batcher._core.runners[0].remove()
        watch(version, Monitor(), gone)
        waits = asyncio.ensure_future(version.predict(ROW_SUMS.parse(ROW_SUMS.example)))
        await asyncio.sleep(seconds - 0.5)
        assert gone == []
        await asyncio.sleep(1.5)
        assert gone == ["no request was answered for 5 s"]
        waits.cancel()

    scenario()
