"""One fully connected layer on several workers: what each partition sends, computes, and has to hold."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from orchestray.platform.comm.collective import Collective
from orchestray.platform.comm.pending import Pending
from orchestray.platform.comm.thread_group import run_members
from orchestray.trainers.survey.lab.exhibit import Exhibit
from orchestray.trainers.survey.lab.timing import seeded
from orchestray.trainers.survey.matmul import all_to_all_layer, cannon, redundant_layer

WORKERS = (4, 9)
_SAMPLES, _WIDTH = 72, 72


@dataclass(frozen=True)
class _Part:
    """The work of one worker.

    Args:
        difference: largest difference of its outputs from those of one worker.
        held_words: numbers of inputs and weights that it held at once.
        products: multiplications.
        messages: messages that it sent.
        bytes_sent: bytes of them.
    """

    difference: float
    held_words: int
    products: int
    messages: int
    bytes_sent: int


class _Counted:
    """A group as the partitions use it, which counts the messages of this worker."""

    def __init__(self, group: Collective) -> None:
        self._group = group
        self.size, self.rank = group.size, group.rank
        self.messages = 0

    def start_exchange(self, send: Mapping[int, Tensor], receive: Mapping[int, Tensor]) -> Pending:
        self.messages += len(send)
        return self._group.start_exchange(send, receive)


def partitions(rounds: int = 0, workers: Sequence[int] = WORKERS) -> Exhibit:
    """Compare partitions of the product of a batch and a weight matrix, over real connections.

    Args:
        rounds: unused: nothing is timed.
        workers: numbers of workers, which are squares, as Cannon's torus has to be.
    """
    del rounds
    x, weight = seeded(_SAMPLES, _WIDTH), seeded(_WIDTH, _WIDTH, seed=1)
    y = x @ weight.T
    rows: list[list[Any]] = []
    for size in workers:
        for name, part in _PARTITIONS.items():
            parts = run_members(size, partial(_measured, part, x, weight, y))
            rows.append(
                [
                    name,
                    size,
                    sum(each.messages for each in parts),
                    max(each.bytes_sent for each in parts),
                    sum(each.products for each in parts) / (x.shape[0] * weight.numel()),
                    max(each.held_words for each in parts),
                    max(each.difference for each in parts),
                ]
            )
    found = {(row[0], row[1]): row for row in rows}
    findings = []
    for size in workers:
        plain, twice, torus, gathered = (found[name, size] for name in _PARTITIONS)
        findings.append(
            f"{size} workers: neurons on two workers take {twice[2]} messages for {plain[2]}, and {twice[4]:.2g} times "
            f"the products; Cannon's workers hold {torus[5] / gathered[5]:.0%} of what gathered rows and columns take."
        )
    columns = ["partition", "workers", "messages", "bytes a worker", "products", "numbers held", "difference"]
    return Exhibit("partitions", "A fully connected layer on several workers", columns, rows, findings)


def _measured(part: _Partition, x: Tensor, weight: Tensor, y: Tensor, group: Collective) -> _Part:
    counted = _Counted(group)
    out, wanted, held, products = part(x, weight, y, cast("Collective", counted))
    return _Part(float((out - wanted).abs().max()), held, products, counted.messages, group.bytes_sent)


_Partition = Callable[[Tensor, Tensor, Tensor, Collective], tuple[Tensor, Tensor, int, int]]
"""Returns a worker's outputs, the right ones, the numbers that it held, and its products."""


def _once(x: Tensor, weight: Tensor, y: Tensor, group: Collective) -> tuple[Tensor, Tensor, int, int]:
    own = weight.chunk(group.size)[group.rank]
    out = all_to_all_layer(own, x.chunk(group.size, 1)[group.rank], group)
    return out, y.chunk(group.size, 1)[group.rank], x.numel() + own.numel(), len(x) * own.numel()


def _twice(x: Tensor, weight: Tensor, y: Tensor, group: Collective) -> tuple[Tensor, Tensor, int, int]:
    blocks = group.rank, (group.rank + 1) % group.size
    own = torch.cat([weight.chunk(group.size)[block] for block in blocks])
    inputs, wanted = (torch.cat([whole.chunk(group.size, 1)[block] for block in blocks], 1) for whole in (x, y))
    return redundant_layer(own, inputs, group), wanted, x.numel() + own.numel(), len(x) * own.numel()


def _on_torus(x: Tensor, weight: Tensor, y: Tensor, group: Collective) -> tuple[Tensor, Tensor, int, int]:
    a, b, wanted, side = _blocks(x, weight, y, group)
    held = 2 * (a.numel() + b.numel())  # those that are multiplied, and those that arrive
    return cannon(a, b, group), wanted, held, side * a.numel() * b.shape[1]


def _gathered(x: Tensor, weight: Tensor, y: Tensor, group: Collective) -> tuple[Tensor, Tensor, int, int]:
    a, b, wanted, side = _blocks(x, weight, y, group)
    row, column = divmod(group.rank, side)
    of_row = {row * side + index for index in range(side)} - {group.rank}
    of_column = {index * side + column for index in range(side)} - {group.rank}
    lefts, ups = ({peer: torch.empty_like(own) for peer in peers} for own, peers in ((a, of_row), (b, of_column)))
    group.start_exchange(dict.fromkeys(of_row, a), lefts).wait()
    group.start_exchange(dict.fromkeys(of_column, b), ups).wait()
    left = torch.cat([part for _, part in sorted((lefts | {group.rank: a}).items())], 1)
    up = torch.cat([part for _, part in sorted((ups | {group.rank: b}).items())])
    return left @ up, wanted, left.numel() + up.numel(), left.numel() * up.shape[1]


def _blocks(x: Tensor, weight: Tensor, y: Tensor, group: Collective) -> tuple[Tensor, Tensor, Tensor, int]:
    """Return a worker's block of the inputs, of the transposed weights and of the outputs, and the grid's side."""
    side = math.isqrt(group.size)
    row, column = divmod(group.rank, side)
    a, b, wanted = (whole.chunk(side)[row].chunk(side, 1)[column].contiguous() for whole in (x, weight.T, y))
    return a, b, wanted, side


_PARTITIONS: Mapping[str, _Partition] = {
    "each neuron on one worker": _once,
    "each neuron on two workers": _twice,
    "Cannon's torus": _on_torus,
    "rows and columns gathered": _gathered,
}
