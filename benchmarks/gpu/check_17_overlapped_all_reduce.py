"""The all-reduce of buckets runs during the backward pass, changes no bit, and has NCCL's own bandwidth."""

from __future__ import annotations

import time
from typing import Any

from gpu.check import Place, Verdict, main

_BOUND, _OVERLAP = 0.9, 0.5
_NUM_BYTES = 25_000_000


def member(world: Any, device: Any) -> tuple[dict[str, Any], dict[str, Any], float, float]:
    """Train with and without overlap; return both weights, the part of NCCL's time beside kernels, and a bandwidth.

    The bandwidth is that of the product's all-reduce over a bare one's, of 25 MB.
    """
    from gpu import training
    from orchestray.platform.comm.solo import SoloCollective  # noqa: F401 - the module is loaded before tracing

    is_gpu = device.type == "cuda"
    size = {"context": 256, "width": 1024, "depth": 8, "heads": 16} if is_gpu else {}
    weights, overlapped = [], 0.0
    for overlap in (True, False):
        exchange = {"type": "allreduce", "overlap": overlap, "bucket_mb": 25.0 if is_gpu else 0.1}
        strategy = {"network": {"data": 2}, "exchange": exchange}
        replica = training.replica_of(
            {**training.TEXT, **size}, device, steps=12, batch_size=16, strategy=strategy, deterministic=True
        )
        if overlap and is_gpu:
            overlapped = _traced(replica, world.sibling(f"overlap-{overlap}"))
        else:
            training.trained(replica, world.sibling(f"overlap-{overlap}"))
        weights.append(training.weights_of(replica))
    return weights[0], weights[1], overlapped, _bandwidth(world, device) if is_gpu else 1.0


def _traced(replica: Any, world: Any) -> float:
    from gpu import trace, training

    with trace.tracing() as traced:
        training.trained(replica, world)
    sends, kernels = trace.on_device(traced, "nccl"), trace.on_device(traced)
    return 1 - trace.exposed_us(sends, kernels) / trace.length_us(sends)


def _bandwidth(world: Any, device: Any) -> float:
    """Return the bandwidth of the product's all-reduce over that of torch's own on the same communicator."""
    import torch

    tensor = torch.ones(_NUM_BYTES // 4, device=device)
    group = world._group
    seconds = []
    for call in (lambda: group.allreduce([tensor]).wait(), lambda: world.all_reduce(tensor)):
        for _ in range(10):
            call()
        torch.cuda.synchronize(device)
        began_s = time.perf_counter()
        for _ in range(100):
            call()
        torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began_s)
        tensor.fill_(1)
    return seconds[0] / seconds[1]


def run(place: Place) -> Verdict:
    """Look at two members."""
    from gpu import gang, training

    found = gang.run_gang(place, 2, member)
    worst = max(training.largest_difference(one, other) for one, other, _, _ in found)
    overlapped, share = (min(each[index] for each in found) for index in (2, 3))
    holds = not worst and (place.is_rehearsal or (overlapped >= _OVERLAP and share >= _BOUND))
    return Verdict(
        holds,
        f"weights differ by {worst:g} (= 0), {overlapped:.0%} of NCCL's time beside kernels (>= {_OVERLAP:.0%}), "
        f"{share:.2f} of the bandwidth of torch's own all-reduce at 25 MB (>= {_BOUND:g})",
    )


if __name__ == "__main__":
    main(run, gpus=2)
