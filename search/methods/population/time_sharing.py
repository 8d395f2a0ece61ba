"""The turns of a population with more members than processes: the member furthest behind goes first."""

from __future__ import annotations


class Turns:
    """The members without a process, and the number of processes known to be free.

    The total number of processes is unknown. A member that is held, or a trial that ends, frees one; a proposal takes
    one; a request for a proposal that cannot be made shows that one is free.
    """

    def __init__(self) -> None:
        self._held: dict[int, int] = {}
        """Maps a held member to the step from which it continues."""
        self._num_free = 0

    @property
    def held(self) -> tuple[int, ...]:
        """Members that have no process for now."""
        return tuple(self._held)

    def hold(self, member: int, step: int) -> None:
        """Take a member's process away for now."""
        self._held[member] = step
        self._num_free += 1

    def is_before_its_turn(self, step: int) -> bool:
        """Return True if a held member is further behind than this step."""
        return any(held < step for held in self._held.values())

    def started(self) -> None:
        """Record that a new trial has taken a process."""
        self._num_free = max(0, self._num_free - 1)

    def ended(self, member: int) -> None:
        """Record that a trial has ended."""
        if self._held.pop(member, None) is None:
            self._num_free += 1

    def idle(self) -> None:
        """Record that a process has nothing to do."""
        if self._held:
            self._num_free = max(1, self._num_free)

    def due(self) -> list[int]:
        """Release and return the members that continue now, one for each free process."""
        order = sorted(self._held, key=lambda member: (self._held[member], member))[: self._num_free]
        self._num_free -= len(order)
        for member in order:
            del self._held[member]
        return order

    def all(self) -> list[int]:
        """Release and return all held members."""
        everybody = sorted(self._held)
        self._held.clear()
        self._num_free = 0
        return everybody
