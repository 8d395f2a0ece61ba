"""1,000 and 10,000 simulated workers in virtual time: how long it takes to simulate each scheme."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from harness import benchmark

_NUM_WORKERS = 1000
_NUM_STEPS = 100
_NUM_BYTES = 16_000_000
_COMPUTE_S = 0.1
_LINK = {"latency_s": 50e-6, "bandwidth_bytes_per_s": 1.25e9}
_MOST_S = 10.0
_MOST_ERROR = 1e-9
_MANY_WORKERS = 10_000
_MANY_MOST_S = 60.0
_WORKERS_PER_NODE = 8
_NEAR = {"latency_s": 5e-6, "bandwidth_bytes_per_s": 1e10}
_STRAGGLERS = {"speed_spread": 0.1, "slow_probability": 0.01, "slow_factor": 5.0}


def measure(report: benchmark.Report, options: benchmark.Options) -> None:
    from orchestray.platform.sim.network import Link
    from orchestray.trainers.survey import simulated_training as training

    rounds = options.rounds(3)
    load = training.Load(_NUM_WORKERS, 5 if options.quick else _NUM_STEPS, _NUM_BYTES, _COMPUTE_S)
    link = Link(**_LINK)
    report.settings = {"rounds": rounds, **vars(load), **_LINK}
    schemes: dict[str, tuple[Callable[..., Any], Callable[..., float]]] = {
        "parameter server": (training.parameter_server, training.parameter_server_s),
        "gossip": (training.gossip, training.gossip_s),
        "ring": (training.ring, training.ring_s),
    }
    walls_s: dict[str, list[float]] = {name: [] for name in schemes}
    found: dict[str, Any] = {}

    def call(name: str) -> None:
        began_s = time.perf_counter()
        found[name] = schemes[name][0](load, link)
        walls_s[name].append(time.perf_counter() - began_s)

    benchmark.alternate({name: partial(call, name) for name in schemes}, rounds, benchmark.say)
    rows = []
    for name, (_, closed_form_s) in schemes.items():
        wall = report.add(f"{name}, simulated", "s", walls_s[name])
        expected_s = closed_form_s(load, link)
        error = abs(found[name].finish_s / expected_s - 1)
        report.goal(f"{name}: {load.num_steps} steps of {load.num_workers} workers", wall.median, _MOST_S, "s")
        report.goal(f"{name}: relative distance to the closed form", error, _MOST_ERROR)
        rows.append(_row(name, load.num_steps, found[name], expected_s, wall.median))
    report.table(["scheme", "a step, virtual", "closed form", "messages", "bytes", "messages/s, wall"], rows)
    _many(report, options, rounds)
    report.notes += [
        (
            "Links as of 10 Gbit/s Ethernet; a node sends one message at a time and takes in one. Parameter server and "
            "gossip are simulated message by message; the ring's rounds, of a thousand messages each, as one."
        ),
        "The parameter server is one node, and its port what all wait for: that is what sharding is for.",
        (
            f"The {_MANY_WORKERS:,} workers are on nodes of {_WORKERS_PER_NODE}, differ in speed by a tenth, and are "
            "slow in 1 step of 100; `orchestray simulate` runs the same. Without stragglers, on equal links, they "
            "take the closed forms."
        ),
    ]


def _many(report: benchmark.Report, options: benchmark.Options, rounds: int) -> None:
    """Simulate every scheme vectorised, with stragglers on two levels; the closed forms are those of equal workers."""
    from orchestray.platform.comm.allreduce.costs import AlphaBeta
    from orchestray.trainers.survey.cluster.network import Network
    from orchestray.trainers.survey.cluster.schemes import SCHEMES, Setting, simulate
    from orchestray.trainers.survey.cluster.stragglers import Compute

    num_steps = 5 if options.quick else _NUM_STEPS
    near, far = (AlphaBeta(each["latency_s"], 1 / each["bandwidth_bytes_per_s"]) for each in (_NEAR, _LINK))
    uneven = Setting(
        Network(_MANY_WORKERS, near, far, _WORKERS_PER_NODE), _NUM_BYTES, Compute(_COMPUTE_S, **_STRAGGLERS), num_steps
    )
    even = Setting(Network(_MANY_WORKERS, far), _NUM_BYTES, Compute(_COMPUTE_S), num_steps)
    found: dict[str, Any] = {}
    walls_s: dict[str, list[float]] = {name: [] for name in SCHEMES}

    def call(name: str) -> None:
        began_s = time.perf_counter()
        found[name] = simulate(name, uneven)
        walls_s[name].append(time.perf_counter() - began_s)

    benchmark.alternate({name: partial(call, name) for name in SCHEMES}, rounds, benchmark.say)
    rows = []
    for name in SCHEMES:
        wall = report.add(f"{name}, {_MANY_WORKERS} workers with stragglers, simulated", "s", walls_s[name])
        report.goal(f"{name}: {num_steps} steps of {_MANY_WORKERS} workers", wall.median, _MANY_MOST_S, "s")
        result = found[name]
        sent = (result.near_bytes + result.far_bytes) / 1e12
        rows.append(
            [name, f"{result.step_s:.4g} s", f"{result.staleness:.4g}", f"{sent:.3g} TB", f"{wall.median:.3g} s"]
        )
    for name, expected_s in _closed_forms_s(num_steps, far).items():
        error = abs(simulate(name, even).step_s / (expected_s / num_steps) - 1)
        report.goal(f"{name}, {_MANY_WORKERS} equal workers: distance to the closed form", error, _MOST_ERROR)
    report.table(["scheme", "a step, virtual", "staleness, mean", "bytes a step", "wall"], rows)


def _closed_forms_s(num_steps: int, link: Any) -> dict[str, float]:
    from orchestray.platform.comm.allreduce.costs import cost_s
    from orchestray.trainers.survey.cluster.server import parameter_server_s, synchronous_server_s

    load = num_steps, _MANY_WORKERS, _COMPUTE_S, _NUM_BYTES, link
    return {
        "ring": num_steps * (_COMPUTE_S + cost_s("ring", _MANY_WORKERS, _NUM_BYTES, link)),
        "async": parameter_server_s(*load),
        "server": synchronous_server_s(*load),
        "gossip": num_steps * (_COMPUTE_S + link.time_s(_NUM_BYTES)),
    }


def _row(name: str, num_steps: int, simulated: Any, expected_s: float, wall_s: float) -> list[str]:
    return [
        name,
        f"{simulated.finish_s / num_steps:.4g} s",
        f"{expected_s / num_steps:.4g} s",
        f"{simulated.num_messages:,}",
        f"{simulated.num_bytes / 1e12:.3g} TB",
        f"{simulated.num_messages / wall_s:,.0f}",
    ]


if __name__ == "__main__":
    benchmark.run(
        "simulated_cluster",
        "100 steps of 1,000 and 10,000 workers in virtual time: how long that takes, how near the closed forms are.",
        measure,
    )
