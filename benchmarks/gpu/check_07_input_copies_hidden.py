"""Copies of the input to the GPU cost no time of its own: they run beside kernels, or take under 1 % of the time."""

from __future__ import annotations

import time

from gpu.check import Place, Verdict, main

_BOUND = 0.01


def run(place: Place) -> Verdict:
    """Trace 20 steps of a training with wide rows, and measure the copies that no kernel runs beside."""
    from gpu import trace, training
    from orchestray.platform.comm.solo import SoloCollective

    steps = place.sized(20, 3)
    task = {"type": "digits", "hidden": [4096, 4096] if not place.is_rehearsal else [16]}
    replica = training.replica_of(task, place.device(), batch_size=1024, steps=10**6)
    replica.connect(SoloCollective())
    replica.pause_at = 5
    replica.run(time.time())
    replica.pause_at = 5 + steps
    with trace.tracing() as traced:
        replica.run(time.time())
    copies, kernels = trace.on_device(traced, "Memcpy HtoD"), trace.on_device(traced)
    pageable = len(trace.on_device(traced, "Pageable -> Device"))
    if place.is_rehearsal:
        return Verdict(not copies and not kernels, "no copies on a CPU")
    exposed, whole = trace.exposed_us(copies, kernels), trace.length_us(copies + kernels)
    holds = bool(copies) and exposed <= _BOUND * whole and not pageable
    return Verdict(
        holds,
        f"{len(copies)} copies, {exposed / whole:.2%} of the GPU's time beside no kernel (<= {_BOUND:.0%}), "
        f"{pageable} from pageable memory (= 0)",
    )


if __name__ == "__main__":
    main(run)
