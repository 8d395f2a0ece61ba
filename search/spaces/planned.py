"""Spaces whose genomes become plans: what they have in common."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

from orchestray.search.spaces.base import BuiltInSpace, Genome, Graph
from orchestray.search.spaces.canonical import key_of_plan
from orchestray.search.spaces.plan import Plan

if TYPE_CHECKING:
    from torch import nn

_REMEMBERED = 4096


class PlannedSpace(BuiltInSpace):
    """A space of which a genome is first a plan."""

    @abstractmethod
    def plan(self, genome: Genome) -> Plan:
        """The steps of the network.

        Raises:
            ConfigError: the genome is not of this space.
        """

    def build(self, genome: Genome, input_shape: Sequence[int], num_outputs: int) -> nn.Module:
        from orchestray.search.spaces.network import PlannedNetwork

        return PlannedNetwork(self.plan(genome), input_shape, num_outputs)

    def graph(self, genome: Genome) -> Graph:
        return self.plan(genome).graph()

    def key(self, genome: Genome) -> str:
        """The same for genomes whose networks are isomorphic (see `canonical`), and for no others."""
        written = json.dumps(genome, sort_keys=True)
        known: dict[str, str] = self.__dict__.setdefault("_keys", {})
        if written not in known:
            if len(known) >= _REMEMBERED:
                known.clear()
            known[written] = key_of_plan(self.plan(genome))
        return known[written]
