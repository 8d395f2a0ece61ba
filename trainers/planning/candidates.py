"""The schemes that a plan compares: settings of a config that run it on some workers, each by itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import ceil
from typing import Any

from orchestray.trainers.config.load import check_data
from orchestray.trainers.config.schema import TrainConfig

_SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "zero_bubble", "zbv", "dual_pipe_v", "pipedream")
_MICRO_BATCHES = (1, 2, 4, 8)
"""Micro-batches for each worker of a pipeline."""
_AVERAGING = (4, 20, 100)
_COMPRESSIONS: tuple[Mapping[str, Any], ...] = (
    {"type": "float16"},
    {"type": "qsgd", "bits": 8},
    {"type": "onebit", "error_feedback": True},
    {"type": "powersgd", "rank": 2},
    {"type": "topk", "ratio": 0.01},
)
_PLANS = ("auto", "spatial", "channels", "branches", "one_weird_trick")


@dataclass(frozen=True)
class Candidate:
    """A scheme for a config.

    Args:
        name: short name.
        changes: dotted keys of the config that it sets.
    """

    name: str
    changes: Mapping[str, Any] = field(default_factory=dict)

    def applied_to(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """Return a config's plain data with the changes; they share what neither changes."""
        made = dict(data)
        for path, value in self.changes.items():
            *sections, key = path.split(".")
            section = made
            for name in sections:
                section[name] = dict(section[name])
                section = section[name]
            section[key] = value
        return made


def candidates(
    config: TrainConfig, num_workers: int, cores: int, nodes: int = 1
) -> list[tuple[Candidate, TrainConfig]]:
    """Return the schemes for a config that its rules allow, each with its config; one process of all threads is first.

    Args:
        config: the config; its own strategy is not among them.
        num_workers: most workers.
        cores: cores of a machine, which workers there share as threads.
        nodes: machines, over which workers are spread.
    """
    data = config.model_dump(mode="json")
    found, seen = [], set[str]()
    for candidate in _all(config, num_workers, cores, nodes):
        made, problems = check_data(candidate.applied_to(data), look_at_task=False)
        if made is None or problems:
            continue
        key = made.model_dump_json(include={"strategy", "resources", "train"})
        if key not in seen:
            seen.add(key)
            found.append((candidate, made))
    return found


def _all(config: TrainConfig, num_workers: int, cores: int, nodes: int) -> Iterator[Candidate]:
    yield Candidate("one process", _changes(threads=cores))
    for recompute in ("blocks", "sqrt"):
        yield Candidate(f"one process, recompute {recompute}", _changes(threads=cores, recompute=recompute))
    for workers in _counts(num_workers):
        threads = max(1, cores // ceil(workers / nodes))
        yield from _of_replicas(workers, threads)
        for parts in _counts(workers):
            if workers % parts == 0:
                yield from _of_tensors(workers // parts, parts, threads)
                yield from _of_pipelines(config, workers // parts, parts, threads)
        yield from _of_loose_replicas(workers, threads)
        yield from _of_servers(workers, threads)


def _counts(most: int) -> list[int]:
    """Return the numbers of workers to try: powers of two, and the most."""
    powers = [1 << level for level in range(1, most.bit_length()) if 1 << level <= most]
    return sorted({*powers, *([most] if most > 1 else [])})


def _of_replicas(workers: int, threads: int) -> Iterator[Candidate]:
    network = {"data": workers}
    for shard, name in (("none", ""), ("optimizer", ", ZeRO-1"), ("gradients", ", ZeRO-2"), ("parameters", ", ZeRO-3")):
        exchange = {"type": "allreduce", "shard": shard}
        yield Candidate(f"{workers} replicas{name}", _changes(network, exchange, threads=threads))
    for recompute in ("blocks", "sqrt"):
        changes = _changes(network, {"type": "allreduce"}, threads=threads, recompute=recompute)
        yield Candidate(f"{workers} replicas, recompute {recompute}", changes)


def _of_tensors(replicas: int, tensor: int, threads: int) -> Iterator[Candidate]:
    prefix = "" if replicas == 1 else f"{replicas} x "
    for plan in _PLANS:
        network = {"data": replicas, "tensor": tensor, "plan": plan}
        yield Candidate(f"{prefix}tensor {tensor}, {plan}", _changes(network, threads=threads))


def _of_pipelines(config: TrainConfig, replicas: int, stages: int, threads: int) -> Iterator[Candidate]:
    prefix = "" if replicas == 1 else f"{replicas} x "
    for schedule in _SCHEDULES:
        for each in _MICRO_BATCHES:
            count = each * stages
            if config.train.batch_size < replicas * count:
                continue
            network = {"data": replicas, "pipeline": stages, "schedule": schedule, "microbatches": count}
            name = f"{prefix}pipeline {stages}, {schedule}, {count} micro-batches"
            yield Candidate(name, _changes(network, threads=threads))


def _of_loose_replicas(workers: int, threads: int) -> Iterator[Candidate]:
    network = {"data": workers}
    for compression in _COMPRESSIONS:
        changes = _changes(network, {"type": "allreduce"}, threads=threads, compression=compression)
        yield Candidate(f"{workers} replicas, {compression['type']}", changes)
    for every in _AVERAGING:
        exchange: dict[str, Any] = {"type": "averaging", "every": every}
        yield Candidate(f"{workers} averaged every {every}", _changes(network, exchange, threads=threads))
        outer = {**exchange, "outer_optimizer": {"type": "sgd", "lr": 0.7, "momentum": 0.9, "nesterov": True}}
        yield Candidate(f"{workers} by DiLoCo every {every}", _changes(network, outer, threads=threads))
    elastic = {"type": "elastic_averaging", "every": 4}
    yield Candidate(f"{workers} elastic", _changes(network, elastic, threads=threads))
    if workers > 2:
        yield Candidate(f"{workers} gossiping", _changes(network, {"type": "gossip"}, threads=threads))


def _of_servers(workers: int, threads: int) -> Iterator[Candidate]:
    network = {"data": workers}
    kinds: tuple[tuple[str, dict[str, Any]], ...] = (
        ("synchronous server", {"consistency": "synchronous"}),
        ("server, stale 2", {"consistency": "stale", "staleness": 2}),
        ("asynchronous server", {"consistency": "asynchronous"}),
        ("HOGWILD", {"consistency": "asynchronous", "transport": "shared_memory"}),
    )
    for name, keys in kinds:
        exchange = {"type": "parameter_server", **keys}
        yield Candidate(f"{workers} workers, {name}", _changes(network, exchange, threads=threads))


def _changes(
    network: Mapping[str, Any] | None = None,
    exchange: Mapping[str, Any] | None = None,
    *,
    threads: int,
    compression: Mapping[str, Any] | None = None,
    recompute: str = "none",
) -> dict[str, Any]:
    """Return the keys of a scheme; all that is not given is as without it."""
    return {
        "strategy.network": dict(network or {}),
        "strategy.exchange": dict(exchange or {"type": "allreduce"}),
        "strategy.compression": dict(compression or {"type": "none"}),
        "strategy.aggregation": {"type": "mean"},
        "train.recompute": recompute,
        "train.accumulate": 1,
        "resources.cpus_per_worker": float(threads),
        "engine": "actors",
    }
