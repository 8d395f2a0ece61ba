"""A model divided over real processes: it answers as the whole one, and goes on when a process is killed."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from orchestray.platform.config.serving.load import load_serve_config
from orchestray.platform.run.load import load_run
from orchestray.serving.batching import Batcher
from orchestray.serving.deployments.live import LiveEndpoint
from orchestray.serving.generation.model_parallel import ModelParallel
from orchestray.serving.generation.partition import ServedNetwork, held_bytes
from orchestray.serving.models.errors import ModelError
from orchestray.serving.models.signature import Output, Sample
from support.served import written_run

if TYPE_CHECKING:
    from orchestray.platform.cluster.cluster import Cluster

TASK = {"type": "python_source", "context": 16, "width": 32, "depth": 4, "heads": 4}


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
            assert max(held["bytes"] for held in parallel.held) < held_bytes([model])
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
        config = {"name": "x", "models": [{"name": "m", "run": str(run)}], "compute": {"network": {"pipeline": 2}}}
        live = LiveEndpoint(load_serve_config(config))
        await live.start()
        try:
            answer = await live.registry["m"].predict(samples[0])
            np.testing.assert_allclose(answer["outputs"], whole[0], rtol=1e-5, atol=1e-6)
        finally:
            await live.close()

    asyncio.run(main())
