"""The graph of a computation: its operations, what each needs of others, and the longest chain through it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from orchestray.trainers.analysis.cost import Cost


@dataclass(frozen=True)
class Operation:
    """One operation on tensors."""

    name: str
    """Its name in torch, such as `mm`."""
    cost: Cost
    needs: tuple[int, ...] = ()
    """Numbers of earlier operations whose results it reads."""
    num_bytes: int = 0
    """Bytes that it reads and writes, each tensor once."""
    layer: str = ""
    """Name of the innermost module in which it happens; empty: in none."""
    is_backward: bool = False


@dataclass(frozen=True)
class OperatorGraph:
    """The operations of a computation in an order in which they can run."""

    operations: Sequence[Operation]
    uncounted: dict[str, int] = field(default_factory=dict)
    """Number of calls of each operation that has no formula: the costs lack it."""

    @property
    def work(self) -> int:
        """Number of scalar operations, W."""
        return sum(operation.cost.work for operation in self.operations)

    @cached_property
    def ends(self) -> list[int]:
        """Depth at the end of each operation: that of the deepest that it needs, and its own."""
        ends: list[int] = []
        for operation in self.operations:
            ends.append(operation.cost.depth + max((ends[number] for number in operation.needs), default=0))
        return ends

    @property
    def depth(self) -> int:
        """Number of scalar operations on the longest chain, D."""
        return max(self.ends, default=0)

    @property
    def parallelism(self) -> float:
        """Average parallelism W / D: more processors than this are never busy all the time."""
        return self.work / max(1, self.depth)

    def critical_path(self) -> list[int]:
        """Return the numbers of the operations on the longest chain, in their order."""
        path: list[int] = []
        latest = max(range(len(self.operations)), key=self.ends.__getitem__, default=None)
        while latest is not None:
            path.append(latest)
            latest = max(self.operations[latest].needs, key=self.ends.__getitem__, default=None)
        return path[::-1]

    def part(self, numbers: Iterable[int]) -> OperatorGraph:
        """Return the graph of some operations alone; what they need of others is taken to be there."""
        chosen = {number: place for place, number in enumerate(sorted(set(numbers)))}
        return OperatorGraph(
            [
                Operation(
                    each.name,
                    each.cost,
                    tuple(chosen[need] for need in each.needs if need in chosen),
                    each.num_bytes,
                    each.layer,
                    each.is_backward,
                )
                for each in map(self.operations.__getitem__, chosen)
            ]
        )
