"""Two workers with half a GPU each train over the host's memory, never by NCCL, which refuses two ranks on a GPU."""

from __future__ import annotations

from typing import Any

from gpu.check import Place, Verdict, main

_BOUND = 1e-5


def member(world: Any, device: Any) -> tuple[dict[int, float], dict[str, Any]]:
    """Train as one of two replicas; return the losses and the weights."""
    from gpu import training

    replica = training.replica_of(training.DIGITS, device, steps=20, strategy={"network": {"data": 2}})
    return training.trained(replica, world), training.weights_of(replica)


def run(place: Place) -> Verdict:
    """Hold the weights at those of one process."""
    from gpu import gang, training
    from orchestray.platform.comm.backend import Given, choose_backend

    chosen = choose_backend([Given(0.5, "node", ("0",)), Given(0.5, "node", ("0",))])
    alone = training.replica_of(training.DIGITS, place.device(), steps=20)
    training.trained(alone)
    found = gang.run_gang(place, 2, member, backend=chosen, gpus=1, as_threads=False)
    worst = max(training.largest_difference(weights, training.weights_of(alone)) for _, weights in found)
    holds = chosen == "over_host" and worst <= _BOUND
    return Verdict(holds, f"backend {chosen}, weights differ from one process's by {worst:.1e} (<= {_BOUND:g})")


if __name__ == "__main__":
    main(run)
