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
        here: profile of the machine that measures; None: it is one of them.
    """

    machine: MachineProfile
    num_nodes: int = 1
    here: MachineProfile | None = None

    def workers_of_node(self, num_workers: int) -> int:
        """Return the most workers that one machine has of some."""
        return ceil(num_workers / self.num_nodes)

    def slowness(self, threads: int) -> float:
        """Return the time of a computation by `threads` there over its time by `threads_here` here."""
        if self.here is None:
            return 1.0
        return self.here.flops_per_s(self.threads_here(threads)) / self.machine.flops_per_s(threads)

    def threads_here(self, threads: int) -> int:
        """Return the threads of a worker that is measured here: of more than there are cores, each would wait."""
        return threads if self.here is None else min(threads, self.here.cores)

    def at_once(self, num_workers: int, threads: int) -> int:
        """Return how many workers measure at once here.

        As many as a machine has, up to what the cores here carry; or up to twice that, where workers there share cores.
        """
        workers, cores = self.workers_of_node(num_workers), (self.here or self.machine).cores
        carried = (2 if workers * threads > self.machine.cores else 1) * cores
        return max(1, min(workers, carried // self.threads_here(threads)))

    def crowd(self, num_workers: int, threads: int) -> float:
        """Return how much longer the workers of a machine compute than those that have measured at once."""
        there = self.workers_of_node(num_workers) * threads / self.machine.cores
        measured = self.at_once(num_workers, threads) * self.threads_here(threads)
        return max(1.0, there) / max(1.0, measured / (self.here or self.machine).cores)

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
