"""A model divided over real processes: it answers as the whole one, and goes on when a process is killed."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn

from orchestray.serving.application.endpoint import LiveEndpoint
from orchestray.serving.batching import Batcher
from orchestray.serving.config.load import load_serve_config
from orchestray.serving.models.errors import ModelError
from orchestray.serving.models.quantize import num_bytes
from orchestray.serving.models.signature import Output, Sample
from orchestray.serving.sharded.model_parallel import ModelParallel
from orchestray.serving.sharded.partition import ServedNetwork
from orchestray.trainers.saved.run import load_run
from support.served import written_run

if TYPE_CHECKING:
    from orchestray.platform.cluster.cluster import Cluster

TASK = {"type": "python_source", "context": 16, "width": 32, "depth": 4, "heads": 4}


HANGS = """
import time
from pathlib import Path
import pyarrow as pa
import torch
from torch import nn

class Hangs(nn.Module):
    def forward(self, inputs):
        flag = Path({flag!r})
        if bool((inputs > 5).any()) and flag.exists():
            flag.write_text("hangs")
            time.sleep(10_000)
        return inputs

class Own:
    def build_model(self): return nn.Sequential(Hangs(), nn.Linear(3, 4), nn.Linear(4, 2))
    def dataset(self, split): return pa.table({{"x": [1.0, 2.0]}})
    def to_batch(self, columns): return {{"inputs": torch.ones(len(columns), 3)}}
    def loss(self, outputs, batch): return outputs.mean()
    def metrics(self, outputs, batch): return {{}}
"""


def test_a_process_that_hangs_in_a_batch_is_replaced_and_the_others_stay(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestray.serving.sharded.model_parallel._FREE_S", 3.0)
    flag, file = tmp_path / "flag", tmp_path / "own.py"
    os.mkfifo(flag)
    source = HANGS.format(flag=str(flag))
    file.write_text(source)
    described = {"type": f"{file}:Own", "arguments": {}, "file": str(file), "source": source}
    whole = nn.Sequential(nn.Identity(), nn.Linear(3, 4), nn.Linear(4, 2))
    run = written_run(tmp_path, tensors=dict(whole.state_dict()), model_json={"task": described})

    async def main() -> None:
        parallel = await ModelParallel.start(run, ServedNetwork(pipeline=2, split=("2",)), max_batch_size=2)
        try:
            hanging, staying = parallel.pids
            batch: list[Sample] = [{"inputs": np.full(3, 9, np.float32)}]
            hung = asyncio.ensure_future(parallel.run(batch))
            assert await asyncio.to_thread(flag.read_text) == "hangs"
            flag.unlink()  # once is enough
            hung.cancel()  # as one that has had its time
            (answer,) = await parallel.runner()(batch)
            assert isinstance(answer, dict)
            with torch.no_grad():
                wanted = whole(torch.from_numpy(batch[0]["inputs"])[None])[0]
            np.testing.assert_allclose(answer["outputs"], wanted.numpy(), rtol=1e-5, atol=1e-6)
            assert staying in parallel.pids
            assert hanging not in parallel.pids
        finally:
            await parallel.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("network", "replicas"), [({"tensor": 2}, 2), ({"tensor": 2, "pipeline": 2, "split": "equal"}, 1)], ids=str
)
def test_layers_split_over_processes_and_several_gangs_answer_as_the_whole_model(
    cluster: Cluster, tmp_path: Path, network: dict[str, Any], replicas: int
) -> None:
    run = written_run(tmp_path, task=TASK)
    samples = [{"inputs": np.random.default_rng(seed).integers(0, 256, 16)} for seed in range(48)]
    with torch.no_grad():
        model = load_run(run).load_model()
        whole = model(torch.from_numpy(np.stack([sample["inputs"] for sample in samples]))).numpy()
    config = {
        "name": "x",
        "models": [{"name": "m", "run": str(run)}],
        "batching": {"max_batch_size": 4},
        "compute": {"network": network},
        "resources": {"cpus_per_worker": 0.5},
        "replicas": replicas,
    }

    async def main() -> None:
        live = LiveEndpoint(load_serve_config(config))
        await live.start()
        try:
            (version,) = live.registry["m"].versions
            answers = await asyncio.gather(*(version.predict(sample) for sample in samples))
            found = np.stack([answer["outputs"] for answer in answers])
            np.testing.assert_allclose(found, whole, rtol=1e-5, atol=1e-6)
            by_gang = Counter[str]()
            for runner in version.batcher.stats.runners:
                by_gang[runner.name.rpartition(".")[0]] += runner.num_items
            assert sum(by_gang.values()) == len(samples)
            assert len(by_gang) == replicas
            assert min(by_gang.values()) > 0
        finally:
            await live.close()

    asyncio.run(main())


def test_a_pipeline_of_processes_answers_as_the_whole_model_and_loses_no_request_to_a_kill(
    cluster: Cluster, tmp_path: Path
) -> None:
    run = written_run(tmp_path, task=TASK)
    model = load_run(run).load_model()
    samples = [{"inputs": np.random.default_rng(seed).integers(0, 256, 16)} for seed in range(24)]
    with torch.no_grad():
        whole = model(torch.from_numpy(np.stack([sample["inputs"] for sample in samples]))).numpy()

    async def main() -> None:
        parallel = await ModelParallel.start(run, ServedNetwork(pipeline=2), max_batch_size=4)
        try:
            assert [spec.shape for spec in parallel.signature.outputs] == [(16, 256)]
            assert max(held["bytes"] for held in parallel.held) < num_bytes(model)
            batcher: Batcher[Sample, Output] = Batcher(max_batch_size=4)
            for _ in range(parallel.num_in_flight):
                batcher.add_runner(parallel.run, replace=parallel.runner)

            async def ask() -> None:
                answers = await asyncio.gather(*(batcher.submit(sample) for sample in samples))
                np.testing.assert_allclose(
                    np.stack([answer["outputs"] for answer in answers]), whole, rtol=1e-5, atol=1e-6
                )

            await ask()
            wrong = await parallel.run([samples[0], {"inputs": np.full(16, 999)}])
            assert not isinstance(wrong[0], Exception)
            assert isinstance(wrong[1], ModelError)
            under_way = asyncio.create_task(ask())
            os.kill(parallel.pids[1], signal.SIGKILL)
            await under_way
            await ask()
            await batcher.close()
        finally:
            await parallel.close()

    asyncio.run(main())
