"""Machines of one kind, and the times of messages and operations among workers on them."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

from orchestray.trainers.machine.transfers import ring_s

if TYPE_CHECKING:
    from orchestray.platform.comm.allreduce.costs import AlphaBeta
    from orchestray.trainers.machine.profile import MachineProfile
    from orchestray.trainers.machine.transfers import Kind


@dataclass(frozen=True)
class Cluster:
    """Machines of one kind.

    Args:
        machine: profile of each machine.
        num_nodes: number of machines.
        slowness: time of a computation there over its time here; 1 for this machine.
    """

    machine: MachineProfile
    num_nodes: int = 1
    slowness: float = 1.0

    def workers_of_node(self, num_workers: int) -> int:
        """Return the most workers that one machine has of some."""
        return ceil(num_workers / self.num_nodes)

    def time_of(self, kind: str, size: int, num_bytes: float, *, num_workers: int) -> float:
        """Return the seconds of an operation of a group among `num_workers` workers.

        A group that one machine can hold is on one: tensor and pipeline groups are neighbours. Of a larger one every
        message may take the link between machines, which is the slowest, and so decides.
        """
        known: Kind = kind  # type: ignore[assignment]
        if size <= self.workers_of_node(num_workers):
            return self.machine.seconds(known, size, num_bytes)
        return ring_s(known, size, num_bytes, self._between)

    def message_s(self, num_bytes: float, *, num_workers: int, size: int) -> float:
        """Return the seconds of a message from one worker of a group to another, or to a server."""
        if size <= self.workers_of_node(num_workers):
            return self.machine.channels["shared_memory"].seconds(num_bytes)
        return self._between.time_s(num_bytes)

    @property
    def _between(self) -> AlphaBeta:
        return self.machine.links.inter_node
