"""Operations that have been started and are waited for later."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Pending(Protocol):
    """A pending operation."""

    def wait(self) -> None:
        """Return when the result is there; raise `PeerLostError` if it will never be."""


class AllPending:
    """Several pending operations."""

    def __init__(self, works: Sequence[Pending]) -> None:
        self._works = works

    def wait(self) -> None:
        """Wait for each."""
        for work in self._works:
            work.wait()


class Done:
    """A pending operation with nothing to do."""

    def wait(self) -> None:
        """Return at once."""


DONE = Done()
