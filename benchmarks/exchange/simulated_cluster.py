"""1,000 simulated workers in virtual time: a parameter server, gossip and a ring, how long that takes to simulate."""

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
    report.notes += [
        (
            "Links as of 10 Gbit/s Ethernet; a node sends one message at a time and takes in one. Parameter server and "
            "gossip are simulated message by message; the ring's rounds, of a thousand messages each, as one."
        ),
        "The parameter server is one node, and its port what all wait for: that is what sharding is for.",
    ]


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
        "100 steps of 1,000 workers in virtual time: how long that takes, and how near the closed forms are.",
        measure,
    )
