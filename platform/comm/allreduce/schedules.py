"""Schedules of all-reduces: the sender, receiver and content of every message, as plain tuples; nothing is sent here.

A schedule is a list of one rank's `Step`s in the order of their rounds. In a step the rank sends a range of its
elements to one rank and receives a range from one rank, at the same time. Received elements are added to its own or
replace them. A range may be empty: its round is counted, and nothing goes over the wire.

Ben-Nun and Hoefler, "Demystifying Parallel and Distributed Deep Learning" (2019), section 2.5, name the four. L is the
latency of a message, G the time of a byte, n the bytes of the tensor, P the ranks:

    tree          2 log2 P (L + n G)
    butterfly     log2 P (L + n G)
    ring          2 (P - 1) (L + n/P G)
    rabenseifner  2 log2 P L + 2 n G (P - 1)/P

Any P is allowed. The tree's logarithm is rounded up. Butterfly and Rabenseifner are made for Q = 2^k ranks. If there
are more, the first 2 (P - Q) are folded: every even one of them sends all its elements to its right neighbour before,
and receives the sum from it after; see Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication
Operations in MPICH" (2005), section 4.4. That adds two rounds of n bytes each, 2 (L + n G), to the cost of Q ranks.

Every rank ends with the same bits. In tree, ring and Rabenseifner each element is summed in one place and copied. In
the butterfly both ranks of a pair sum the same two numbers, and a + b is b + a. Folded ranks receive copies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple, get_args

Algorithm = Literal["tree", "butterfly", "ring", "rabenseifner"]
ALGORITHMS: tuple[Algorithm, ...] = get_args(Algorithm)


class Part(NamedTuple):
    """The elements `start` to `stop` of the tensor, sent to or received from the rank `peer`."""

    peer: int
    start: int
    stop: int

    @property
    def num_elements(self) -> int:
        return self.stop - self.start


class Step(NamedTuple):
    """The messages of one rank in one round."""

    round: int
    send: Part | None
    receive: Part | None
    combine: Literal["add", "copy"] = "copy"
    """Operation on the received elements."""


def schedule(algorithm: str, rank: int, size: int, num_elements: int) -> list[Step]:
    """Return the steps of one rank.

    Args:
        algorithm: one of `ALGORITHMS`, or "star", in which rank 0 is a server of all others.
        rank: rank to return the steps of.
        size: number of ranks, P.
        num_elements: elements of the summed tensor; may be fewer than ranks, or 0.

    Raises:
        ValueError: unknown algorithm, or invalid rank.
    """
    if algorithm not in _SCHEDULES:
        raise ValueError(f"There is no all-reduce {algorithm!r}; there are {', '.join(_SCHEDULES)}.")
    if not 0 <= rank < size or num_elements < 0:
        raise ValueError(f"Rank {rank} of {size}, {num_elements} elements: no rank can have that.")
    return list(_SCHEDULES[algorithm](rank, size, num_elements))


def num_rounds(algorithm: str, size: int) -> int:
    """Return the rounds of the longest rank: 2 log2 P, log2 P, 2 (P - 1) and 2 log2 P if P is a power of two."""
    levels, folded = num_levels(size), 2 * (not is_power_of_two(size))
    rounds = {
        "tree": 2 * (size - 1).bit_length(),
        "butterfly": levels + folded,
        "ring": 2 * (size - 1),
        "rabenseifner": 2 * levels + folded,
        "star": 2 * (size - 1),
    }
    return rounds[algorithm]


def sent_elements(algorithm: str, size: int, num_elements: int) -> list[int]:
    """Return the number of elements that each rank sends in the whole all-reduce, in rank order."""
    return [
        sum(step.send.num_elements for step in schedule(algorithm, rank, size, num_elements) if step.send is not None)
        for rank in range(size)
    ]


def num_levels(size: int) -> int:
    """Return log2 of the largest power of two that is not above `size`."""
    return size.bit_length() - 1


def is_power_of_two(size: int) -> bool:
    return size & (size - 1) == 0


def boundary(segment: int, num_segments: int, num_elements: int) -> int:
    """Return the start of a segment if the elements are cut into segments that differ by one element at most."""
    return segment * num_elements // num_segments


def _tree(rank: int, size: int, num_elements: int) -> Iterator[Step]:
    """Yield the steps of a binomial tree with rank 0 at its root: sums go up, the result comes down the same way."""
    height = (size - 1).bit_length()
    for level in range(height):
        if rank % (2 << level):
            yield Step(level, Part(rank - (1 << level), 0, num_elements), None)
            break
        if rank + (1 << level) < size:
            yield Step(level, None, Part(rank + (1 << level), 0, num_elements), "add")
    for level in reversed(range(height)):
        number = 2 * height - 1 - level
        if rank % (2 << level) == 1 << level:
            yield Step(number, None, Part(rank - (1 << level), 0, num_elements))
        elif not rank % (2 << level) and rank + (1 << level) < size:
            yield Step(number, Part(rank + (1 << level), 0, num_elements), None)


def _butterfly(rank: int, size: int, num_elements: int) -> Iterator[Step]:
    """Yield the steps of recursive doubling: pairs of ranks exchange all elements, at twice the distance each round."""
    return _folded(_doubling, num_levels(size), rank, size, num_elements)


def _doubling(rank: int, size: int, num_elements: int) -> Iterator[Step]:
    for level in range(num_levels(size)):
        whole = Part(rank ^ (1 << level), 0, num_elements)
        yield Step(level, whole, whole, "add")


def _rabenseifner(rank: int, size: int, num_elements: int) -> Iterator[Step]:
    """Yield the steps of recursive halving, which sums one part per rank, and doubling, which collects the parts.

    Rabenseifner, "Optimization of Collective Reduction Operations" (2004), section 4. The distance grows while the
    messages shrink, so the nearest ranks exchange the most.
    """
    return _folded(_halving, 2 * num_levels(size), rank, size, num_elements)


def _halving(rank: int, size: int, num_elements: int) -> Iterator[Step]:
    levels = num_levels(size)

    def part(peer: int, whose: int, level: int) -> Part:
        """Return the part that rank `whose` still sums after `level` levels; `peer` is the other rank."""
        low, width = 0, size
        for passed in range(level):
            width //= 2
            low += width * (whose >> passed & 1)
        return Part(peer, boundary(low, size, num_elements), boundary(low + width, size, num_elements))

    for level in range(levels):
        peer = rank ^ (1 << level)
        yield Step(level, part(peer, peer, level + 1), part(peer, rank, level + 1), "add")
    for level in reversed(range(levels)):
        peer = rank ^ (1 << level)
        yield Step(2 * levels - 1 - level, part(peer, rank, level + 1), part(peer, peer, level + 1))


def _folded(core: Maker, core_rounds: int, rank: int, size: int, num_elements: int) -> Iterator[Step]:
    """Yield the steps of `core` among a power of two of ranks; further ranks are folded in before and out after."""
    num_places = 1 << num_levels(size)
    num_folded = size - num_places
    if not num_folded:
        yield from core(rank, size, num_elements)
        return
    is_of_pair, last = rank < 2 * num_folded, core_rounds + 1
    if is_of_pair and rank % 2 == 0:
        right = Part(rank + 1, 0, num_elements)
        yield Step(0, right, None)
        yield Step(last, None, right)
        return

    def with_rank(part: Part | None) -> Part | None:
        """Replace the peer's place by its rank: first the odd ranks of the pairs, then those in no pair."""
        if part is None:
            return None
        return part._replace(peer=2 * part.peer + 1 if part.peer < num_folded else part.peer + num_folded)

    left = Part(rank - 1, 0, num_elements)
    if is_of_pair:
        yield Step(0, None, left, "add")
    for step in core(rank // 2 if is_of_pair else rank - num_folded, num_places, num_elements):
        yield Step(step.round + 1, with_rank(step.send), with_rank(step.receive), step.combine)
    if is_of_pair:
        yield Step(last, left, None)


def _ring(rank: int, size: int, num_elements: int) -> Iterator[Step]:
    """Yield the steps of a pipeline of P segments: P - 1 rounds sum each on its way around, P - 1 copy the sums.

    Patarasuk and Yuan, "Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations" (2009), section 3.
    """
    following, previous = (rank + 1) % size, (rank - 1) % size

    def segment(peer: int, index: int) -> Part:
        index %= size
        return Part(peer, boundary(index, size, num_elements), boundary(index + 1, size, num_elements))

    for turn in range(size - 1):
        yield Step(turn, segment(following, rank - turn), segment(previous, rank - turn - 1), "add")
    for turn in range(size - 1):
        number = size - 1 + turn
        yield Step(number, segment(following, rank + 1 - turn), segment(previous, rank - turn))


def _star(rank: int, size: int, num_elements: int) -> Iterator[Step]:
    """Yield the steps with rank 0 as a parameter server: it receives from one rank after another, then answers each."""
    for other in range(1, size):
        if rank == 0:
            yield Step(other - 1, None, Part(other, 0, num_elements), "add")
        elif rank == other:
            yield Step(other - 1, Part(0, 0, num_elements), None)
    for other in range(1, size):
        if rank == 0:
            yield Step(size - 2 + other, Part(other, 0, num_elements), None)
        elif rank == other:
            yield Step(size - 2 + other, None, Part(0, 0, num_elements))


Maker = Callable[[int, int, int], Iterator[Step]]
_SCHEDULES: Mapping[str, Maker] = MappingProxyType(
    {"tree": _tree, "butterfly": _butterfly, "ring": _ring, "rabenseifner": _rabenseifner, "star": _star}
)
