"""What a space of architectures is, a user's own or one that comes along.

A genome is a JSON value. The four methods of `ArchitectureSpace` are all a user has to write; `BuiltInSpace` adds what
the drawings, the cache of evaluated genomes and the methods with a model of their own need.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

if TYPE_CHECKING:
    from torch import nn

Genome = Any
"""A JSON value."""


@runtime_checkable
class ArchitectureSpace(Protocol):
    """Networks to choose from."""

    def sample(self, rng: np.random.Generator) -> Genome:
        """Draw a genome."""

    def mutate(self, genome: Genome, rng: np.random.Generator) -> Genome:
        """A genome that differs in little."""

    def crossover(self, a: Genome, b: Genome, rng: np.random.Generator) -> Genome:
        """A genome that has something of both."""

    def build(self, genome: Genome, input_shape: Sequence[int], num_outputs: int) -> nn.Module:
        """The network: from inputs of shape [batch, *input_shape] to outputs of shape [batch, num_outputs]."""


@dataclass(frozen=True)
class Node:
    """A layer or operation of a drawn network."""

    name: str
    label: str


@dataclass(frozen=True)
class Graph:
    """A network as it is drawn and compared: nodes in an order in which inputs come before what uses them."""

    nodes: tuple[Node, ...]
    edges: tuple[tuple[int, int], ...]
    """From node to node, by index; an edge that is there twice is used twice."""


class BuiltInSpace(ABC):
    """A space of which more is known."""

    @abstractmethod
    def sample(self, rng: np.random.Generator) -> Genome: ...

    @abstractmethod
    def mutate(self, genome: Genome, rng: np.random.Generator) -> Genome: ...

    @abstractmethod
    def crossover(self, a: Genome, b: Genome, rng: np.random.Generator) -> Genome: ...

    @abstractmethod
    def build(self, genome: Genome, input_shape: Sequence[int], num_outputs: int) -> nn.Module: ...

    @abstractmethod
    def graph(self, genome: Genome) -> Graph:
        """The network as it is drawn."""

    def key(self, genome: Genome) -> str:
        """The same for genomes that build the same network up to the order of its nodes, and for no others."""
        return plain_key(genome)

    def text(self, genome: Genome) -> str:
        """The genome as a person reads it."""
        return ", ".join(node.label for node in self.graph(genome).nodes if node.name != "input")


def plain_key(genome: Genome) -> str:
    """A key of the genome as it is written."""
    written = json.dumps(genome, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(written.encode()).hexdigest()[:32]


def key_of(space: ArchitectureSpace, genome: Genome) -> str:
    """The key under which a genome's evaluation is remembered."""
    return space.key(genome) if isinstance(space, BuiltInSpace) else plain_key(genome)
