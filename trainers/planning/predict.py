"""The prediction of a step of a config: which measurements it takes, and how they are put together for each scheme."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from orchestray.platform.errors import ConfigError
from orchestray.trainers.config.settings import PipelineSettings, ReplicaSettings
from orchestray.trainers.layout.degrees import Layout
from orchestray.trainers.optim.batch_params import Measured
from orchestray.trainers.planning.agreements import agreed_bytes
from orchestray.trainers.planning.correction import HOGWILD, SINGLE, Traits
from orchestray.trainers.planning.counting import countable
from orchestray.trainers.planning.measuring import Wanted
from orchestray.trainers.planning.pipelines import PipelineStep, pipeline_step
from orchestray.trainers.planning.plans import Memory, Parts, Plan
from orchestray.trainers.planning.pricing import by_axis, chance_s, memory_of, operation_s, sent_bytes, step_parts
from orchestray.trainers.planning.run_length import run_length
from orchestray.trainers.planning.servers import ServerLoad, ServerStep, asynchronous, synchronous

if TYPE_CHECKING:
    from orchestray.trainers.config.schema import TrainConfig, TrainSection
    from orchestray.trainers.planning.cluster import Cluster
    from orchestray.trainers.planning.found import DryRun
    from orchestray.trainers.planning.measuring import Measurements


_TENSOR_NOTE = "what a stage's own workers exchange takes time as well, which is not in it"


class Predictor:
    """A predictor of steps.

    Args:
        cluster: machines to predict for.
        measurements: measurements on this machine.
    """

    def __init__(self, cluster: Cluster, measurements: Measurements) -> None:
        self._cluster, self._measurements = cluster, measurements

    def predict(self, config: TrainConfig, name: str, changes: Mapping[str, Any]) -> Plan:
        """Return the plan of a config.

        Raises:
            ConfigError: the config does not fit the task or the model.
            TrainingError: the task's code failed.
        """
        threads, cores = config.resources.num_threads, self._cluster.machine.cores
        if threads > cores:
            raise ConfigError(f"config: resources.cpus_per_worker: a machine has {cores} cores, got {threads}")
        settings, *largest = _settings_by_size(config)
        made, network = self._made(config, settings), config.strategy.network
        if changes and not made.spares:
            how = config.train.recompute
            raise ConfigError(f"train.recompute: {how} spares no activations of this model: it is the plan without it")
        length = run_length(config.train, made.num_samples)
        if largest:
            made = _grown(made, self._made(config, largest[0]), config.train, length.samples)
        exact = config.strategy.compression.type == "none" and not made.diverges and made.staleness == 0.0
        data = config.model_dump(mode="json")
        # A run would measure again, and perhaps cut elsewhere.
        if changes and made.begins and network.split == "balanced":
            data["strategy"]["network"]["split"] = split = [*made.begins]
            changes = {**changes, "strategy.network": {**changes["strategy.network"], "split": split}}
        return Plan(
            name=name,
            traits=traits_of(config),
            changes=changes,
            config=data,
            num_workers=network.data * network.tensor * network.pipeline,
            num_servers=made.num_servers,
            samples=length.samples,
            steps_per_epoch=length.steps_per_epoch,
            num_steps=length.num_steps,
            parts=_slower(made.parts, self._cluster.slowness(threads)),
            memory=made.memory,
            num_bytes=made.num_bytes,
            staleness=made.staleness,
            keeps_result=exact,
            notes=made.notes,
        )

    def wanted(self, config: TrainConfig) -> list[Wanted]:
        """Return the measurements that a prediction of a config takes."""
        return [each for settings in _settings_by_size(config) for each in self._wanted(config, settings)]

    def _wanted(self, config: TrainConfig, settings: ReplicaSettings) -> list[Wanted]:
        at_once, threads = self._measured_by(settings.layout.size, config.resources.num_threads)
        if config.strategy.exchange.type == "parameter_server":
            alone = Wanted("dry_run", _of_server_worker(settings), threads, at_once)
            return [alone, Wanted("served", settings, threads, 1)]
        if settings.layout.pipeline > 1:
            whole = Wanted("dry_run", _whole(settings), threads, at_once)
            layers = self._layers(config, settings)
            return [layers, whole, self._count(layers, settings, threads)]
        wanted = [Wanted("dry_run", settings, threads, at_once)]
        if settings.recompute != "none":
            wanted.append(Wanted("dry_run", replace(settings, recompute="none"), threads, at_once))
        return wanted

    @property
    def _process_bytes(self) -> int:
        return self._cluster.machine.process_bytes

    def _layers(self, config: TrainConfig, settings: ReplicaSettings) -> Wanted:
        at_once, threads = self._measured_by(settings.layout.size, config.resources.num_threads)
        pipeline = settings.pipeline
        wanted = Wanted("profile", settings, threads, at_once)
        if isinstance(pipeline.split, list):  # by a plan, perhaps: it has measured these layers before it named a cut
            balanced = replace(settings, pipeline=replace(pipeline, split="balanced"))
            planned = Wanted("profile", balanced, threads, at_once)
            if self._measurements.knows(planned):
                names = self._measurements.profiles(planned)[0].names
                return planned if set(pipeline.split) <= set(names) else wanted
        return wanted

    def _count(self, layers: Wanted, settings: ReplicaSettings, threads: int) -> Wanted:
        known = self._measurements.knows(layers)
        begins = self._pipeline_step(layers, settings).begins if known else ()
        return Wanted("count", countable(settings, begins)[0], threads, 1)

    def _measured_by(self, num_workers: int, threads: int) -> tuple[int, int]:
        """Return how many workers measure at once, and the threads of each."""
        return self._cluster.at_once(num_workers, threads), self._cluster.threads_here(threads)

    def _made(self, config: TrainConfig, settings: ReplicaSettings) -> _Made:
        if config.strategy.exchange.type == "parameter_server":
            return self._with_servers(config, settings)
        if settings.layout.pipeline > 1:
            return self._pipeline(config, settings)
        runs, *without = [self._measurements.dry_runs(each) for each in self._wanted(config, settings)]
        size, overlap = settings.layout.size, self._cluster.machine.overlap
        crowd = self._cluster.crowd(size, config.resources.num_threads)

        def time_of(kind: str, members: int, num_bytes: int) -> float:
            return self._cluster.time_of(kind, members, num_bytes, num_workers=size)

        agreed = agreed_bytes(settings, run_length(config.train, runs[0].num_samples)) if settings.diverges else 0.0
        # A step that computes parts again does all that one without does: where it seems faster, that is noise.
        parts = max((step_parts(each, time_of, overlap) for each in (*without, runs)), key=lambda made: made.total_s)
        return _Made(
            replace(parts, compute_s=parts.compute_s * crowd, optimizer_s=parts.optimizer_s * crowd),
            memory_of(runs[0], self._process_bytes),
            sent_bytes(runs[0], settings.layout, agreed),
            num_samples=runs[0].num_samples,
            diverges=settings.diverges and settings.layout.data > 1,
            spares=all(runs[0].activation_bytes < kept[0].activation_bytes for kept in without),
        )

    def _pipeline(self, config: TrainConfig, settings: ReplicaSettings) -> _Made:
        step = self._pipeline_step(self._layers(config, settings), settings)
        _, whole, count = self._wanted(config, settings)
        known, counted = self._measurements.dry_runs(whole)[0], self._measurements.counted(count)
        size, layout = settings.layout.size, settings.layout
        share = max(step.parameter_bytes) / max(1, known.parameter_bytes) / layout.tensor
        crowd = self._cluster.crowd(size, config.resources.num_threads)
        time_of, whole_s = partial(self._cluster.time_of, num_workers=size), known.exchanging
        parts = Parts(
            compute_s=step.busy_s * crowd,
            exchange_s=counted.exchange_s(partial(operation_s, time_of=time_of)),
            bubble_s=(step.span_s - step.busy_s) * crowd,
            optimizer_s=whole_s.optimizer_s * share,
            loop_s=max(0.0, whole_s.step_s - whole_s.backward_s - whole_s.optimizer_s),
        )
        held = _held_bytes(step, known)
        sent = {axis: counted.num_bytes(axis) for axis in ("data", "tensor", "model", "world", "pipeline")}
        if countable(settings, step.begins)[1]:
            held = max((each.held_bytes for each in counted.workers), key=sum)
        else:
            sent["pipeline"] = step.link_bytes * layout.data
        sent["world"] += agreed_bytes(settings, run_length(config.train, known.num_samples))
        return _Made(
            parts,
            Memory(*held, max(step.activation_bytes), memory_of(known, self._process_bytes).process),
            by_axis(sent, layout),
            num_samples=known.num_samples,
            staleness=step.staleness,
            diverges=settings.diverges and layout.data > 1,
            notes=(_TENSOR_NOTE,) if layout.tensor > 1 else (),
            begins=step.begins,
        )

    def _pipeline_step(self, layers: Wanted, settings: ReplicaSettings) -> PipelineStep:
        size = settings.layout.size

        def message_s(num_bytes: float) -> float:
            return self._cluster.message_s(num_bytes, num_workers=size, size=settings.layout.pipeline)

        return pipeline_step(self._measurements.profiles(layers), settings, message_s)

    def _with_servers(self, config: TrainConfig, settings: ReplicaSettings) -> _Made:
        exchange = settings.exchange
        worker, with_servers = self._wanted(config, settings)
        runs, served = self._measurements.dry_runs(worker), self._measurements.served(with_servers)
        data, shards = settings.layout.data, int(exchange["shards"])
        shared = exchange["transport"] == "shared_memory"
        num_servers, num_bytes = 0 if shared else shards, runs[0].parameter_bytes
        compute_s = fmean(run.exchanging.step_s - run.exchanging.optimizer_s for run in runs)
        load = ServerLoad(
            num_workers=data,
            compute_s=compute_s,
            transport_s=max(0.0, served.round_s - served.service_s) + self._further_s(num_bytes / shards, data, shards),
            service_s=served.service_s,
            update_s=min(served.service_s, median(run.exchanging.optimizer_s for run in runs) / shards),
            chance_s=chance_s(runs),
            cpu_s=compute_s + max(0.0, served.worker_cpu_s - served.compute_s) + served.server_cpu_s,
            cores=self._cluster.machine.cores * self._cluster.num_nodes,
        )
        step = _consistent(load, exchange, int(exchange["push_every"]))
        return _Made(
            Parts(compute_s, load.transport_s, max(0.0, step.queue_s), load.service_s),
            memory_of(runs[0], self._process_bytes, grown_bytes=max(served.grown_bytes, served.server_grown_bytes)),
            {} if shared else {"server": round(data * served.share_bytes)},
            num_samples=runs[0].num_samples,
            staleness=step.staleness,
            num_servers=num_servers,
        )

    def _further_s(self, num_bytes: float, workers: int, shards: int) -> float:
        """Return how much longer a push and the answer take to servers of other machines than to those of this one."""
        size = workers + shards
        if size <= self._cluster.workers_of_node(size):
            return 0.0
        there_s = self._cluster.message_s(num_bytes, num_workers=size, size=size)
        here_s = self._cluster.machine.channels["shared_memory"].seconds(num_bytes)
        return 2 * max(0.0, there_s - here_s)


@dataclass(frozen=True)
class _Made:
    """The parts of a plan that depend on its scheme."""

    parts: Parts
    memory: Memory
    num_bytes: Mapping[str, int]
    num_samples: int = 0
    staleness: float = 0.0
    num_servers: int = 0
    diverges: bool = False
    spares: bool = True
    """False if activations are computed again, and as many are kept as without that."""
    notes: tuple[str, ...] = ()
    begins: tuple[str, ...] = ()
    """Names of the layers that begin the stages of a pipeline after the first."""


def _settings_by_size(config: TrainConfig) -> list[ReplicaSettings]:
    """Return the settings of a run; if its batches grow, with their first size and with the largest."""
    settings = ReplicaSettings.from_config(config, storage="", model_directory="")
    schedule = config.train.batch_schedule
    if schedule is None or schedule.max_batch_size <= settings.batch_size:
        return [settings]
    return [settings, replace(settings, batch_size=schedule.max_batch_size)]


def _grown(first: _Made, last: _Made, train: TrainSection, samples: float) -> _Made:
    """Return what a step takes in the mean, on a line between batches of the first size and of the largest.

    Args:
        first: what a step of the first size takes.
        last: what one of the largest takes, whose memory the run needs.
        train: the config's section.
        samples: mean samples of a step.
    """
    assert train.batch_schedule is not None
    largest = min(train.batch_schedule.max_batch_size, first.num_samples)
    grown = max(0.0, (samples - train.batch_size) / max(1, largest - train.batch_size))
    sent = {link: round(num + grown * (last.num_bytes[link] - num)) for link, num in first.num_bytes.items()}
    notes = (*first.notes, f"batches grow from {train.batch_size} samples to {largest} at most")
    if isinstance(train.batch_schedule, Measured):
        step_s = last.parts.total_s
        notes = (*notes, f"as nobody knows when, times are those of the first size; the largest takes {step_s:.3g} s")
    return replace(first, parts=first.parts.towards(last.parts, grown), memory=last.memory, num_bytes=sent, notes=notes)


def traits_of(config: TrainConfig) -> Traits:
    """Return what errors of a config's prediction may have in common with those of others."""
    family, detail = _scheme_of(config)
    task = json.dumps(config.model_dump(mode="json", include={"task"}), sort_keys=True)
    return Traits(hashlib.sha256(task.encode()).hexdigest()[:16], family, f"{family} {detail}".strip())


def _scheme_of(config: TrainConfig) -> tuple[str, str]:
    """Return the family of a config's scheme, and what tells it from others of that family."""
    network, exchange = config.strategy.network, config.strategy.exchange
    if exchange.type == "parameter_server":
        family = HOGWILD if exchange.transport == "shared_memory" else "parameter_server"
        return family, f"{exchange.consistency} {exchange.transport}"
    if network.pipeline > 1:
        return "pipeline", str(network.schedule)
    if network.tensor > 1:
        return "tensor", str(network.plan)
    if network.data == 1:
        return SINGLE, str(config.train.recompute)
    if config.strategy.compression.type != "none":
        return "compressed", str(config.strategy.compression.type)
    if exchange.type == "allreduce" and exchange.shard != "none":
        return "zero", str(exchange.shard)
    return str(exchange.type), ""


def _consistent(load: ServerLoad, exchange: Mapping[str, Any], push_every: int) -> ServerStep:
    if exchange["consistency"] == "synchronous":
        return synchronous(load)
    bound = exchange["staleness"] if exchange["consistency"] == "stale" else None
    return asynchronous(load, push_every=push_every, bound=bound)


def _of_server_worker(settings: ReplicaSettings) -> ReplicaSettings:
    """Return the settings of a worker of parameter servers on its own: its share of the batch, nothing to exchange."""
    share = ceil(settings.batch_size / settings.layout.data)
    return replace(settings, layout=Layout(), batch_size=share, exchange={}, compression={}, aggregation={})


def _whole(settings: ReplicaSettings) -> ReplicaSettings:
    """Return the settings of one replica whose model is whole."""
    share = ceil(settings.batch_size / settings.layout.data)
    return replace(
        settings,
        layout=Layout(),
        pipeline=PipelineSettings(),
        batch_size=share,
        exchange={},
        compression={},
        accumulate=1,
        recompute="none",
    )


def _held_bytes(step: PipelineStep, whole: DryRun) -> tuple[int, int, int]:
    """Return the bytes of parameters, gradients and the optimizer's state of the worker with most parameters.

    The state has a number of values for each of a parameter's, and a few more for each parameter.

    Args:
        step: step of the pipeline.
        whole: dry run of the whole model.
    """
    own, num = max(zip(step.parameter_bytes, step.num_parameters, strict=True))
    times, beside = divmod(whole.optimizer_bytes, max(1, whole.parameter_bytes))
    return own, own, times * own + beside * num // max(1, sum(step.num_parameters))


def _slower(parts: Parts, slowness: float) -> Parts:
    """Return the parts on machines that compute more slowly, or faster: the exchange is theirs already."""
    return replace(
        parts,
        compute_s=parts.compute_s * slowness,
        bubble_s=parts.bubble_s * slowness,
        optimizer_s=parts.optimizer_s * slowness,
        loop_s=parts.loop_s * slowness,
    )


def refuse_unknown(config: TrainConfig) -> None:
    """Raise if no prediction is made of a config.

    Raises:
        ConfigError: its scheme has none.
    """
    exchange: Any = config.strategy.exchange
    if exchange.type == "parameter_server":
        if exchange.num_leaves:
            raise ConfigError("config: strategy.exchange.groups: leaf servers are not predicted yet; set it to 1")
        for axis in ("tensor", "pipeline"):
            if getattr(config.strategy.network, axis) > 1:
                text = "parameter servers of replicas that are split are not predicted yet; set it to 1"
                raise ConfigError(f"config: strategy.network.{axis}: {text}")
    if config.train.solver is not None:
        text = "evaluates a batch as often as its line search or its products need, which is not predicted"
        raise ConfigError(f"config: train.solver: {config.train.solver.type} {text}; give train.optimizer to plan")
    if config.resources.gpus_per_worker > 0:
        raise ConfigError("config: resources.gpus_per_worker: steps on GPUs are not predicted here; set it to 0")
