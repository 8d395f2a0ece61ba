"""Replicas follow the load: Ray Serve's autoscaler does what our policy says."""

from __future__ import annotations

import asyncio
import gc
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from torch import nn

from orchestray.platform.errors import OrchestrayError
from orchestray.serving.application.endpoint import LiveEndpoint
from orchestray.serving.batching import DeadlineError
from orchestray.serving.config.load import load_serve_config
from orchestray.serving.replicas import ray_replicas
from support.patience import PATIENCE_S
from support.served import written_run

if TYPE_CHECKING:
    from orchestray.platform.cluster.cluster import Cluster

SLOW = """
import time
import torch
import pytest
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


def test_replicas_whose_model_cannot_be_served_say_so_once_and_nothing_is_left_of_them(
    cluster: Cluster, tmp_path: Path
) -> None:
    file = str(tmp_path / "broken.py")
    task = {"type": f"{file}:Task", "arguments": {}, "file": file, "source": "class Task: pass"}
    run = written_run(tmp_path, "broken", tensors=dict(nn.Linear(2, 2).state_dict()), model_json={"task": task})
    config = {"name": f"broken-{os.getpid()}", "models": [{"name": "broken", "run": str(run)}], "replicas": 2}
    overlooked: list[dict[str, Any]] = []

    async def scenario() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, told: overlooked.append(told))
        live = LiveEndpoint(load_serve_config(config))
        with pytest.raises(OrchestrayError, match=r"broken cannot be served: .*lacks method"):
            await live.start()
        live.prepare_to_end()
        await live.close()

    asyncio.run(scenario())
    gc.collect()
    assert not overlooked


def test_a_load_that_one_replica_cannot_take_brings_another_and_silence_sends_it_away(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_replicas, "_DOWN_AFTER_S", 1.0)
    file = str(tmp_path / "slow.py")
    task = {"type": f"{file}:Task", "arguments": {}, "file": file, "source": SLOW}
    run = written_run(tmp_path, "slow", tensors=dict(nn.Linear(2, 2).state_dict()), model_json={"task": task})
    config = {
        "name": f"scaled-{os.getpid()}",
        "models": [{"name": "slow", "run": str(run)}],
        "replicas": {"min": 1, "max": 2, "target_latency_ms": 60},
        "batching": {"max_batch_size": 1},
    }

    async def scenario() -> None:
        live = LiveEndpoint(load_serve_config(config))
        try:
            await live.start()
            endpoint = live.registry["slow"]
            sample = endpoint.signature.parse([1.0, 1.0])
            answers: list[dict[str, Any]] = []
            done = asyncio.Event()

            async def client() -> None:
                while not done.is_set():
                    answers.append(await endpoint.predict(sample))

            async def until(count: int) -> None:
                deadline_s = time.monotonic() + PATIENCE_S
                while endpoint.main.batcher.stats.num_runners != count:
                    assert time.monotonic() < deadline_s, f"there are never {count} replicas"
                    await asyncio.sleep(0.05)

            assert endpoint.main.batcher.stats.num_runners == 1
            clients = [asyncio.create_task(client()) for _ in range(4)]
            await until(2)
            done.set()
            await asyncio.gather(*clients)
            await until(1)
            answers.append(await endpoint.predict(sample))
            assert all((answer["outputs"] == answers[0]["outputs"]).all() for answer in answers)
        finally:
            live.prepare_to_end()
            await live.close()

    asyncio.run(scenario())


def test_after_silence_the_last_replica_goes_and_a_request_brings_it_back(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_replicas, "_IDLE_BEFORE_ZERO_S", 3.0)
    run = written_run(tmp_path, "rests")
    config = {
        "name": f"rests-{os.getpid()}",
        "models": [{"name": "rests", "run": str(run)}],
        "replicas": {"min": 0, "max": 1},
    }

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        live = LiveEndpoint(load_serve_config(config))
        try:
            await live.start()
            endpoint = live.registry["rests"]
            batcher = endpoint.main.batcher
            sample = endpoint.signature.parse([1.0] * 64)

            async def until(count: int) -> None:
                deadline_s = time.monotonic() + PATIENCE_S
                while batcher.stats.num_runners != count:
                    assert time.monotonic() < deadline_s, f"there are never {count} replicas"
                    await asyncio.sleep(0.05)

            assert endpoint.main.rests, "without a replica it would not be ready"
            first = await endpoint.predict(sample)
            await until(0)
            with pytest.raises(DeadlineError) as refused:  # a process takes longer to start
                await endpoint.predict(sample, deadline_s=loop.time() + 0.05)
            assert refused.value.retry_after_s == pytest.approx(endpoint.main.start_s, rel=0.1)
            await until(1)  # the refused one was enough to ask for it
            async with asyncio.timeout(PATIENCE_S):
                again = await endpoint.predict(sample)
            assert (again["outputs"] == first["outputs"]).all()
            starts_s = [*batcher._core.admission.start._known_s]  # the shorter of two is the one that counts
            assert starts_s[0] == endpoint.main.start_s
            assert len(starts_s) == 2, "the start is not measured"
        finally:
            live.prepare_to_end()
            await live.close()

    asyncio.run(scenario())
