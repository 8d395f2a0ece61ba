"""The cost of an operation: its work and its depth (survey, section 2.3: the work-depth model)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Cost:
    """The scalar operations of an operation on tensors, and the longest chain of them that depend on each other.

    A processor does one of them at a time. A sum of n values is a tree: n - 1 additions, in ceil(log2 n) levels.
    """

    multiplications: int = 0
    """Multiplications and divisions."""
    additions: int = 0
    """Additions and subtractions."""
    others: int = 0
    """Comparisons, and evaluations of functions such as exp, each counted as one."""
    depth: int = 0
    """Operations on the longest chain."""

    @property
    def work(self) -> int:
        """Number of all operations."""
        return self.multiplications + self.additions + self.others

    def __add__(self, after: Cost) -> Cost:
        """Return the cost of both, one after the other."""
        return Cost(
            self.multiplications + after.multiplications,
            self.additions + after.additions,
            self.others + after.others,
            self.depth + after.depth,
        )

    def beside(self, other: Cost) -> Cost:
        """Return the cost of both, at the same time."""
        both = self + other
        return Cost(both.multiplications, both.additions, both.others, max(self.depth, other.depth))

    def __mul__(self, count: int) -> Cost:
        """Return the cost of `count` of it, at the same time."""
        return Cost(count * self.multiplications, count * self.additions, count * self.others, self.depth)


NOTHING = Cost()


def levels(count: int) -> int:
    """Return the depth of a tree over `count` values: ceil(log2 count)."""
    return (count - 1).bit_length() if count > 1 else 0


def total(values: int, groups: int = 1) -> Cost:
    """Return the cost of sums of `values` values in all, of `groups` groups of equal size."""
    return Cost(additions=max(0, values - groups), depth=levels(values // max(1, groups)))


def product(rows: int, inner: int, columns: int) -> Cost:
    """Return the cost of a product of matrices [rows, inner] and [inner, columns]."""
    outputs = rows * columns
    return Cost(multiplications=outputs * inner, depth=1) + total(outputs * inner, outputs)
