"""A population of 32 in one batched program is ten times as fast as its members in eight processes on the same GPU.

Eight processes with four members each are what Tune runs with `gpu: 0.125`, without Ray's own cost.
"""

from __future__ import annotations

import time
from typing import Any

from gpu.check import Place, Verdict, main

_BOUND = 10.0
_OPTIMIZER = {"type": "sgd", "lr": 0.05, "momentum": 0.9}
_PROCESSES = 8


def members(device: str, number: int, steps: int, ready: Any, go: Any) -> None:
    """Train members one after the other, once all processes are ready."""
    import torch

    from gpu import training

    training.trained(training.replica_of(training.DIGITS, torch.device(device), steps=3))
    ready.release()
    go.wait()
    for _ in range(number):
        training.trained(_replica(torch.device(device), steps))


def _replica(device: Any, steps: int) -> Any:
    from gpu import training

    return training.replica_of(training.DIGITS, device, batch_size=64, steps=steps, optimizer=_OPTIMIZER)


def run(place: Place) -> Verdict:
    """Time the same steps of the same members, packed and apart."""
    from torch import multiprocessing

    device, population = place.device(), place.sized(32, 4)
    steps = place.sized(300, 3)
    packed_s, loss = packed(device, population, steps)
    if place.is_rehearsal:
        began_s = time.perf_counter()
        for _ in range(population):
            from gpu import training

            training.trained(_replica(device, steps))
        apart_s = time.perf_counter() - began_s
        return Verdict(loss == loss, f"{apart_s / packed_s:.1f} x on one core")
    context: Any = multiprocessing.get_context("spawn")
    ready, go = context.Semaphore(0), context.Event()
    arguments = (str(device), population // _PROCESSES, steps, ready, go)
    started = [context.Process(target=members, args=arguments) for _ in range(_PROCESSES)]
    for each in started:
        each.start()
    for _ in started:
        ready.acquire()
    began_s = time.perf_counter()
    go.set()
    for each in started:
        each.join()
    apart_s = time.perf_counter() - began_s
    if any(each.exitcode for each in started):
        raise RuntimeError("a process of members failed")
    ratio = apart_s / packed_s
    return Verdict(ratio >= _BOUND, f"{ratio:.1f} x (>= {_BOUND:g} x): {packed_s:.2f} s packed, {apart_s:.2f} s apart")


def packed(device: Any, population: int, steps: int) -> tuple[float, float]:
    """Return the seconds of a population in one program, and its mean loss."""
    import torch

    from orchestray.platform.comm.solo import SoloCollective
    from orchestray.search.trials.batched import Batched
    from orchestray.trainers.core.forward import Forward

    replica = _replica(device, 10**6)
    replica.connect(SoloCollective())
    forward = Forward(replica.task, replica.model, "float32", device)
    batched = Batched(forward, population, replica.settings.optimizer)
    hyper = {
        name: torch.full((population,), value, device=device)
        for name, value in (("lr", 0.05), ("momentum", 0.9), ("weight_decay", 0.0))
    }

    def shares() -> Any:
        epoch = 0
        while True:
            yield from replica.stream("train").epoch(epoch)
            epoch += 1

    began_s, losses = time.perf_counter(), torch.zeros(population)
    for step, share in zip(range(1, steps + 4), shares(), strict=False):
        if step == 4:  # the first ones allocate and choose algorithms
            float(losses.mean())
            began_s = time.perf_counter()
        losses = batched.train(share, hyper, step)
    mean = float(losses.mean())
    return time.perf_counter() - began_s, mean


if __name__ == "__main__":
    main(run)
