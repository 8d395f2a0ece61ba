"""Plans are ranked by time, corrected by the record, bounded by memory; none is chosen that loses to one process."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestray.platform.comm.allreduce.costs import AlphaBeta
from orchestray.platform.errors import ConfigError
from orchestray.trainers.config.load import load_train_config
from orchestray.trainers.config.schema import TrainConfig
from orchestray.trainers.machine.gemm import GemmTable
from orchestray.trainers.machine.profile import Compute, Contention, Links, MachineProfile
from orchestray.trainers.machine.transfers import KINDS, CollectiveTimes, Curve
from orchestray.trainers.planning.advised import sizes_of
from orchestray.trainers.planning.cluster import Cluster
from orchestray.trainers.planning.correction import HOGWILD
from orchestray.trainers.planning.found import (
    CountedRun,
    CountedStep,
    CountedWorker,
    DryRun,
    DryStep,
    LayerProfile,
    NotedCall,
    ServedRun,
)
from orchestray.trainers.planning.measuring import Measurements, Wanted
from orchestray.trainers.planning.planner import Planner, why
from orchestray.trainers.planning.predict import Predictor, traits_of
from orchestray.trainers.planning.record import Entry, Record

ROOT = Path(__file__).parents[4]
MB = 10**6
DIGITS = 1437
PROCESS_BYTES = 50 * MB
CONFIG = load_train_config(
    {
        "task": {"type": "digits"},
        "train": {"batch_size": 64, "steps": 100, "optimizer": {"type": "sgd", "lr": 0.1}},
    }
)


def machine(**changes: Any) -> MachineProfile:
    curve = Curve((1, 10**9), (1e-4, 1.0))
    table = GemmTable((8, 64), (1e-6,) * 8)
    link = AlphaBeta(1e-3, 1e-8)
    made = MachineProfile(
        name="here",
        processor="p",
        cores=2,
        memory_bytes=1000 * MB,
        versions={"torch": "1"},
        compute={1: Compute({"float32": table}, 1e10, 1e-6), 2: Compute({"float32": table}, 1e10, 1e-6)},
        collectives=CollectiveTimes({kind: {2: curve} for kind in KINDS}),
        contention=Contention({1: 1.0, 2: 1.0}, {1: 1.0, 2: 1.0}),
        overlap=0.0,
        channels={"tcp": curve, "shared_memory": curve},
        disk_bytes_per_s=1e8,
        links=Links(link, link),
        process_bytes=PROCESS_BYTES,
    )
    return replace(made, **changes)


class Known(Measurements):
    """Measurements of a model whose forward and backward pass takes `sample_s` a sample and thread.

    A model that is too small for several threads takes as long with them as with one.
    """

    def __init__(
        self, sample_s: float = 1e-3, exchanged: int = MB, resident: int = 100 * MB, *, is_small: bool = False
    ) -> None:
        super().__init__(None, {}, 2)
        self._sample_s, self._exchanged, self._grown = sample_s, exchanged, resident - PROCESS_BYTES
        self._is_small = is_small

    def dry_runs(self, wanted: Wanted) -> list[DryRun]:
        layout = wanted.settings.layout
        samples = wanted.settings.batch_size / layout.size
        compute_s = samples * self._sample_s / (1 if self._is_small else wanted.num_threads)
        call = NotedCall("all_reduce", "world", layout.size, self._exchanged, compute_s, compute_s)
        calls = (call,) if layout.size > 1 else ()
        step = DryStep(compute_s, compute_s, 0.0, 0.0, calls)
        kept = MB * wanted.settings.batch_size // 64 // (1 if wanted.settings.recompute == "none" else 2)
        return [DryRun(1, None, step, MB, MB, MB, kept, self._grown, DIGITS, (compute_s,))]

    def served(self, wanted: Wanted) -> ServedRun:
        compute_s = wanted.settings.batch_size / wanted.settings.layout.data * self._sample_s / wanted.num_threads
        return ServedRun(compute_s, 0.002, 0.001, compute_s + 0.001, 0.001, 1000.0, self._grown, 0)

    def counted(self, wanted: Wanted) -> CountedRun:
        layout = wanted.settings.layout
        sent = {"data": float(2 * (layout.data - 1) * self._exchanged // layout.data)}
        calls = (("all_reduce", layout.data, self._exchanged),) if layout.data > 1 else ()
        step = CountedStep(1, sent, 0, calls)
        return CountedRun(1, layout.data, (CountedWorker(MB, MB, 2 * MB, (step,)),) * layout.pipeline)

    def profiles(self, wanted: Wanted) -> list[LayerProfile]:
        micro_batch = wanted.settings.batch_size // wanted.settings.accumulate
        each_s = micro_batch * self._sample_s / 16
        layers = tuple("abcdefgh")
        return [
            LayerProfile(
                layers,
                (each_s,) * 8,
                (each_s,) * 8,
                (MB,) * 8,
                (MB,) * 8,
                (0,) * 8,
                0,
                (1,) * 8,
                (),
                micro_batch,
                (1,) * 8,
            )
        ]


def planner(measurements: Measurements, record: Record | None = None, **changes: Any) -> Planner:
    return Planner(Cluster(machine(**changes)), measurements, record or Record())


def test_plans_are_ranked_by_the_time_of_a_sample_and_found_by_name_or_place() -> None:
    plans = planner(Known()).plans(CONFIG, 2)
    times = [plan.step_s / plan.samples for plan in plans.plans]
    assert times == sorted(times)
    assert plans.find("1") is plans.plans[0]
    assert plans.find("one process").num_workers == 1
    with pytest.raises(ConfigError, match="no plan 'two process'"):
        plans.find("two process")


def test_doing_nothing_is_chosen_where_an_exchange_costs_more_than_it_gains() -> None:
    assert planner(Known(exchanged=100 * MB)).plans(CONFIG, 2).best.name == "one process"  # type: ignore[union-attr]


def test_of_plans_that_were_tried_the_one_with_the_fastest_steps_is_chosen_and_no_other() -> None:
    plans = planner(Known(exchanged=100 * MB)).plans(CONFIG, 2)
    exact = [plan for plan in plans.plans if plan.keeps_result]
    assert plans.best is exact[0]
    assert exact[0].num_workers == 1
    several = [plan for plan in exact if plan.num_workers > 1][:2]

    def best(tried_s: list[float]) -> str:
        times_s = dict(zip([exact[0].name, *(plan.name for plan in several)], tried_s, strict=True))
        tried = [replace(plan, tried_s=times_s.get(plan.name)) for plan in plans.plans]
        chosen = replace(plans, plans=tuple(tried)).best
        assert chosen is not None
        return chosen.name

    assert best([10.0, 9.0, 8.0]) == several[1].name
    assert best([10.0, 9.0, 9.9]) == several[0].name
    assert best([10.0, 9.8, 9.9]) == exact[0].name  # several processes that win less than 3 %
    untried = replace(plans, plans=(exact[0], replace(several[0], tried_s=99.0)))
    assert untried.best is untried.plans[1]


def test_small_data_are_planned_as_they_were_measured_to_be_learned_faster() -> None:
    """Plan the benchmark's training with the times it found: a step of one process, and what two workers add to half
    of it.
    """
    measured = json.loads((ROOT / "benchmarks" / "results" / "small_data.json").read_text(encoding="utf-8"))
    file = str(ROOT / measured["settings"]["config"])
    config, num_samples = load_train_config(file), sizes_of(file).num_samples
    of = {each["name"]: each["median"] for each in measured["measurements"]}
    steps = config.train.epochs * math.ceil(num_samples / config.train.batch_size) - 1
    one_s, two_s = (of[f"{side}: first step to last"] / steps for side in ("one process", "two workers"))
    exchange = Curve((1, 10**9), (two_s - one_s / 2, two_s))
    links = CollectiveTimes({kind: {2: exchange} for kind in KINDS})

    def chosen(times: int) -> str:
        known = Known(times * one_s / config.train.batch_size, exchanged=4 * 5_000, is_small=True)
        best = planner(known, collectives=links).plans(config, 2).best
        assert best is not None
        return best.name

    assert chosen(1) == "one process"
    assert chosen(100) == "2 replicas"  # each sample a hundred times as much work


def test_computing_parts_again_is_never_predicted_to_be_faster_than_keeping_them_whatever_was_measured() -> None:
    class Disturbed(Known):
        def dry_runs(self, wanted: Wanted) -> list[DryRun]:
            runs = super().dry_runs(wanted)
            if wanted.settings.recompute == "none":
                return runs
            faster = replace(runs[0].exchanging, step_s=runs[0].exchanging.step_s / 2, backward_s=0.0)
            return [replace(run, exchanging=faster, activation_bytes=MB // 2) for run in runs]

    plans = planner(Disturbed()).plans(CONFIG, 2)
    for again in ("one process, recompute blocks", "2 replicas, recompute sqrt"):
        plan, kept = plans.find(again), plans.find(again.partition(",")[0])
        assert plan.step_s == kept.step_s
        assert plan.memory.activations < kept.memory.activations


def test_computing_parts_again_that_spares_no_activations_is_no_plan_but_the_one_without_it() -> None:
    class OfOneLayer(Known):
        def dry_runs(self, wanted: Wanted) -> list[DryRun]:
            return [replace(run, activation_bytes=MB) for run in super().dry_runs(wanted)]

    plans = planner(OfOneLayer()).plans(CONFIG, 2)
    whys = {unfit.name: unfit.why for unfit in plans.unfit if "recompute" in unfit.name}
    assert {*whys} >= {"one process, recompute blocks", "one process, recompute sqrt", "2 replicas, recompute sqrt"}
    assert all("spares no activations of this model" in why for why in whys.values())
    assert not [plan.name for plan in plans.plans if "recompute" in plan.name]
    asked_for = load_train_config(CONFIG, ["train.recompute=blocks"])
    assert planner(OfOneLayer()).this(asked_for).memory.activations == MB  # as it stands it runs


def test_a_plan_that_changes_the_result_is_never_the_best() -> None:
    plans = planner(Known()).plans(CONFIG, 2)
    assert any(not plan.keeps_result for plan in plans.plans)
    assert plans.best is not None
    assert plans.best.keeps_result


def test_only_schemes_with_the_result_of_one_process_keep_it() -> None:
    loose = ("qsgd", "float16", "onebit", "powersgd", "topk", "averaged", "DiLoCo", "elastic", "gossiping", "stale",
             "asynchronous", "HOGWILD", "pipedream")  # fmt: skip
    plans = planner(Known()).plans(CONFIG, 4).plans
    assert {word for word in loose if any(word in plan.name for plan in plans)} == {*loose}
    for plan in plans:
        assert plan.keeps_result is not any(word in plan.name for word in loose), plan.name


def test_hogwild_is_a_family_of_its_own() -> None:
    families = {plan.name: plan.traits.family for plan in planner(Known()).plans(CONFIG, 2).plans}
    assert families["2 workers, HOGWILD"] == HOGWILD
    assert families["2 workers, asynchronous server"] == "parameter_server"


def test_the_record_corrects_the_time_and_narrows_the_interval() -> None:
    task = traits_of(CONFIG).task
    entries = [Entry("single", "run", 1.0, 2.0, "", "here", "single none", task)] * 40
    plain, corrected = (planner(Known(), Record(each)).this(CONFIG) for each in ([], entries))
    assert corrected.step_s == pytest.approx(2 * plain.step_s, rel=0.02)
    assert plain.interval_s is not None
    assert corrected.interval_s is not None
    widths = [math.log(each[1] / each[0]) for each in (plain.interval_s, corrected.interval_s)]
    assert widths[1] < widths[0] / 2


def test_a_plan_that_needs_more_than_the_memory_is_not_among_them() -> None:
    plans = planner(Known(resident=600 * MB)).plans(CONFIG, 2)
    assert {plan.num_workers + plan.num_servers for plan in plans.plans} == {1}
    assert any("1.20 GB a machine, which has 0.95 GB" in each.why for each in plans.unfit)


def test_where_nothing_fits_the_error_says_by_how_much_and_what_would_help() -> None:
    with pytest.raises(ConfigError, match=r"needs 2\.00 GB a machine, 1\.05 GB more than there are; what would help"):
        planner(Known(resident=2000 * MB)).plans(CONFIG, 2)


def test_a_reason_that_all_schemes_share_is_said_once() -> None:
    class Failing(Known):
        def dry_runs(self, wanted: Wanted) -> list[DryRun]:
            raise ConfigError("the task has no rows" if wanted.settings.layout.size == 1 or self.is_alike else "other")

        served = profiles = dry_runs  # type: ignore[assignment]
        is_alike = True

    failing = Failing()
    with pytest.raises(ConfigError, match=r"^no scheme fits this config, each for one reason: the task has no rows$"):
        planner(failing).plans(CONFIG, 2)
    failing.is_alike = False
    with pytest.raises(ConfigError, match=r"^no scheme fits this config: one process: .* no rows; .*: other$"):
        planner(failing).plans(CONFIG, 2)


def test_a_price_is_that_of_all_workers_for_the_whole_run() -> None:
    plan = planner(Known(), price_per_worker_hour=36.0).plans(CONFIG, 2).find("2 replicas")
    assert plan.price == pytest.approx(2 * 100 * plan.step_s / 100)


def test_the_cheapest_plan_is_the_least_of_those_that_keep_the_result_and_there_is_none_without_a_price() -> None:
    plans = planner(Known(is_small=True), price_per_worker_hour=36.0).plans(CONFIG, 2)
    prices = {plan.name: plan.price for plan in plans.plans if plan.keeps_result and plan.price is not None}
    assert plans.cheapest is not None
    assert prices[plans.cheapest.name] == min(prices.values())
    # Two workers are faster here, and one process costs less: the time of an exchange is paid twice.
    assert plans.best is not None
    assert (plans.best.num_workers, plans.cheapest.name) == (2, "one process")
    assert planner(Known()).plans(CONFIG, 2).cheapest is None


def test_a_budget_leaves_out_what_costs_more_and_says_by_how_much_where_nothing_is_left() -> None:
    cluster = Cluster(machine(price_per_worker_hour=36.0))
    every = Planner(cluster, Known(), Record()).plans(CONFIG, 2).plans
    budget = every[len(every) // 2].price
    assert budget is not None
    plans = Planner(cluster, Known(), Record(), budget=budget).plans(CONFIG, 2)
    within = [plan.name for plan in every if plan.price is not None and plan.price <= budget]
    assert [plan.name for plan in plans.plans] == within
    assert 0 < len(within) < len(every)
    assert sum("more than the budget" in each.why for each in plans.unfit) == len(every) - len(within)
    with pytest.raises(ConfigError, match=r"budget of 0\.001: the cheapest, .* costs .* more; what would help: fewer"):
        Planner(cluster, Known(), Record(), budget=0.001).plans(CONFIG, 2)
    with pytest.raises(ConfigError, match="give --price-per-hour, or set price_per_worker_hour in the profile"):
        Planner(Cluster(machine()), Known(), Record(), budget=1.0).plans(CONFIG, 2)


@pytest.mark.parametrize("name", ["one process", "2 replicas", "2 workers, asynchronous server"])
def test_an_epoch_takes_its_number_of_steps(name: str) -> None:
    plan = planner(Known()).plans(CONFIG, 2).find(name)
    assert plan.steps_per_epoch == 1437 // 64 + 1
    assert plan.epoch_s == plan.steps_per_epoch * plan.step_s


GROWING = {"type": "steps", "every_epochs": 1, "factor": 2, "max_batch_size": 200}


def growing(schedule: dict[str, Any], **train: Any) -> TrainConfig:
    chosen = {"batch_size": 64, "optimizer": {"type": "sgd", "lr": 0.1}, "batch_schedule": schedule, **train}
    return load_train_config({"task": {"type": "digits"}, "train": chosen})


def test_a_run_whose_batches_grow_is_priced_by_each_of_its_batches() -> None:
    plan = planner(Known(), price_per_worker_hour=36.0).this(growing(GROWING, epochs=4))
    # epochs of batches of 64, 128, 200 and 200, each with all samples once
    assert plan.num_steps == sum(math.ceil(DIGITS / size) for size in (64, 128, 200, 200))
    run_s = 4 * DIGITS * 1e-3
    assert plan.num_steps * plan.parts.compute_s == pytest.approx(run_s)
    assert plan.price == pytest.approx(run_s / 100)
    assert plan.samples_per_s == pytest.approx(1000)
    assert plan.epoch_s == pytest.approx(run_s / 4, rel=0.05)
    assert plan.memory.activations == MB * 200 // 64
    assert plan.notes == ("batches grow from 64 samples to 200 at most",)


def test_a_run_whose_batches_grow_by_measurements_is_planned_with_the_first_and_says_what_the_largest_takes() -> None:
    schedule = {"type": "noise_scale", "max_batch_size": 256}
    plan = planner(Known()).this(growing(schedule, steps=100, accumulate=2))
    assert plan.step_s == pytest.approx(0.064)
    assert plan.memory.activations == MB * 256 // 64
    assert "the largest takes 0.256 s" in plan.notes[1]


def test_machines_that_are_far_apart_exchange_over_the_link_between_them() -> None:
    near = Planner(Cluster(machine()), Known(), Record()).plans(CONFIG, 2).find("2 replicas")
    far = Planner(Cluster(machine(), num_nodes=2), Known(), Record()).plans(CONFIG, 2).find("2 replicas")
    assert far.parts.exchange_s == pytest.approx(2 * (1e-3 + MB / 2 * 1e-8))
    assert near.parts.exchange_s != far.parts.exchange_s


def test_schedules_of_a_pipeline_share_all_measurements() -> None:
    pipelines = [
        load_train_config({**CONFIG.model_dump(), "strategy": {"network": {"pipeline": 2, "schedule": each}}})
        for each in ("gpipe", "1f1b", "zbv", "pipedream")
    ]
    predictor = Predictor(Cluster(machine()), Known())
    assert len({each.key({}) for config in pipelines for each in predictor.wanted(config)}) == 3


def machine_of(cores: int, product_s: float = 1e-6) -> MachineProfile:
    speed = Compute({"float32": GemmTable((8, 64), (product_s,) * 8)}, 1e10, 1e-6)
    return machine(cores=cores, compute={1: speed, cores: speed}, memory_bytes=10**12)


def test_a_machine_that_computes_at_half_the_speed_takes_twice_the_time_and_the_same_exchange() -> None:
    clusters = Cluster(machine()), Cluster(machine_of(2, product_s=2e-6), here=machine())
    here, there = (Planner(each, Known(), Record()).plans(CONFIG, 2).find("2 replicas") for each in clusters)
    assert there.parts.compute_s == pytest.approx(2 * here.parts.compute_s)
    assert there.parts.exchange_s == here.parts.exchange_s


@pytest.mark.parametrize("workers", [1, 2, 32, 64])
def test_a_machine_of_more_cores_is_measured_by_as_many_threads_as_this_one_carries(workers: int) -> None:
    network, resources = {"data": workers}, {"cpus_per_worker": 64 // workers}
    config = load_train_config({**CONFIG.model_dump(), "strategy": {"network": network}, "resources": resources})
    cluster = Cluster(machine_of(64), here=machine_of(2))
    (wanted,) = Predictor(cluster, Known()).wanted(config)
    assert wanted.num_threads * wanted.at_once == 2
    plan = Planner(cluster, Known(), Record()).this(config)
    assert plan.parts.compute_s == pytest.approx(64 / workers * 1e-3 / wanted.num_threads)


def test_workers_that_share_cores_there_take_longer_than_what_was_measured_here() -> None:
    cluster = Cluster(machine_of(4), here=machine_of(2))
    assert [cluster.crowd(workers, 1) for workers in (1, 4, 8, 16)] == [1.0, 1.0, 1.0, 2.0]
    alone = Cluster(machine_of(4))
    assert [alone.crowd(workers, 1) for workers in (1, 4, 8, 16)] == [1.0, 1.0, 1.0, 2.0]
    assert [alone.at_once(workers, 1) for workers in (1, 4, 8, 16)] == [1, 4, 8, 8]


def test_a_worker_of_more_threads_than_a_machine_has_cores_has_no_plan() -> None:
    config = load_train_config({**CONFIG.model_dump(), "resources": {"cpus_per_worker": 3}})
    with pytest.raises(ConfigError, match=r"resources\.cpus_per_worker: a machine has 2 cores, got 3"):
        planner(Known()).this(config)


def test_the_difference_of_two_plans_names_the_part_that_decides_first() -> None:
    plans = planner(Known(exchanged=100 * MB)).plans(CONFIG, 2)
    parts = why(plans.find("one process"), plans.find("2 replicas"))
    assert parts[0][0] == "exchange"
    assert sum(b for _, _, b in parts) == pytest.approx(plans.find("2 replicas").step_s / 64)


def test_a_plan_says_all_of_itself_as_json_and_its_config_runs_as_it_is() -> None:
    plan = planner(Known()).plans(CONFIG, 2).find("2 replicas, ZeRO-2")
    data = plan.to_json()
    assert {"step_s", "interval_s", "memory_bytes", "bytes", "staleness", "price", "config"} <= data.keys()
    assert data["memory_bytes"]["resident"] == 100 * MB
    config = load_train_config(data["config"])
    assert (config.strategy.network.data, config.strategy.exchange.shard) == (2, "gradients")  # type: ignore[union-attr]


def test_steps_of_a_solver_are_not_predicted() -> None:
    train = {"batch_size": 1500, "steps": 9, "solver": {"type": "lbfgs"}}
    config = load_train_config({"name": "a", "task": {"type": "digits"}, "train": train})
    for predict in (lambda: planner(Known()).plans(config, 2), lambda: planner(Known()).this(config)):
        with pytest.raises(ConfigError, match=r"train\.solver: lbfgs evaluates a batch as often as"):
            predict()


@pytest.mark.parametrize("axis", ["tensor", "pipeline"])
def test_parameter_servers_of_replicas_that_are_split_are_not_predicted(axis: str) -> None:
    strategy = {"network": {"data": 2, axis: 2}, "exchange": {"type": "parameter_server", "shards": 2}}
    config = load_train_config({**CONFIG.model_dump(), "strategy": strategy})
    with pytest.raises(ConfigError, match=rf"strategy\.network\.{axis}: .* not predicted yet; set it to 1"):
        planner(Known()).this(config)


PIPELINE = "pipeline 2, 1f1b, 4 micro-batches"


def test_the_config_of_a_pipeline_names_the_cut_that_was_predicted() -> None:
    plan = planner(Known()).plans(CONFIG, 2).find(PIPELINE)
    assert plan.changes["strategy.network"]["split"] == ["e"]
    config = load_train_config(plan.config)
    assert config.strategy.network.split == ["e"]
    again = planner(Known()).this(config)
    assert (again.memory, again.num_bytes) == (plan.memory, plan.num_bytes)
    assert planner(Known()).this(pipeline("balanced")).config["strategy"]["network"]["split"] == "balanced"


@pytest.mark.parametrize(("split", "measured"), [(["c"], "balanced"), (["c.inner"], ["c.inner"])])
def test_a_cut_between_layers_that_a_plan_has_measured_is_not_measured_again(split: Any, measured: Any) -> None:
    class Planned(Known):
        def knows(self, wanted: Wanted) -> bool:
            return wanted.settings.pipeline.split == "balanced"

    layers, *_ = Predictor(Cluster(machine()), Planned()).wanted(pipeline(split))
    assert layers.settings.pipeline.split == measured


def pipeline(split: Any, **network: Any) -> TrainConfig:
    data = CONFIG.model_dump(mode="json")
    data["strategy"]["network"] |= {"pipeline": 2, "microbatches": 4, "split": split, **network}
    return load_train_config(data)


def test_a_pipeline_of_split_layers_has_the_memory_and_bytes_that_were_counted_and_says_what_its_time_lacks() -> None:
    plan = planner(Known(exchanged=100)).this(pipeline("balanced", data=2, tensor=2))
    memory = plan.memory
    assert (memory.parameters, memory.gradients, memory.optimizer) == (MB, MB, 2 * MB)
    assert plan.num_bytes["data"] == 2 * 2 * 100
    assert "pipeline" not in plan.num_bytes
    assert plan.notes == ("what a stage's own workers exchange takes time as well, which is not in it",)


def test_a_pipeline_among_replicas_that_diverge_does_not_keep_the_result() -> None:
    data = pipeline("balanced", data=2).model_dump(mode="json")
    data["strategy"]["exchange"] = {"type": "averaging", "every": 4}
    assert planner(Known()).this(pipeline("balanced", data=2)).keeps_result
    assert not planner(Known()).this(load_train_config(data)).keeps_result


def test_the_replicas_of_a_pipeline_exchange_for_as_long_as_what_was_counted_takes() -> None:
    plans = planner(Known(exchanged=4 * MB))
    both, alone = (plans.this(pipeline("balanced", data=data)) for data in (2, 1))
    assert (both.parts.exchange_s, alone.parts.exchange_s) == (
        pytest.approx(machine().seconds("all_reduce", 2, 4 * MB)),
        0,
    )


def test_all_schedules_of_a_pipeline_need_one_dry_run_of_the_whole_model_and_one_count() -> None:
    predictor = Predictor(Cluster(machine()), Known())
    configs = [pipeline("balanced"), pipeline(["c"]), pipeline("balanced", schedule="gpipe")]
    assert len({predictor.wanted(each)[1].key({}) for each in configs}) == 1
    assert len({predictor.wanted(each)[2].key({}) for each in configs}) == 1
