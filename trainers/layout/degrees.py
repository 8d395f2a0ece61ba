"""Mapping from degrees to ranks and groups: arithmetic on a frozen value, done before a process starts.

Ranks count the tensor axis fastest, then the pipeline's, then the data axis. So the workers that communicate most
(tensor parallelism, several times per layer) are neighbours and share a node first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Axis = Literal["data", "pipeline", "tensor"]
AXES: tuple[Axis, ...] = ("data", "pipeline", "tensor")
"""Axes from the slowest to the fastest in the order of ranks."""


@dataclass(frozen=True)
class Coordinate:
    """The index of a worker on each axis."""

    data: int
    pipeline: int
    tensor: int


@dataclass(frozen=True)
class Layout:
    """The number of workers along each axis."""

    data: int = 1
    tensor: int = 1
    pipeline: int = 1

    def __post_init__(self) -> None:
        for axis in AXES:
            if getattr(self, axis) < 1:
                raise ValueError(f"the degree of {axis} must be >= 1, got {getattr(self, axis)}")

    @property
    def size(self) -> int:
        """Number of workers."""
        return self.data * self.tensor * self.pipeline

    @property
    def model_size(self) -> int:
        """Number of workers that hold one copy of the model together."""
        return self.tensor * self.pipeline

    def coordinate(self, rank: int) -> Coordinate:
        if not 0 <= rank < self.size:
            raise ValueError(f"there are ranks 0 to {self.size - 1}, got {rank}")
        rest, tensor = divmod(rank, self.tensor)
        data, pipeline = divmod(rest, self.pipeline)
        return Coordinate(data, pipeline, tensor)

    def rank(self, data: int, pipeline: int, tensor: int) -> int:
        return (data * self.pipeline + pipeline) * self.tensor + tensor

    def group(self, rank: int, axis: Axis) -> list[int]:
        """Return the ranks that differ from `rank` only along `axis`, `rank` included, in the order of that axis."""
        at = vars(self.coordinate(rank))
        return [self.rank(**{**at, axis: index}) for index in range(getattr(self, axis))]

    def model_group(self, rank: int) -> list[int]:
        """Return the ranks of one copy of the model: those with the data index of `rank`."""
        first = self.coordinate(rank).data * self.model_size
        return list(range(first, first + self.model_size))
