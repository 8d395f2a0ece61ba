"""A data centre's server under Approximate Synchronous Parallel, without clock or network.

Each data centre has a copy of all parameters, which its workers read and change. A change crosses to the others once it
is significant. Two rules bound how old the others' significant changes may be (Hsieh et al. 2017, Gaia, sections 3.2
and 4.2):

- selective barrier: a link that cannot keep up carries the places of the changes ahead of the changes. Until these
  arrive, workers there do not read the parameters at these places; they go on with others.
- mirror clock: each data centre sends the others the number of clocks it has completed. Its workers do not read while
  they are `most_ahead` clocks ahead of the slowest data centre.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, inf
from typing import Literal

import torch
from torch import Tensor

from orchestray.platform.sim.network import Link
from orchestray.trainers.ps.variants.hierarchy.significance_filter import Residual
from orchestray.trainers.survey.data_centres.outbox import Barrier, Message, MirrorClock, Outbox


@dataclass(frozen=True)
class Rules:
    """The rules between data centres.

    Args:
        significance: least change of a parameter that crosses, as a fraction of its value; 0: every change.
        falls: True to divide the fraction by the root of the number of the clock, as the proof of convergence does.
        announces: True for selective barriers.
        most_ahead: clocks that a data centre may be ahead of the slowest; infinity: any number.
        reads_everything: True if workers wait for all announced changes, whatever they read.
    """

    significance: float
    falls: bool = True
    announces: bool = True
    most_ahead: float = inf
    reads_everything: bool = False


FULL_SYNCHRONISATION = Rules(significance=0.0, most_ahead=1, reads_everything=True)
"""Bulk synchronous: each clock begins with every change that was made in the clocks before it, anywhere."""


def most_ahead(link: Link, clock_s: float) -> int:
    """Return the clocks that pass during a round trip over a link, rounded up.

    A clock arrives half a round trip late, so that with fewer a data centre could wait for others that are not behind.

    Args:
        link: slowest link between two data centres.
        clock_s: duration of a clock in seconds.
    """
    return max(1, ceil(2 * link.latency_s / clock_s))


class DataCentre:
    """The server of a data centre.

    Attributes:
        values: this data centre's parameters, `[elements]`.
        residual: the changes made here that are not significant yet.
        clocks: completed clocks of each data centre, as far as is known here.
    """

    def __init__(
        self, number: int, values: Tensor, rules: Rules, outboxes: Mapping[int, Outbox], num_workers: int
    ) -> None:
        """
        Args:
            number: number of this data centre.
            values: parameters at the start; they belong to the server from now on.
            rules: rules.
            outboxes: messages to each other data centre, by its number.
            num_workers: number of workers here.
        """
        self.number, self.values, self.rules = number, values, rules
        self.residual = Residual(values, rules.significance, falls=rules.falls)
        self.clocks = dict.fromkeys((number, *outboxes), 0)
        self._outboxes = outboxes
        self._worker_clocks = [0] * num_workers
        self._announced = {sender: torch.zeros_like(values, dtype=torch.bool) for sender in outboxes}

    @property
    def clock(self) -> int:
        """Number of clocks that all workers here have completed."""
        return self.clocks[self.number]

    def blocked_by(self, worker: int, places: Tensor) -> Literal["clock", "barrier"] | None:
        """Return the rule for which a worker has to wait before it reads; None: it may read.

        Args:
            worker: number of the worker in this data centre.
            places: indices of the parameters that it reads, int64.
        """
        if self._worker_clocks[worker] - min(self.clocks.values()) >= self.rules.most_ahead:
            return "clock"
        for announced in self._announced.values():
            if bool((announced if self.rules.reads_everything else announced[places]).any()):
                return "barrier"
        return None

    def update(self, worker: int, places: Tensor, change: Tensor) -> None:
        """Make a worker's change, with which it completes a clock, and send what is significant.

        Args:
            worker: number of the worker in this data centre.
            places: indices of the changed parameters, int64, ascending.
            change: change at each place.
        """
        self.values.index_add_(0, places, change)
        self.residual.add(torch.zeros_like(self.values).index_add_(0, places, change))
        self._worker_clocks[worker] += 1
        before, self.clocks[self.number] = self.clock, min(self._worker_clocks)
        significant, amount = self.residual.take(self.values, num_updates=self.clock)
        for outbox in self._outboxes.values():
            if len(significant):
                outbox.send_changes(significant, amount)
            if self.clock > before:
                outbox.send_clock(self.clock)

    def receive(self, sender: int, message: Message) -> None:
        """Process a message of another data centre."""
        if isinstance(message, MirrorClock):
            self.clocks[sender] = message.clock
        elif isinstance(message, Barrier):
            self._announced[sender][message.places] = True
        else:
            self.values.index_add_(0, message.places, message.change)
            self._announced[sender][message.places] = False
