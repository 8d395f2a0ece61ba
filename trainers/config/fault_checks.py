"""Rules on injected faults, and on the teacher's run of a distillation."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from orchestray.platform.config.problems import Problem
from orchestray.trainers.config.checked_view import Rule, View
from orchestray.trainers.config.faults import Fault
from orchestray.trainers.sync.allreduce.params import AllReduce
from orchestray.trainers.sync.parameter_server import ParameterServer


def _allowed(view: View) -> Iterator[Problem]:
    if view("faults") and not view("allow_faults"):
        yield Problem(
            "faults", "break the run on purpose, which has to be allowed: set allow_faults: true, or take them out"
        )


def _targets(view: View) -> Iterator[Problem]:
    exchange, network = view("strategy.exchange"), view("strategy.network")
    counts = {"worker": network.data * network.tensor * network.pipeline}
    if isinstance(exchange, ParameterServer):
        counts["parameter_server"] = exchange.shards * exchange.replicas
        counts["leaf_server"] = exchange.num_leaves
    for index, fault in enumerate(view("faults")):
        role, rank = fault.target
        if rank >= counts.get(role, 0):
            there = " and ".join(_ranks(name, count) for name, count in counts.items() if count)
            text = f"this run has no {role}/{rank}; it has {there}"
            yield Problem(f"faults.{index}.{fault.kind}", text)
        elif fault.kind == "byzantine" and role != "worker":
            workers = _ranks("worker", counts["worker"])
            text = f"it is workers that send gradients, got {role}/{rank}; this run has {workers}"
            yield Problem(f"faults.{index}.byzantine", text)


def _ranks(role: str, count: int) -> str:
    return f"{role}/0" if count == 1 else f"{role}/0 to {role}/{count - 1}"


def _amounts(view: View) -> Iterator[Problem]:
    for index, fault in enumerate(view("faults")):
        path = f"faults.{index}"
        if fault.kind == "drop" and fault.factor >= 1:
            text = f"is how likely a message is lost, with drop: above 0 and below 1, such as 0.1; got {fault.factor:g}"
            yield Problem(f"{path}.factor", text)
        if fault.kind == "slow" and fault.factor < 1:
            text = f"is how many times as slowly it computes, with slow: 1 or more, got {fault.factor:g}"
            yield Problem(f"{path}.factor", text)
        yield from _meaningless(fault, path)


def _possible(view: View) -> Iterator[Problem]:
    """Refuse faults that cannot happen with this schedule or exchange."""
    exchange, network = view("strategy.exchange"), view("strategy.network")
    is_streaming = network.schedule == "pipedream" and network.pipeline > 1
    for index, fault in enumerate(view("faults")):
        path, text = f"faults.{index}.{fault.kind}", ""
        if is_streaming:
            text = "pipedream has several steps under way at once, so nothing can happen at one; use another schedule"
        elif fault.kind == "drop" and not (isinstance(exchange, ParameterServer) and exchange.transport == "channel"):
            text = "loses messages between workers and servers, and this run has none; use delay"
        elif fault.kind == "byzantine" and isinstance(exchange, AllReduce | ParameterServer):
            text = _not_spoiled(exchange)
        if text:
            yield Problem(path, text)


def _not_spoiled(exchange: AllReduce | ParameterServer) -> str:
    if isinstance(exchange, AllReduce) and exchange.shard != "none":
        return f"spoils whole gradients, which shard: {exchange.shard} does not keep; use shard: none"
    if exchange.factors != "never":
        return "spoils gradients, and factors are sent in their place; use factors: never"
    return ""


def _meaningless(fault: Fault, path: str) -> Iterator[Problem]:
    """Refuse keys that differ from their default and have no meaning for this kind of fault."""
    kinds = {"factor": ("slow", "delay", "drop"), "attack": ("byzantine",), "scale": ("byzantine",)}
    for key, meant in kinds.items():
        if fault.kind not in meant and getattr(fault, key) != Fault.model_fields[key].default:
            text = f"has a meaning with {_one_of(meant)} only, not with {fault.kind}; take it out"
            yield Problem(f"{path}.{key}", text)


def _one_of(names: tuple[str, ...]) -> str:
    return " or ".join(part for part in (", ".join(names[:-1]), names[-1]) if part)


def _in_time(view: View) -> Iterator[Problem]:
    steps = view("train.steps")
    for index, fault in enumerate(view("faults")):
        if steps is not None and fault.at_step > steps:
            text = f"the run is over by then: it has {steps} steps (train.steps), got {fault.at_step}"
            yield Problem(f"faults.{index}.at_step", text)


def find_teacher(view: View) -> Iterator[Problem]:
    """Refuse a teacher whose trained model does not exist.

    The rule reads files, which may be gone when the config of a finished run is read again.
    """
    distill = view("distill")
    if distill is None:
        return
    directory = Path(distill.teacher)
    if not directory.is_dir():
        yield Problem("distill.teacher", f"there is no run directory {directory}; give that of a run that has finished")
    elif not (directory / "model" / "model.json").is_file():
        text = f"{directory} holds no trained model (model/model.json); give the directory of a run that has finished"
        yield Problem("distill.teacher", text)


FAULT_RULES: tuple[Rule, ...] = (_allowed, _targets, _possible, _amounts, _in_time)
