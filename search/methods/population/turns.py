"""Members of a population that outnumber the processes take turns: who is furthest behind goes first."""

from __future__ import annotations


class Turns:
    """Who is held, and how many processes are known to be free.

    How many processes there are is never told; it shows. A member that is held gives one back, a trial that ends too, a
    proposal takes one, and who is asked for a proposal that cannot be made has one to spare.
    """

    def __init__(self) -> None:
        self._held: dict[int, int] = {}
        """The step each goes on from."""
        self._num_free = 0

    @property
    def held(self) -> tuple[int, ...]:
        """Who has no process for the time being."""
        return tuple(self._held)

    def hold(self, member: int, step: int) -> None:
        """Take a member's process away for the time being."""
        self._held[member] = step
        self._num_free += 1

    def is_before_its_turn(self, step: int) -> bool:
        """Whether someone who is held is further behind than this step."""
        return any(held < step for held in self._held.values())

    def started(self) -> None:
        """A process was taken by a new trial."""
        self._num_free = max(0, self._num_free - 1)

    def ended(self, member: int) -> None:
        """A trial ended."""
        if self._held.pop(member, None) is None:
            self._num_free += 1

    def idle(self) -> None:
        """There is a process with nothing to do."""
        if self._held:
            self._num_free = max(1, self._num_free)

    def due(self) -> list[int]:
        """Members that go on now, as many as there are processes for."""
        order = sorted(self._held, key=lambda member: (self._held[member], member))[: self._num_free]
        self._num_free -= len(order)
        for member in order:
            del self._held[member]
        return order

    def all(self) -> list[int]:
        """Everybody who is held, from now on no longer."""
        everybody = sorted(self._held)
        self._held.clear()
        self._num_free = 0
        return everybody
