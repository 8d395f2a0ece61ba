"""Four pipeline stages on one GPU, over the host's memory: the weights of one process, and a bubble as drawn."""

from __future__ import annotations

from typing import Any

from gpu.check import Place, Verdict, main

_STAGES, _MICROBATCHES = 4, 8
_BOUND, _BUBBLE = 1e-5, 0.5
_TASK = {"type": "digits", "hidden": [64] * 7}


def member(world: Any, device: Any) -> tuple[dict[str, Any], float]:
    """Train as one of the stages; return the weights, and the mean of the bubbles that it measured."""
    from gpu import training

    network = {"pipeline": _STAGES, "schedule": "1f1b", "microbatches": _MICROBATCHES}
    replica = training.replica_of(_TASK, device, steps=20, batch_size=64, strategy={"network": network})
    training.trained(replica, world)
    lines = [line["bubble"] for line in replica.recorder.since(5) if "bubble" in line]
    return training.weights_of(replica), sum(lines) / max(1, len(lines))


def run(place: Place) -> Verdict:
    """Hold the weights at those of one process, and the bubble near (S - 1) / (M + S - 1) from below."""
    from gpu import gang, training

    alone = training.replica_of(_TASK, place.device(), steps=20, batch_size=64)
    training.trained(alone)
    found = gang.run_gang(place, _STAGES, member, backend="over_host", gpus=1)
    worst = max(training.largest_difference(weights, training.weights_of(alone)) for weights, _ in found if weights)
    drawn = (_STAGES - 1) / (_MICROBATCHES + _STAGES - 1)
    measured = max(bubble for _, bubble in found)
    # Stages that share a GPU share its time, so the bubble is bounded here from below alone, and reported.
    holds = worst <= _BOUND and (place.is_rehearsal or measured > 0)
    return Verdict(
        holds,
        f"weights differ by {worst:.1e} (<= {_BOUND:g}), bubble measured {measured:.2f} (> 0), "
        f"drawn {drawn:.2f} for stages that share nothing",
    )


if __name__ == "__main__":
    main(run)
