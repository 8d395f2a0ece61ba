"""Gangs on a Ray with GPUs, which exist in its books only: places and backends are real, kernels there are none."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from support.forked import Forked

SCRIPT = """
import json
import ray
from orchestray.platform.actors.gang import Gang
from orchestray.platform.actors.placement import Shape
from orchestray.platform.cluster.cluster import connect, prepare
from orchestray.platform.errors import ClusterError

prepare()
ray.init(num_cpus=4, num_gpus=2, include_dashboard=False, log_to_driver=False)
cluster = connect()

def met(gpus):
    gang = Gang(cluster, Shape("worker", 2, gpus_per_member=gpus))
    try:
        gang.host("support.hosted:Adder", 1.0)
        gang.meet()
        return [gang._backend(), gang.gather(gang.call("total"))]
    except ClusterError as error:
        return [gang._backend(), str(error)]
    finally:
        gang.close()

print("met", json.dumps([met(0.5), met(1.0)]), flush=True)
ray.shutdown()
"""


@pytest.mark.slow
def test_workers_on_one_gpu_meet_over_host_memory_and_a_gpu_that_torch_lacks_is_refused_by_a_sentence() -> None:
    paths = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    with Forked(SCRIPT, env={"PYTHONPATH": os.pathsep.join(paths)}) as driver:
        assert driver.wait() == 0, driver.printed()
        (said,) = [line for line in driver.printed().splitlines() if line.startswith("met ")]
    halves, wholes = json.loads(said.removeprefix("met "))
    assert halves == ["over_host", [3.0, 3.0]]
    backend, refused = wholes
    assert backend == "nccl"
    assert refused.startswith("resources.gpus_per_worker: this worker was given a GPU, and torch")
    assert refused.endswith("or set resources.gpus_per_worker to 0.")
