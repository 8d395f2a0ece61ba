"""Layouts over two GPUs have the weights of one, and a gang of nodes with and without a GPU is refused."""

from __future__ import annotations

from typing import Any

from gpu.check import Place, Verdict, main

_BOUND, _STEPS = 1e-5, 4
_LAYOUTS: dict[str, dict[str, Any]] = {
    "ZeRO 3": {"network": {"data": 2}, "exchange": {"type": "allreduce", "shard": "parameters"}},
    "tensor": {"network": {"tensor": 2}},
    "pipeline": {"network": {"pipeline": 2, "microbatches": 4}},
    "data": {"network": {"data": 2}},
}
_WHOLE = {"network": {"data": 2, "tensor": 2, "pipeline": 2, "microbatches": 2}}


def member(world: Any, device: Any) -> dict[str, dict[str, Any]]:
    """Train by each layout of this many workers, and return the weights."""
    from gpu import training

    layouts = _LAYOUTS if world.size == 2 else {"2 x 2 x 2": _WHOLE}
    found = {}
    for name, strategy in layouts.items():
        replica = training.replica_of(training.TEXT, device, steps=_STEPS, strategy=strategy)
        training.trained(replica, world.sibling(name))
        found[name] = training.weights_of(replica)
    return found


def run(place: Place) -> Verdict:
    """Hold each layout's weights at those of one GPU; eight workers share the two over the host's memory."""
    from gpu import gang, training
    from orchestray.platform.comm.backend import Given, choose_backend
    from orchestray.platform.errors import OrchestrayError

    alone = training.replica_of(training.TEXT, place.device(), steps=_STEPS)
    training.trained(alone)
    wanted = training.weights_of(alone)
    found = dict(gang.run_gang(place, 2, member)[0])
    found |= gang.run_gang(place, 8, member, backend="over_host", gpus=2)[0]
    apart = {name: training.largest_difference(weights, wanted) for name, weights in found.items()}
    try:
        choose_backend([Given(1, "a", ("0",)), Given(0, "b")])
        refused = False
    except OrchestrayError:
        refused = True
    figures = ", ".join(f"{name} {value:.1e}" for name, value in apart.items())
    holds = max(apart.values()) <= _BOUND and refused
    return Verdict(holds, f"{figures} (<= {_BOUND:g}); mixed nodes refused: {refused}")


if __name__ == "__main__":
    main(run, gpus=2)
