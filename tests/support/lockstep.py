"""Exchanges in lock step with gradients given by hand, replicas as threads over real connections."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from orchestray.platform.comm.collective import Collective
from support.threads import run_replicas

SHAPES = ((13, 7), (5,), (3, 4, 5), (40, 11), ())


class Holder(nn.Module):
    """A model with parameters of the given shapes, float64."""

    def __init__(self, shapes: Sequence[tuple[int, ...]] = SHAPES) -> None:
        super().__init__()
        for number, shape in enumerate(shapes):
            self.register_parameter(f"p{number}", nn.Parameter(torch.zeros(shape, dtype=torch.float64)))


@dataclass
class Exchanged:
    """Gradients and state of one replica."""

    gradients: list[list[Tensor | None]]
    """Gradients for the optimizer at each step."""
    kept: dict[str, list[Tensor | None]]
    """Tensors that the scheme keeps after the last step."""
    bytes_sent: list[int]
    """Bytes sent at each step."""
    bytes_dense: int
    exchange: Any


def gradient(rank: int, step: int, shapes: Sequence[tuple[int, ...]] = SHAPES) -> list[Tensor]:
    """Return the gradients of a replica at a step: random, of very different sizes."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return [
        torch.randn(shape, dtype=torch.float64, generator=generator) * 10.0 ** (number - 2)
        for number, shape in enumerate(shapes)
    ]


def exchange_by_hand(
    make: Callable[[], Any],
    size: int,
    num_steps: int,
    *,
    gradients: Callable[[int, int], Sequence[Tensor | None]] = gradient,
    model: Callable[[], nn.Module] = Holder,
) -> list[Exchanged]:
    """Run steps with given gradients, and return what each replica saw, by rank."""

    def run(collective: Collective) -> Exchanged:
        own, exchange = model(), make()
        exchange.attach(own, collective)
        seen: list[list[Tensor | None]] = []
        sent = []
        for step in range(1, num_steps + 1):
            exchange.before_step(step)
            before = collective.own_bytes_sent
            for parameter, value in zip(own.parameters(), gradients(collective.rank, step), strict=True):
                parameter.grad = None if value is None else value.clone()
            exchange.fraction = 1 / size
            assert exchange.finish([1.5, float(collective.rank)]) == [1.5 * size, size * (size - 1) / 2]
            seen.append([None if g is None else g.clone() for g in exchange.gradients()])
            sent.append(collective.own_bytes_sent - before)
        kept = {kind: [None if t is None else t.clone() for t in row] for kind, row in exchange.kept().items()}
        return Exchanged(seen, kept, sent, sum(sent) + exchange.bytes_saved, exchange)

    return run_replicas(size, run)


def same_everywhere(seen: Sequence[Exchanged]) -> bool:
    """Return True if all replicas' optimizers got the same bits at every step."""
    return all(
        (a is None and b is None) or (a is not None and b is not None and torch.equal(a, b))
        for other in seen[1:]
        for mine, theirs in zip(seen[0].gradients, other.gradients, strict=True)
        for a, b in zip(mine, theirs, strict=True)
    )


def owed(seen: Sequence[Exchanged], number: int) -> Tensor:
    """Return what all replicas together still owe of a parameter."""
    rows = [row[number] for replica in seen for kind, row in replica.kept.items() if kind.endswith("residual")]
    found = [tensor for tensor in rows if tensor is not None]
    return torch.stack(found).sum(0) if found else torch.zeros((), dtype=torch.float64)
