"""Exchanges in random order on NCCL, 1,000 rounds, and a training by each exchange: nothing hangs, sums are right."""

from __future__ import annotations

import random
from typing import Any

from gpu.check import Place, Verdict, main

_EXCHANGES: tuple[dict[str, Any], ...] = (
    {"exchange": {"type": "gossip", "peers": 1}},
    {"exchange": {"type": "averaging", "every": 2}},
    {"exchange": {"type": "allreduce", "algorithm": "ring"}},
    {"exchange": {"type": "allreduce", "algorithm": "rabenseifner"}},
    {"exchange": {"type": "allreduce"}, "compression": {"type": "topk", "ratio": 0.1}},
)


def member(world: Any, device: Any) -> int:
    """Do the rounds; return the number of wrong results."""
    import torch

    from gpu import training

    rounds = 1000 if device.type == "cuda" else 20
    wrong, drawn, other = 0, random.Random(0), 1 - world.rank
    for number in range(rounds):
        values = drawn.randrange(1, 100_000)
        own = torch.full((values,), float(world.rank + number), device=device)
        kind = drawn.randrange(4)
        if kind == 0:
            got = torch.empty_like(own)
            world.start_exchange({other: own}, {other: got}).wait()
            wrong += bool((got != other + number).any())
        elif kind == 1:
            world.all_reduce(own)
            wrong += bool((own != 1 + 2 * number).any())
        elif kind == 2:
            wrong += bool((world.all_gather(own)[other] != other + number).any())
        else:
            world.broadcast(own, number % 2)
            wrong += bool((own != number % 2 + number).any())
    for index, strategy in enumerate(_EXCHANGES):
        whole = {"network": {"data": 2}, **strategy}
        replica = training.replica_of(training.DIGITS, device, steps=20, strategy=whole)
        wrong += len(training.trained(replica, world.sibling(f"exchange-{index}"))) != 20
    return wrong


def run(place: Place) -> Verdict:
    """Count what two members found wrong; a hang ends by the time limit."""
    from gpu import gang

    wrong = sum(gang.run_gang(place, 2, member))
    rounds = place.sized(1000, 20)
    return Verdict(not wrong, f"{rounds} rounds and {len(_EXCHANGES)} trainings ended, {wrong} wrong results (= 0)")


if __name__ == "__main__":
    main(run, gpus=2)
