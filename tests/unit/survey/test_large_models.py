"""The survey's systems for models too large for one machine: GPT-3, and serving in partitions."""

from __future__ import annotations

import itertools
import json
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from orchestray.platform.comm.collective import Collective
from orchestray.platform.errors import ConfigError
from orchestray.serving.models.quantize import num_bytes
from orchestray.serving.sharded.forward_worker import ForwardWorker
from orchestray.serving.sharded.memory_plan import LayerSizes, fewest_stages
from orchestray.serving.sharded.partition import ServedNetwork
from orchestray.trainers.parallel.pipeline.balance import balanced
from orchestray.trainers.saved.run import load_run
from orchestray.trainers.survey.networks.gpt3 import Gpt3
from support.served import written_run
from support.threads import run_replicas

GB = 10**9


@pytest.fixture(scope="module")
def gpt3() -> LayerSizes:
    return LayerSizes.of(Gpt3(), lambda: torch.zeros(1))


@pytest.mark.parametrize(
    ("dtype", "limit_bytes", "num_stages"),
    # A block is 1.81e9 parameters, 3.62 GB in float16: 22 fit into 80 GB, with the embedding 21; 96 in five stages.
    [
        (torch.float16, 80 * GB, 5),
        (torch.float32, 80 * GB, 9),
        (torch.float16, 16 * GB, 24),
        (torch.float32, 1000 * GB, 1),
    ],
)
def test_gpt3_of_175_billion_parameters_is_cut_into_the_fewest_stages_that_fit(
    gpt3: LayerSizes, dtype: torch.dtype, limit_bytes: int, num_stages: int
) -> None:
    plan = gpt3.plan(limit_bytes, dtype=dtype)
    assert 174.5e9 < gpt3.num_parameters < 176.5e9
    assert sum(plan.stage_bytes) == gpt3.num_parameters * dtype.itemsize
    assert plan.num_stages == num_stages
    assert max(plan.stage_bytes) <= limit_bytes
    sizes = [float(count * dtype.itemsize) for count in gpt3.num_values]
    assert [place for bound in plan.bounds for place in range(*bound)] == [*range(len(sizes))]
    assert [*plan.stage_bytes] == [sum(sizes[start:stop]) for start, stop in plan.bounds]
    with pytest.raises(ConfigError):
        balanced(sizes, num_stages - 1 or 200, sizes, limit_bytes, forbidden=gpt3.forbidden_cuts)


def test_a_layer_of_gpt3_that_fits_nowhere_is_told_with_what_to_do(gpt3: LayerSizes) -> None:
    with pytest.raises(ConfigError, match=r"takes 7.25 GB, and a process has 4 GB.*tensor: at least 2"):
        gpt3.plan(4 * GB)


def test_a_pipeline_of_two_processes_was_measured_to_answer_more_than_one_process_and_each_holds_about_half() -> None:
    """Read what the benchmark `pipeline_serving` last measured: requests a second of clients that ask at once."""
    root = Path(__file__).parents[3]
    measured = json.loads((root / "benchmarks" / "results" / "pipeline_serving.json").read_text(encoding="utf-8"))
    per_s = {each["name"]: each["values"] for each in measured["measurements"]}
    two, one = per_s["pipeline of 2"], per_s["one process"]
    assert len(two) == len(one) >= 3
    assert min(two) > 1.3 * max(one)
    assert np.median(np.divide(two, one)) > 1.6
    (held,) = (line for line in measured["notes"] if line.startswith("The stages hold"))
    first, last, whole = (float(number) for number in re.findall(r"[\d.]+(?= (?:and|MB))", held))
    assert first + last == pytest.approx(whole, abs=0.2)
    assert max(first, last) < 0.6 * whole


def test_the_fewest_stages_are_those_of_the_best_of_all_cuts() -> None:
    rng = random.Random(0)
    for _ in range(200):
        costs = [float(rng.randrange(1, 10)) for _ in range(rng.randrange(1, 8))]
        limit = rng.randrange(int(max(costs)), 25)
        found = fewest_stages(costs, limit)
        assert _fits(costs, limit, found)
        assert found == 1 or not _fits(costs, limit, found - 1)


def _fits(costs: list[float], limit: float, num_stages: int) -> bool:
    for cuts in itertools.combinations(range(1, len(costs)), num_stages - 1):
        bounds = [0, *cuts, len(costs)]
        if all(sum(costs[start:stop]) <= limit for start, stop in itertools.pairwise(bounds)):
            return True
    return False


def test_partitioned_serving_in_two_stages_is_the_whole_model_and_no_process_holds_it(tmp_path: Path) -> None:
    task = {"type": "python_source", "context": 16, "width": 32, "depth": 4, "heads": 4}
    run = written_run(tmp_path, task=task)
    model, network = load_run(run).load_model(), ServedNetwork(pipeline=2, microbatches=3)
    inputs = np.random.default_rng(0).integers(0, 256, (7, 16))

    def work(world: Collective) -> tuple[Any, int]:
        worker = ForwardWorker(run / "model", network)
        held = worker.connect(world)["bytes"]
        answer = worker.run(7, {"inputs": inputs} if world.rank == 0 else None)
        world.barrier()
        worker.close()
        return answer, held

    (nothing, first_bytes), (answer, last_bytes) = run_replicas(2, work)
    assert nothing is None
    with torch.no_grad():
        np.testing.assert_allclose(answer["outputs"], model(torch.from_numpy(inputs)).numpy(), rtol=1e-5, atol=1e-6)
    assert first_bytes + last_bytes == num_bytes(model)
    assert max(first_bytes, last_bytes) < 0.7 * num_bytes(model)
