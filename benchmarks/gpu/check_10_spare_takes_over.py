"""SIGKILL of the worker on a GPU: a spare goes on within 5 s, in memory that the dead one has left."""

from __future__ import annotations

import tempfile
from pathlib import Path

from gpu.check import Place, Verdict, main

_BOUND_S = 5.0


def run(place: Place) -> Verdict:
    """Kill one of two workers that share a GPU with a spare, and wait for the next step."""
    from gpu import cluster

    gpus = 0.0 if place.is_rehearsal else 0.25
    config = cluster.config_of("killed", 10**7, gpus=gpus, data=2, resources={"spares": 1})
    with tempfile.TemporaryDirectory() as directory:
        killed = cluster.kill_a_worker(Path(directory), config)
    holds = (place.is_rehearsal or killed.next_step_s <= _BOUND_S) and not killed.is_dead_on_gpu
    return Verdict(
        holds,
        f"next step after {killed.next_step_s:.2f} s (<= {_BOUND_S:g} s), from a spare: {killed.from_spare}, "
        f"the dead one still on the GPU: {killed.is_dead_on_gpu}",
    )


if __name__ == "__main__":
    main(run, needs_ray=True)
