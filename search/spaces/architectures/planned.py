"""The common part of spaces whose genomes become plans."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

from orchestray.search.spaces.architectures.base import BuiltInSpace, Genome, Graph
from orchestray.search.spaces.architectures.canonical import key_of_plan
from orchestray.search.spaces.architectures.plan import Plan

if TYPE_CHECKING:
    from torch import nn

_REMEMBERED = 4096


class PlannedSpace(BuiltInSpace):
    """A space that converts a genome to a plan first."""

    @abstractmethod
    def plan(self, genome: Genome) -> Plan:
        """Return the plan of the network.

        Raises:
            ConfigError: the genome does not belong to this space.
        """

    def build(self, genome: Genome, input_shape: Sequence[int], num_outputs: int) -> nn.Module:
        from orchestray.search.spaces.architectures.network import PlannedNetwork

        return PlannedNetwork(self.plan(genome), input_shape, num_outputs)

    def graph(self, genome: Genome) -> Graph:
        return self.plan(genome).graph()

    def key(self, genome: Genome) -> str:
        """Return a key that two genomes share exactly if their networks are isomorphic."""
        written = json.dumps(genome, sort_keys=True)
        known: dict[str, str] = self.__dict__.setdefault("_keys", {})
        if written not in known:
            if len(known) >= _REMEMBERED:
                known.clear()
            known[written] = key_of_plan(self.plan(genome))
        return known[written]
