"""The followers of a server, which have each entry before its effects are visible to workers.

Source: Li et al. 2014, "Scaling Distributed Machine Learning with the Parameter Server", section 4.3 (a change is
acknowledged after the replicas have it).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from orchestray.platform.comm.channel.base import ChannelClosedError

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from orchestray.trainers.ps.protocol.requests import Entry
    from orchestray.trainers.ps.server.state_machine import Machine


class SupersededError(ChannelClosedError):
    """Raised when a follower has become the server instead of this one."""


class Follower(Protocol):
    """A recipient of every entry, before the entry's effects are visible to workers: a backup, or a log on disk."""

    name: str

    def begin(self, machine: Machine) -> None:
        """Start from the machine's present state. Called once, before the first entry."""

    def append(self, entry: Entry, tensors: Sequence[Tensor]) -> Callable[[], None]:
        """Take an entry, and return a function that waits until the follower has it.

        Called in the order of the entries, before they are applied and while the server is locked: the tensors may
        change afterwards. The returned function raises ChannelClosedError if the follower is lost, and
        SupersededError if it is the server now.
        """

    def close(self) -> None:
        """End the follower; no entries come after this."""


class Followers:
    """The present followers of a server. A lost one is dropped."""

    def __init__(
        self, lock: threading.Condition, lost: Callable[[Follower], None], superseded: Callable[[], None]
    ) -> None:
        """
        Args:
            lock: lock of the server.
            lost: called, locked, for each follower that is lost.
            superseded: called, not locked, when a follower has become the server.
        """
        self._lock = lock
        self._lost = lost
        self._superseded = superseded
        self.present: list[Follower] = []
        self.unsafe: dict[Follower, Callable[[], None]] = {}
        """Maps each follower to the wait for its newest entry, which implies the earlier ones."""

    def add(self, follower: Follower, machine: Machine) -> None:
        """Add a follower, which starts from the machine's present state; the server is locked."""
        self.present.append(follower)
        try:
            follower.begin(machine)
        except ChannelClosedError:
            self._drop(follower)

    def tell(self, entry: Entry, tensors: Sequence[Tensor]) -> None:
        """Pass on an entry; the server is locked."""
        for follower in self.present:
            try:
                self.unsafe[follower] = follower.append(entry, tensors)
            except ChannelClosedError:
                self.unsafe[follower] = _raise_lost

    def wait(self, unsafe: Mapping[Follower, Callable[[], None]]) -> None:
        """Wait until every follower has the entries of an earlier `unsafe`; raises SupersededError."""
        for follower, reached in unsafe.items():
            try:
                reached()
            except SupersededError:
                self._superseded()
                raise
            except ChannelClosedError:
                self._drop(follower)

    def close(self) -> None:
        """End all followers."""
        with self._lock:  # a worker that leaves now is not written to a closed log
            present, self.present = self.present, []
        for follower in present:
            follower.close()

    def _drop(self, follower: Follower) -> None:
        with self._lock:
            if follower not in self.present:
                return
            self.present.remove(follower)
            self.unsafe.pop(follower, None)
            self._lost(follower)
        follower.close()


def _raise_lost() -> None:
    raise ChannelClosedError("the follower is lost")
