"""Each key of a serve config does what it says to the batcher and the model that are made by it."""

from __future__ import annotations

import asyncio
import random
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from orchestray.loadtest.arrivals import bursts
from orchestray.platform.process import torch_threads
from orchestray.serving.application.model_loader import Starters
from orchestray.serving.batching import Batcher, BatchListener, QueueFullError, RunTimeoutError
from orchestray.serving.config.schema import BatchingSection, ModelSection, ServeConfig
from orchestray.serving.models.load import load_served_model
from orchestray.serving.models.served import ServedModel
from orchestray.serving.replicas.batchers import load_arguments, make_batcher
from support.batching import A_S, C_S, Model, in_virtual_time, now_s, outcomes
from support.served import written_run


def batcher_of(runner: Any, **keys: Any) -> Batcher[Any, Any]:
    batcher: Batcher[Any, Any] = make_batcher(BatchingSection(**keys), BatchListener())
    batcher.add_runner(runner)
    return batcher


def config_of(run: Path, **sections: Any) -> tuple[ModelSection, ServeConfig]:
    config = ServeConfig.model_validate({"name": "served", "models": [{"name": "digits", "run": str(run)}]} | sections)
    return config.models[0], config


# -- batching ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "wait_s"),
    [
        ({"policy": "fixed", "timeout_ms": 50}, 0.050),
        ({"policy": "fixed", "timeout_ms": 5}, 0.005),
        ({"policy": "polled", "timeout_ms": 5}, 0.005),
        ({"policy": "greedy"}, 0),
    ],
)
def test_a_lone_request_waits_as_long_as_the_policy_says(keys: dict[str, Any], wait_s: float) -> None:
    @in_virtual_time
    async def ask() -> None:
        batcher = batcher_of(Model(), **keys)
        assert await batcher.submit(4) == 8
        assert now_s() == pytest.approx(wait_s + A_S + C_S)
        await batcher.close()

    ask()


@in_virtual_time
async def test_no_batch_is_larger_than_max_batch_size() -> None:
    model = Model()
    batcher = batcher_of(model, max_batch_size=4)
    await outcomes([batcher.submit(number) for number in range(11)])
    assert max(map(len, model.batches)) == 4
    await batcher.close()


@in_virtual_time
async def test_no_more_requests_wait_than_max_queue() -> None:
    batcher = batcher_of(Model(), max_batch_size=1, max_queue=3)
    first = asyncio.ensure_future(batcher.submit(0))
    await asyncio.sleep(A_S / 2)
    found = await outcomes([batcher.submit(number) for number in range(1, 6)])
    assert [isinstance(one, QueueFullError) for one in found] == [False, False, False, True, True]
    assert await first == 0
    await batcher.close()


@pytest.mark.parametrize("run_timeout_s", [2.0, 30.0])
def test_a_batch_hangs_after_run_timeout_s(run_timeout_s: float) -> None:
    async def hangs(items: Sequence[int]) -> list[int]:
        await asyncio.get_running_loop().create_future()
        return []

    @in_virtual_time
    async def ask() -> None:
        batcher = batcher_of(hangs, run_timeout_s=run_timeout_s)
        with pytest.raises(RunTimeoutError):
            await batcher.submit(1)
        assert now_s() == pytest.approx(run_timeout_s)
        await batcher.close(drain=False)

    ask()


def test_for_the_objective_throughput_batches_are_larger_than_for_the_mean() -> None:
    sizes: dict[str, float] = {}

    async def bursts_for(objective: str) -> None:
        model = Model()
        batcher = batcher_of(model, objective=objective)
        asked = []
        for gap_s in bursts(89.0, 8, 0.002, random.Random(3)):
            await asyncio.sleep(gap_s)
            if now_s() > 12.0:
                break
            asked.append(asyncio.ensure_future(batcher.submit(1)))
        await outcomes(asked)
        await batcher.close()
        sizes[objective] = statistics.fmean(map(len, model.batches))

    for objective in ("mean", "throughput"):
        in_virtual_time(lambda objective=objective: bursts_for(objective))()  # type: ignore[misc]
    assert sizes["throughput"] > 1.1 * sizes["mean"]


# -- the model ---------------------------------------------------------------------------------------------------------


def answer_of(served: ServedModel) -> np.ndarray[Any, Any]:
    (answer,) = served.run(
        [
            served.signature.parse(
                np.linspace(0, 1, 64, dtype=np.float32).reshape(served.signature.inputs[0].shape).tolist()
            )
        ]
    )
    assert isinstance(answer, dict)
    return answer["outputs"]


@pytest.mark.parametrize("compute", [{"precision": "bfloat16"}, {"quantize": "int8"}])
def test_the_model_is_computed_in_fewer_bits_where_the_config_says_so(tmp_path: Path, compute: dict[str, Any]) -> None:
    run = written_run(tmp_path)
    exact = answer_of(load_served_model(**load_arguments(*config_of(run))))
    rough = answer_of(load_served_model(**load_arguments(*config_of(run, compute=compute))))
    assert not np.array_equal(rough, exact)
    np.testing.assert_allclose(rough, exact, atol=0.02)


def test_the_model_of_a_config_is_compiled_where_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    init = ServedModel.__init__

    def noted(self: ServedModel, *arguments: Any, compile: bool = False, **settings: Any) -> None:  # noqa: A002
        asked.append(compile)
        init(self, *arguments, **settings)  # what a compiler takes is for the tests of ServedModel

    monkeypatch.setattr(ServedModel, "__init__", noted)
    run = written_run(tmp_path)
    for compiled in (True, False):
        load_served_model(**load_arguments(*config_of(run, compute={"compile": compiled})))
    assert asked == [True, False]


WATCHED = """
import pyarrow as pa
import torch
from torch import nn

SEEN = []

class Watching(nn.Linear):
    def forward(self, x):
        SEEN.append((len(x), torch.get_num_threads()))
        return super().forward(x)

class Own:
    def build_model(self): return Watching(3, 2)
    def dataset(self, split): return pa.table({"x": [1.0, 2.0]})
    def to_batch(self, columns): return {"inputs": torch.ones(len(columns), 3) * 0.5}
    def loss(self, outputs, batch): return outputs.mean()
    def metrics(self, outputs, batch): return {}
"""


@pytest.mark.parametrize(("cpus", "num_threads"), [(3.0, 3), (0.5, 1)])
def test_a_version_is_warm_for_every_size_of_batch_and_computes_by_its_own_threads(
    tmp_path: Path, cpus: float, num_threads: int
) -> None:
    file = tmp_path / "watched.py"
    file.write_text(WATCHED)
    task = {"type": f"{file}:Own", "arguments": {}, "file": str(file), "source": WATCHED}
    run = written_run(tmp_path, "own", tensors=dict(torch.nn.Linear(3, 2).state_dict()), model_json={"task": task})
    model, config = config_of(run, resources={"cpus_per_worker": cpus}, batching={"max_batch_size": 6})

    async def ask() -> None:
        version = await Starters(lambda *_: BatchListener()).start(model, config)
        seen = _seen()
        assert {size for size, _ in seen} == {1, 2, 6}
        seen.clear()
        torch.set_num_threads(7)  # as another model may have
        await version.batcher.submit(version.signature.parse([0.0, 0.0, 0.0]))
        await version.close(drain=True)
        assert seen == [(1, num_threads)]

    with torch_threads.using(7):  # and afterwards as it was
        asyncio.run(ask())


def _seen() -> list[tuple[int, int]]:
    """Return sizes of batches and numbers of threads, of the task that was loaded last."""
    found: list[tuple[int, int]] = next(
        module.SEEN for module in reversed(list(sys.modules.values())) if hasattr(module, "SEEN")
    )
    return found
