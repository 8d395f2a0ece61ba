"""A worker on a GPU with parameter servers on the CPU: losses as on the CPU, one process with a CUDA context."""

from __future__ import annotations

import tempfile
from pathlib import Path

from gpu.check import Place, Verdict, main

_BOUND = 1e-3
_EXCHANGES = {
    "synchronous": {"type": "parameter_server"},
    "stale": {"type": "parameter_server", "consistency": "stale", "staleness": 2},
    "asynchronous": {"type": "parameter_server", "consistency": "asynchronous"},
}


def run(place: Place) -> Verdict:
    """Hold losses and processes for each kind of server; one worker has no staleness, so all are comparable."""
    from gpu import cluster
    from gpu.machine import lists_processes
    from gpu.training import largest_difference

    is_seen = not place.is_rehearsal and lists_processes(place.device())
    worst, most = 0.0, 0
    with tempfile.TemporaryDirectory() as directory:
        for name, exchange in list(_EXCHANGES.items())[: place.sized(3, 1)]:
            losses = []
            for gpus in (0, 0 if place.is_rehearsal else 1):
                config = cluster.config_of(f"{name}-{len(losses)}", place.sized(50, 5), gpus=gpus, exchange=exchange)
                done = cluster.train(Path(directory), config, watch=is_seen and bool(gpus))
                losses.append(done.losses)
                most = max(most, done.most_on_gpus)
            worst = max(worst, largest_difference(*losses))
    holds = worst <= _BOUND and most == int(is_seen)
    seen = f"at most {most} processes on the GPU (= 1)" if is_seen else "processes on a GPU are not listed here"
    return Verdict(holds, f"largest difference {worst:.1e} (<= {_BOUND:g}), {seen}")


if __name__ == "__main__":
    main(run, needs_ray=True)
