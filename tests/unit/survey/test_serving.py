"""The survey's systems of serving: replicas, pools that follow the load or do not, containers, cold starts."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import numpy as np
import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from lab.batching_simulation import Service, Trace, simulate, steps
from lab.price import Price, cost_usd
from lab.rehearsal import Rehearsal, rehearse
from orchestray.loadtest.arrivals import poisson
from orchestray.platform.errors import ConfigError
from orchestray.serving.application.endpoint import DRAIN_S, LiveEndpoint
from orchestray.serving.batching import Batcher, Greedy
from orchestray.serving.config.load import load_serve_config
from orchestray.serving.lifecycle.manifest import manifest, manifest_yaml
from orchestray.serving.models.load import load_served_model
from orchestray.serving.replicas.batch_thread import BatchThread
from orchestray.serving.replicas.scaling import ScalingGoal
from orchestray.serving.routing.endpoint import ModelVersion
from support.served import served_linear, written_run

KUBERNETES = "1.31"
ROOT = Path(__file__).parents[3]
RAY_SERVICE = ROOT / "tests" / "support" / "ray_service_schema.json"
SERVICE = Service(0.20, 0.005)
GOAL = ScalingGoal(least=1, most=4, target_latency_s=0.8)
QUIET_PER_S, BUSY_PER_S, EACH_S = 5.0, 180.0, 30.0


WAKING_S = 0.1
WAKING = f"""
import time
import torch
from torch import nn

class Waking:
    def build_model(self):
        time.sleep({WAKING_S})  # it takes that long to load
        return nn.Linear(4, 3)
    def example_inputs(self): return torch.ones(4)
    def dataset(self, split): raise AssertionError("an endpoint asks for no data")
    def to_batch(self, columns): raise AssertionError("an endpoint asks for no data")
    def loss(self, outputs, batch): raise AssertionError("an endpoint asks for no loss")
    def metrics(self, outputs, batch): raise AssertionError("an endpoint asks for no metrics")
"""
"""A task whose model takes a known time to load."""


def day() -> Iterator[float]:
    """Return a recorded trace: quiet, busy, quiet."""
    return steps([QUIET_PER_S, BUSY_PER_S, QUIET_PER_S], EACH_S, random.Random(3))


@pytest.fixture(scope="module")
def pools() -> dict[str, Rehearsal]:
    seconds = 3 * EACH_S
    return {
        "autoscaled": rehearse(day(), seconds, SERVICE, goal=GOAL, num_replicas=1),
        "large": rehearse(day(), seconds, SERVICE, num_replicas=4),
        "small": rehearse(day(), seconds, SERVICE, num_replicas=1),
    }


async def answers_of(num_replicas: int, samples: Sequence[Any]) -> tuple[list[list[float]], list[tuple[int, int]]]:
    """Return the answers to each of several clients, in the order of its requests, and where each sample went.

    Replicas behind one queue answer. The places are pairs of a replica and a sample, in the order in which samples left
    the queue.
    """
    batcher: Batcher[Any, Any] = Batcher(policy=Greedy(), max_batch_size=3)
    threads = [BatchThread(served_linear()) for _ in range(num_replicas)]
    numbers = {id(sample): number for number, sample in enumerate(samples)}
    left: list[tuple[int, int]] = []

    async def run(replica: int, batch: Sequence[Any]) -> Any:
        left.extend((replica, numbers[id(sample)]) for sample in batch)
        return await threads[replica].run(batch)

    for replica in range(num_replicas):
        batcher.add_runner(partial(run, replica))

    async def end() -> None:
        for thread in threads:
            thread.close()

    version = ModelVersion(served_linear().signature, batcher, end)

    async def client(number: int) -> list[float]:
        asked = [asyncio.ensure_future(version.predict(sample)) for sample in samples[number::4]]
        return [float(np.float64(answer["outputs"]).sum()) for answer in await asyncio.gather(*asked)]

    answers = await asyncio.gather(*(client(number) for number in range(4)))
    await batcher.close()
    await version.close()
    return answers, left


def test_requests_are_independent_one_replica_and_several_give_each_client_the_same_answers_in_its_order() -> None:
    model = served_linear()
    rng = np.random.default_rng(0)
    samples = [model.signature.parse(rng.normal(size=4).astype(np.float32)) for _ in range(40)]
    alone = [float(np.float64(answer["outputs"]).sum()) for answer in model.run(samples) if isinstance(answer, dict)]
    for num_replicas in (1, 3):
        answers, left = asyncio.run(answers_of(num_replicas, samples))
        assert {replica for replica, _ in left} == set(range(num_replicas))
        for number in range(4):
            np.testing.assert_allclose(answers[number], alone[number::4], atol=1e-5)
            of_client = [sample for _, sample in left if sample % 4 == number]
            assert of_client == sorted(of_client), "a later request was begun before an earlier one"


def test_two_replicas_share_one_queue_evenly_and_have_twice_the_capacity() -> None:
    rate_per_s = 0.95 * 32 / SERVICE.seconds(32)

    def trace(num_replicas: int, factor: float) -> Trace:
        arrivals = poisson(factor * rate_per_s, random.Random(5))
        return simulate(Greedy(), SERVICE, lambda run: run.open_loop(arrivals, 40.0), num_runners=num_replicas)

    one, two, overloaded = trace(1, 1.0), trace(2, 2.0), trace(1, 2.0)
    assert two.mean_s <= one.mean_s
    assert two.num_offered == pytest.approx(2 * one.num_offered, rel=0.05)
    assert overloaded.mean_s > 10 * two.mean_s
    first, second = two.runner_items
    assert first == pytest.approx(second, rel=0.02)


def test_two_processes_were_measured_to_answer_more_of_a_model_that_holds_the_interpreter_s_lock() -> None:
    """Read what the benchmark `serve_past_the_lock` last measured of endpoints on two cores, beside one replica."""
    measured = json.loads((ROOT / "benchmarks" / "results" / "serve_past_the_lock.json").read_text(encoding="utf-8"))
    assert measured["machine"]["cores"] == 2
    assert measured["settings"]["loops"] >= 100_000  # turns of a loop in Python for each request
    per_s = {each["name"]: each["values"] for each in measured["measurements"]}
    one, two = (per_s[f"replicas: {count}: answered"] for count in (1, 2))
    assert len(one) == len(two) >= 1
    assert min(two) > 1.5 * max(one)
    (ratio,) = (each["median"] for each in measured["ratios"] if each["name"] == "answered by 2 replicas / by 1")
    assert ratio == pytest.approx(np.median(np.divide(two, one)), rel=0.01)


def test_autoscaling_follows_the_load_up_and_down_and_costs_less_than_a_pool_for_the_peak(
    pools: dict[str, Rehearsal],
) -> None:
    autoscaled, large = pools["autoscaled"], pools["large"]
    assert autoscaled.most(0, EACH_S) == 1
    assert autoscaled.most(EACH_S, 2 * EACH_S) >= 3
    assert autoscaled.counts[-1][1] <= 2
    assert autoscaled.replica_s < 0.75 * large.replica_s
    settled = autoscaled.trace.between(EACH_S + 12, 2 * EACH_S)
    assert sum(settled) / len(settled) <= GOAL.target_latency_s


def test_a_fixed_pool_is_idle_or_overloaded_on_the_same_trace(pools: dict[str, Rehearsal]) -> None:
    autoscaled, large, small = pools["autoscaled"], pools["large"], pools["small"]
    assert large.replica_s == pytest.approx(4 * 3 * EACH_S, rel=0.01)
    assert large.replica_s > 1.3 * autoscaled.replica_s  # it is paid while it is idle
    assert large.trace.quantile_s(0.95) <= autoscaled.trace.quantile_s(0.95)
    assert small.replica_s < autoscaled.replica_s
    assert small.trace.quantile_s(0.95) > 3 * autoscaled.trace.quantile_s(0.95)
    for pool in pools.values():
        assert len(pool.trace.latencies_s) == pool.trace.num_offered  # nobody is forgotten


def test_rented_replicas_cost_their_hours_at_the_stated_price_each_billed_from_its_start_to_its_end(
    pools: dict[str, Rehearsal],
) -> None:
    assert cost_usd([3600.0, 1800.0], Price(usd_per_replica_h=0.10)) == pytest.approx(0.15)
    per_second = Price(usd_per_replica_h=3.6, increment_s=1.0, minimum_s=60.0)  # 0.001 USD a second
    assert cost_usd([10.0, 70.5, 300.0], per_second) == pytest.approx(0.060 + 0.071 + 0.300)
    assert cost_usd([], per_second) == 0
    for pool in pools.values():
        assert sum(pool.lifetimes_s) == pytest.approx(pool.replica_s, rel=1e-9)
        exact_usd = pool.replica_s / 3600 * 0.10
        assert cost_usd(pool.lifetimes_s, Price(0.10, increment_s=1e-3)) == pytest.approx(exact_usd, rel=1e-4)
    usd = {name: cost_usd(pool.lifetimes_s, Price(0.10)) for name, pool in pools.items()}
    assert usd["large"] == pytest.approx(4 * 3 * EACH_S / 3600 * 0.10, rel=0.01)
    assert usd["small"] < usd["autoscaled"] < 0.75 * usd["large"]


def test_billed_by_the_started_hour_replicas_that_come_and_go_save_nothing(pools: dict[str, Rehearsal]) -> None:
    autoscaled, large = pools["autoscaled"], pools["large"]
    hourly = Price(0.10, increment_s=3600.0)
    assert len(large.lifetimes_s) == 4
    assert cost_usd(large.lifetimes_s, hourly) == pytest.approx(0.40)
    assert cost_usd(autoscaled.lifetimes_s, hourly) == pytest.approx(0.10 * len(autoscaled.lifetimes_s))
    assert cost_usd(autoscaled.lifetimes_s, hourly) >= cost_usd(large.lifetimes_s, hourly)


@pytest.mark.parametrize(
    "wrong",
    [
        {"usd_per_replica_h": -0.1},
        {"usd_per_replica_h": 1, "increment_s": 0},
        {"usd_per_replica_h": 1, "minimum_s": -1},
    ],
)
def test_a_price_that_is_none_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"{[*wrong][-1]}: must be"):
        Price(**wrong)


def test_nothing_is_paid_while_nobody_asks_and_the_first_request_waits_for_one_cold_start() -> None:
    goal = ScalingGoal(least=0, most=2, target_latency_s=0.8, idle_before_zero_s=5.0)
    gaps_s = [1.0, 60.0, 60.0]
    scaled = rehearse(iter(gaps_s), 150.0, SERVICE, goal=goal, num_replicas=1, start_s=3.0)
    first, *cold = scaled.trace.latencies_s
    assert first == pytest.approx(SERVICE.seconds(1))
    assert len(cold) == 2
    for latency_s in cold:
        assert 3.0 <= latency_s <= 3.0 + 0.25 + SERVICE.seconds(1) + 0.01
    assert scaled.replica_s < 40.0  # of 150


def test_the_cold_start_of_the_smallest_replica_is_measured_and_its_first_answer_is_right(tmp_path: Path) -> None:
    (tmp_path / "waking.py").write_text(WAKING, encoding="utf-8")
    run = written_run(tmp_path, "small", task={"type": f"{tmp_path / 'waking.py'}:Waking"})

    async def scenario() -> None:
        began_s = time.perf_counter()
        live = LiveEndpoint(load_serve_config(run))
        await live.start()
        version = live.registry.default.main
        sample = version.signature.parse(version.signature.example)
        answer = await version.predict(sample)
        cold_s = time.perf_counter() - began_s
        assert version.start_s is not None
        assert WAKING_S <= version.start_s <= cold_s
        assert version.batcher.stats.start_s == pytest.approx(version.start_s)
        (wanted,) = load_served_model(run).run([sample])
        assert isinstance(wanted, dict)
        np.testing.assert_allclose(answer["outputs"], wanted["outputs"], atol=1e-6)
        live.prepare_to_end()
        await live.close()

    asyncio.run(scenario())


def test_the_manifest_for_kubernetes_has_the_shape_of_its_schemas_and_asks_for_what_the_config_says(
    tmp_path: Path,
) -> None:
    run = written_run(tmp_path, "digits")
    fixed = load_serve_config(run, ["replicas=3", "resources.cpus_per_worker=2", "resources.gpus_per_worker=0.5"])
    scaled = load_serve_config(run, ["replicas={min: 0, max: 5, target_latency_ms: 50}"])
    schema = json.loads(RAY_SERVICE.read_text(encoding="utf-8"))
    for config in (fixed, scaled):
        settings, service = yaml.safe_load_all(manifest_yaml(config, image="registry/image:1"))
        kubernetes_validate.validate(settings, KUBERNETES, strict=True)
        jsonschema.validate(service, schema)
        cluster = service["spec"]["rayClusterConfig"]
        head, (workers,) = cluster["headGroupSpec"], cluster["workerGroupSpecs"]
        for group in (head, workers):
            pod = {"apiVersion": "v1", "kind": "Pod", **group["template"]}
            kubernetes_validate.validate(pod, KUBERNETES, strict=True)
            (container,) = pod["spec"]["containers"]
            assert container["image"] == "registry/image:1"
            assert pod["spec"]["terminationGracePeriodSeconds"] > DRAIN_S + 10
        inside = load_serve_config(yaml.safe_load(settings["data"]["serve.yaml"]), look_at_files=False)
        assert (inside.models[0].run, inside.replicas) == ("/runs/digits", config.replicas)
        served = ServeDeploySchema.model_validate(yaml.safe_load(service["spec"]["serveConfigV2"]))
        (application,) = served.applications
        assert application.args == {"config": "/etc/orchestray/serve.yaml"}
        if config is fixed:
            assert [workers[key] for key in ("minReplicas", "replicas", "maxReplicas")] == [3, 3, 3]
            assert container["resources"]["limits"] == {"cpu": "2", "nvidia.com/gpu": "1"}
            assert "enableInTreeAutoscaling" not in cluster
        else:
            assert [workers[key] for key in ("minReplicas", "replicas", "maxReplicas")] == [0, 1, 5]
            assert cluster["enableInTreeAutoscaling"] is True
    broken = manifest(fixed)[1]
    broken["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]["replicas"] = "three"
    with pytest.raises(jsonschema.ValidationError, match="'three' is not of type 'integer'"):
        jsonschema.validate(broken, schema)


@pytest.mark.parametrize(
    ("changes", "pods", "cpus"),
    [
        # Of two versions each: replicas of their own, or all in the ingress of one pod.
        (["replicas=3"], (6, 6), 2),
        (["replicas={min: 0, max: 5}"], (0, 10), 2),
        (["replicas=1"], (1, 1), 4),
        # A stage is a pod, and so is the ingress that has no replicas beside it.
        (["replicas=3", "compute.network={pipeline: 2, tensor: 3}"], (12, 12), 6),
        (["replicas=1", "compute.network={pipeline: 2}"], (5, 5), 4),
    ],
)
def test_a_manifest_has_pods_for_the_replicas_and_the_stages_of_every_version(
    changes: list[str], pods: tuple[int, int], cpus: int, tmp_path: Path
) -> None:
    run = str(written_run(tmp_path, "digits"))
    models = [{"name": "digits", "run": run}, {"name": "digits", "run": run, "version": 2, "shadow": True}]
    config = load_serve_config(
        {"name": "e", "models": models}, [*changes, "resources.cpus_per_worker=2"], look_at_files=False
    )
    (workers,) = manifest(config)[1]["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    assert (workers["minReplicas"], workers["maxReplicas"]) == pods
    (container,) = workers["template"]["spec"]["containers"]
    assert container["resources"]["requests"]["cpu"] == str(cpus)
    assert workers["rayStartParams"]["num-cpus"] == str(cpus)  # what Ray may put there


def test_a_manifest_has_one_more_pod_where_text_is_generated_on_a_gpu_beside_replicas(tmp_path: Path) -> None:
    task = {"type": "python_source", "context": 32, "width": 16, "depth": 1, "heads": 2}
    run = written_run(tmp_path, "text", task=task)
    for gpus, pods in ((0, 3), (1, 4)):
        config = load_serve_config(run, ["replicas=3", f"resources.gpus_per_worker={gpus}"])
        (workers,) = manifest(config)[1]["spec"]["rayClusterConfig"]["workerGroupSpecs"]
        assert (workers["minReplicas"], workers["maxReplicas"]) == (pods, pods)


def test_a_manifest_of_pods_that_could_not_start_or_would_serve_another_run_is_refused_with_every_reason(
    tmp_path: Path,
) -> None:
    runs = [str(written_run(tmp_path / place, "digits")) for place in ("here", "there")]
    models = [{"name": "a", "run": runs[0]}, {"name": "a", "run": runs[0], "version": 2}, {"name": "b", "run": runs[1]}]
    tls = {"certificate": "cert.pem", "key": "key.pem"}
    config = {"name": "e", "models": models, "http": {"tls": tls}, "auth": {"tokens_file": "tokens"}}
    with pytest.raises(ConfigError) as refused:
        manifest_yaml(load_serve_config(config, look_at_files=False))
    keys = [problem.partition(":")[0] for problem in refused.value.problems]
    assert keys == ["http.tls.certificate", "http.tls.key", "auth.tokens_file", "models.2.run"]
    best = [{"name": "a", "run": f"{tmp_path}/rates/best"}, {"name": "b", "run": f"{tmp_path}/best"}]
    assert manifest(load_serve_config({"name": "e", "models": best}, look_at_files=False))
