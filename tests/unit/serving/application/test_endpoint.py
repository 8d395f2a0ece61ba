"""A running endpoint, over real HTTP in this process: it loads before it answers, changes without a failed request,
is found by its name, and answers what is under way before it ends.
"""

from __future__ import annotations

import asyncio
import gc
import hashlib
import http.client
import json
import os
import shutil
import socket
import sys
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from orchestray.platform.errors import ConfigError, OrchestrayError, RunNameError
from orchestray.serving.api import serve, update
from orchestray.serving.application.endpoint import LiveEndpoint
from orchestray.serving.batching import Batcher, BatcherClosedError, Greedy
from orchestray.serving.config.load import load_serve_config
from orchestray.serving.config.schema import ModelSection, ServeConfig
from orchestray.serving.lifecycle.name_lock import EndpointInfo, EndpointState, find_endpoint, state_path
from orchestray.serving.models import device
from orchestray.serving.models import load as loading
from orchestray.serving.models.signature import Output, Sample
from orchestray.serving.replicas.in_process import in_process
from orchestray.serving.routing.endpoint import ModelVersion
from support.http_endpoint import ROW_SUMS
from support.live_endpoint import serving
from support.patience import PATIENCE_S
from support.served import written_run

EXAMPLE = {"inputs": [0.5] * 64}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    runs_dir = tmp_path_factory.mktemp("runs")
    for seed, name in enumerate(("one", "two")):
        written_run(runs_dir, name, seed=seed)
    return runs_dir


def config_of(runs: Path, *models: dict[str, Any], **more: Any) -> dict[str, Any]:
    named = [{"name": "digits", **model, "run": str(runs / model["run"])} for model in models]
    return {"name": "endpoint", "http": {"port": 0}, "models": named, **more}


def ask(port: int, path: str = "/predict", body: Any = EXAMPLE, bearer: str = "") -> tuple[int, Any]:
    authorization = {"authorization": f"Bearer {bearer}"} if bearer else {}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    try:
        if body is None:
            connection.request("GET", path)
        else:
            connection.request("POST", path, json.dumps(body), {"content-type": "application/json", **authorization})
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read() or b"null")
    finally:
        connection.close()


def test_an_endpoint_changes_version_without_a_failed_request_rolls_back_and_leaves_threads_as_before(
    runs: Path,
) -> None:
    first = config_of(runs, {"run": "one", "version": 1})
    both = config_of(runs, {"run": "one", "version": 1, "traffic": 0}, {"run": "two", "version": 2})
    statuses: list[int] = []
    before_s = sys.getswitchinterval()
    with serving(runs, first) as port:
        assert sys.getswitchinterval() < before_s
        assert gc.get_freeze_count() > 0  # a collection of all that torch makes would hold up every request
        status, old = ask(port)
        assert status == 200
        done = threading.Event()

        def client() -> None:
            while not done.is_set():
                statuses.append(ask(port)[0])

        clients = [threading.Thread(target=client) for _ in range(3)]
        for each in clients:
            each.start()
        changed = update(both, runs_dir=runs)
        assert "digits version 2 is new" in changed
        assert "digits version 1 gets 0 %" in changed
        new = ask(port)[1]
        assert new["outputs"] != pytest.approx(old["outputs"], abs=1e-5)
        assert "digits version 1 gets 100 %" in update(
            config_of(runs, {"run": "one", "version": 1}, {"run": "two", "version": 2, "traffic": 0}), runs_dir=runs
        )
        assert ask(port)[1]["outputs"] == pytest.approx(old["outputs"], abs=1e-5)
        assert "digits version 2 is gone" in update(first, runs_dir=runs)
        done.set()
        for each in clients:
            each.join(PATIENCE_S)
    assert statuses
    assert set(statuses) == {200}
    assert sys.getswitchinterval() == before_s
    assert not state_path(runs, "endpoint").exists()


def test_a_run_of_the_same_directory_that_was_trained_anew_is_served_after_an_update(
    runs: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(runs / "one", tmp_path / "again")
    config = {"name": "endpoint", "http": {"port": 0}, "models": [{"name": "digits", "run": str(run)}]}
    with serving(runs, config) as port:
        old = ask(port)[1]["outputs"]
        assert update(config, runs_dir=runs) == "nothing has changed"
        shutil.copytree(runs / "two" / "model", run / "model", dirs_exist_ok=True)
        assert ask(port)[1]["outputs"] == old
        assert update(config, runs_dir=runs) == "digits version 1 is replaced"
        assert ask(port)[1]["outputs"] != pytest.approx(old, abs=1e-5)
        assert update(config, runs_dir=runs) == "nothing has changed"


def test_a_change_that_cannot_be_made_leaves_the_endpoint_as_it_is(runs: Path) -> None:
    with serving(runs, config_of(runs, {"run": "one"})) as port:
        broken = written_run(runs, "broken")
        weights = broken / "model" / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-10])
        with pytest.raises(OrchestrayError, match="broken cannot be served"):
            update(config_of(runs, {"run": "broken", "version": 2}), runs_dir=runs)
        with pytest.raises(ConfigError, match="max_batch_size"):
            update(config_of(runs, {"run": "one"}, batching={"max_batch_size": 0}), runs_dir=runs)
        told = update({**config_of(runs, {"run": "one"}), "http": {"port": 1, "max_body_mb": 1e-4}}, runs_dir=runs)
        assert f"http.port stays {port}" in told or "http.port stays 0" in told
        assert ask(port)[0] == 413  # the new limit holds, as 104 bytes are fewer than the example has
        assert ask(port, "/v2", None)[0] == 200


def test_tokens_that_were_added_to_the_file_hold_after_an_update_and_are_told(runs: Path, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text(hashlib.sha256(b"old").hexdigest())
    config = config_of(runs, {"run": "one"}, auth={"tokens_file": str(tokens)})
    with serving(runs, config) as port:
        assert ask(port, bearer="old")[0] == 200
        assert ask(port, bearer="new")[0] == 401
        assert update(config, runs_dir=runs) == "nothing has changed"
        tokens.write_text(hashlib.sha256(b"new").hexdigest())
        assert update(config, runs_dir=runs) == "other tokens are taken"
        assert ask(port, bearer="new")[0] == 200
        assert ask(port, bearer="old")[0] == 401


def test_an_endpoint_that_asks_for_tokens_is_opened_to_all_only_by_who_says_so(runs: Path, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text(hashlib.sha256(b"mine").hexdigest())
    silent = config_of(runs, {"run": "one"})
    with serving(runs, {**silent, "auth": {"tokens_file": str(tokens)}}) as port:
        for auth in ({}, {"auth": {"requests_per_s": 1000.0}}):
            with pytest.raises(
                ConfigError, match=r"does not say which; .*auth\.tokens_file=FILE.*auth\.tokens_file=null"
            ):
                update({**silent, **auth}, runs_dir=runs)
            assert ask(port)[0] == 401
        told = update({**silent, "auth": {"tokens_file": None}}, runs_dir=runs)
        assert told == "no token is needed any more"
        assert ask(port)[0] == 200


def test_who_serves_other_machines_without_a_token_is_warned_at_the_start_and_at_each_update(
    runs: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ORCHESTRAY_TOKEN", raising=False)
    text = "http.host 0.0.0.0 lets other machines ask, without a token: set auth.tokens_file or ORCHESTRAY_TOKEN"
    every = {**config_of(runs, {"run": "one"}), "http": {"port": 0, "host": "0.0.0.0"}}  # noqa: S104
    tokens = tmp_path / "tokens"
    tokens.write_text(hashlib.sha256(b"mine").hexdigest())
    guarded = {**every, "auth": {"tokens_file": str(tokens)}}
    with serving(runs, every):
        assert [each.getMessage() for each in caplog.records if "token" in each.getMessage()] == [f"Warning: {text}."]
        assert update(every, runs_dir=runs) == f"warning: {text}"
        assert update(guarded, runs_dir=runs) == "other tokens are taken"
        caplog.clear()
    for quiet in (guarded, config_of(runs, {"run": "one"})):
        with serving(runs, quiet):
            assert not [each for each in caplog.records if "token" in each.getMessage()]


def test_a_shadow_that_takes_other_inputs_is_said_at_the_start_and_at_an_update(
    runs: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = {"type": "python_source", "context": 16, "width": 16, "depth": 1, "heads": 2}
    shadow = {"run": str(written_run(tmp_path, "text", task=text)), "version": 2, "shadow": True}
    clause = (
        "digits version 2, a shadow, gets no copies of what version 1 is asked, because it takes other inputs: "
        "inputs (int64 of shape [16]), not inputs (float32 of shape [64])"
    )
    unlike = config_of(runs, {"run": "one"}, shadow)
    with serving(runs, unlike) as port:
        assert [each.getMessage() for each in caplog.records if "shadow" in each.getMessage()] == [
            f"Warning: {clause}."
        ]
        caplog.clear()
        assert ask(port)[0] == 200
        alike = config_of(runs, {"run": "one"}, {**shadow, "run": "two"})
        assert "shadow" not in update(alike, runs_dir=runs)
        assert update(unlike, runs_dir=runs) == f"digits version 2 is replaced; warning: {clause}"
    assert "raised on a request" not in caplog.text


def test_an_endpoint_s_name_is_its_own_while_it_lives(runs: Path) -> None:
    with pytest.raises(RunNameError, match="no endpoint named 'endpoint' runs"):
        update(config_of(runs, {"run": "one"}), runs_dir=runs)
    state = EndpointState(runs, "endpoint")
    with pytest.raises(RunNameError, match="still starting"):
        find_endpoint(runs, "endpoint")
    state.write(EndpointInfo("endpoint", os.getpid(), "http://127.0.0.1:1", 1))
    with pytest.raises(RunNameError, match=r"runs already at http://127\.0\.0\.1:1"):
        EndpointState(runs, "endpoint")
    assert find_endpoint(runs, "endpoint").url == "http://127.0.0.1:1"
    assert state_path(runs, "endpoint").stat().st_mode & 0o077 == 0
    os.close(state._file)  # as when its process is killed
    with pytest.raises(RunNameError, match="no endpoint"):
        find_endpoint(runs, "endpoint")
    EndpointState(runs, "endpoint").close()


@pytest.mark.parametrize("kind", ["digits", pytest.param("text", marks=pytest.mark.slow)])
def test_with_free_first_nothing_keeps_a_model_that_goes_when_the_next_is_loaded_and_requests_say_when_to_retry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    task = {"type": "python_source", "context": 32, "width": 16, "depth": 1, "heads": 2} if kind == "text" else None
    for seed, name in enumerate(("one", "two")):
        written_run(tmp_path, name, seed=seed, task=task)
    seen: list[tuple[bool, int, Any]] = []
    models: list[weakref.ref[Any]] = []
    load = loading.load_served_model

    def noted(*arguments: Any, **settings: Any) -> Any:
        if models:
            seen.append((models[-1]() is None, *ask(port, "/v2/health/ready", None)))
        served = load(*arguments, **settings)
        models.append(weakref.ref(served.module))
        return served

    monkeypatch.setattr(loading, "load_served_model", noted)
    given_back: list[int] = []
    release = device.release_memory

    def noted_release() -> None:
        release()
        given_back.append(len(seen))

    monkeypatch.setattr(device, "release_memory", noted_release)
    first, second = (config_of(tmp_path, {"run": name, "version": 1}) for name in ("one", "two"))
    with serving(tmp_path, first) as port:
        about = ask(port, "/models", None)[1][0]
        example = about["example"]
        assert about["versions"][0]["computing"] == {"device": "cpu"}
        assert about["versions"][0]["batching"] == {"policy": "Adaptive", "learned_from": 0, "max_batch_size": 32}
        assert ask(port, body={"inputs": example})[0] == 200
        if kind == "text":
            assert ask(port, "/generate", {"prompt": "a", "max_tokens": 1})[0] == 200
        assert update({**second, "update": {"free_first": True}}, runs_dir=tmp_path) == "digits version 1 is replaced"
        ((is_gone, status, answer),) = seen
        assert is_gone
        assert given_back == [0], "its memory goes back to the device before the next one is loaded"
        assert status == 503
        assert answer["error"] == (
            "The model digits is being replaced, and is not there meanwhile. Send the request again."
        )
        assert answer["retry_after_s"] >= 1
        assert ask(port, body={"inputs": example})[0] == 200
        if kind == "text":
            assert ask(port, "/generate", {"prompt": "a", "max_tokens": 1})[0] == 200
        assert update(first, runs_dir=tmp_path) == "digits version 1 is replaced"
        assert seen[1][:2] == (False, 200)  # without it the model stays until the other is there


def test_with_free_first_the_next_model_is_loaded_once_the_requests_of_the_one_before_are_answered(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = loading.load_served_model
    is_computed, loads = threading.Event(), threading.Event()
    overlapped: list[bool] = []

    def noted(*arguments: Any, **settings: Any) -> Any:
        if is_computed.is_set():
            loads.set()
        served = load(*arguments, **settings)
        run = served.run

        def run_slowly(samples: Sequence[Sample]) -> Any:
            is_computed.set()
            overlapped.append(loads.wait(1.5))
            return run(samples)

        monkeypatch.setattr(served, "run", run_slowly)
        return served

    monkeypatch.setattr(loading, "load_served_model", noted)
    with serving(runs, config_of(runs, {"run": "one"})) as port, ThreadPoolExecutor(1) as beside:
        answer = beside.submit(ask, port)
        assert is_computed.wait(PATIENCE_S)
        update(config_of(runs, {"run": "two"}, update={"free_first": True}), runs_dir=runs)
        assert answer.result(PATIENCE_S)[0] == 200
    assert overlapped == [False]


def test_with_free_first_the_version_before_answers_again_if_the_new_one_cannot_be_loaded(
    runs: Path, tmp_path: Path
) -> None:
    broken = shutil.copytree(runs / "two", tmp_path / "broken")
    weights = broken / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    with serving(runs, config_of(runs, {"run": "one"})) as port:
        old = ask(port)[1]["outputs"]
        bad = config_of(runs, {"run": "one"}, update={"free_first": True})
        bad["models"][0]["run"] = str(broken)
        with pytest.raises(OrchestrayError, match="broken cannot be served"):
            update(bad, runs_dir=runs)
        assert ask(port)[1]["outputs"] == old
        assert ask(port, "/v2/health/ready", None)[0] == 200


class Hung:
    """A starter of versions of a model that never answers."""

    num_in_flight = 1

    def __init__(self) -> None:
        self.begun, self.go = threading.Event(), threading.Event()
        self.signature = ROW_SUMS

    def pin_threads(self) -> None:
        pass

    def run(self, samples: Sequence[Sample]) -> list[Output | Exception]:
        self.begun.set()
        self.go.wait()
        return [dict(sample) for sample in samples]

    def content(self, model: ModelSection) -> str:
        return ""

    async def start(self, model: ModelSection, config: ServeConfig) -> ModelVersion:
        return in_process(self, Batcher(policy=Greedy()))


@pytest.mark.parametrize("way", ["the time is over", "it is told not to wait", "the version was replaced before"])
def test_an_endpoint_ends_also_while_a_model_hangs(runs: Path, way: str) -> None:
    async def scenario() -> None:
        hung = Hung()
        live = LiveEndpoint(load_serve_config(config_of(runs, {"run": "one"})), make_starters=lambda _: hung)
        await live.start()
        asked = asyncio.ensure_future(live.registry["digits"].predict({"x": np.zeros(2, np.float32)}))
        assert await asyncio.to_thread(hung.begun.wait, 60)
        if way == "the version was replaced before":
            await live.apply(config_of(runs, {"run": "one", "version": 2}))
        live.prepare_to_end()
        ending = asyncio.ensure_future(live.close(drain_s=60 if way == "it is told not to wait" else 0.01))
        await asyncio.sleep(0)
        if way == "it is told not to wait":
            ending.cancel()
        await asyncio.wait({ending}, timeout=PATIENCE_S)
        assert ending.done()
        with pytest.raises(BatcherClosedError):
            await asked
        hung.go.set()

    asyncio.run(scenario())


def test_a_port_that_is_taken_is_a_sentence(runs: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = {**config_of(runs, {"run": "one"}), "http": {"port": port}}
        with pytest.raises(OrchestrayError, match=f"could not listen on 127.0.0.1:{port}: .*--port"):
            serve(config, runs_dir=runs)


def test_several_models_are_asked_by_name(runs: Path, tmp_path: Path) -> None:
    data = config_of(runs, {"run": "one"}, {"run": "two"})
    data["models"][1]["name"] = "other"
    file = tmp_path / "serve.yaml"
    file.write_text(yaml.safe_dump(data))

    async def scenario() -> None:
        live = LiveEndpoint(load_serve_config(file))
        await live.start()
        assert [endpoint.name for endpoint in live.registry] == ["digits", "other"]
        sample = live.registry["other"].signature.parse(EXAMPLE["inputs"])
        answers = [await live.registry[name].predict(sample) for name in ("digits", "other")]
        assert (answers[0]["outputs"] != answers[1]["outputs"]).any()
        live.prepare_to_end()
        await live.close()

    asyncio.run(scenario())
