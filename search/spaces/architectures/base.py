"""The interface of a space of architectures, built-in or user-defined.

A genome is a JSON value. A user only has to write the four methods of `ArchitectureSpace`. `BuiltInSpace` adds what the
drawings, the cache of evaluated genomes and the methods with a model of their own need.
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
    """A set of networks, each described by a genome."""

    def sample(self, rng: np.random.Generator) -> Genome:
        """Draw a genome."""

    def mutate(self, genome: Genome, rng: np.random.Generator) -> Genome:
        """Return a genome that differs slightly."""

    def crossover(self, a: Genome, b: Genome, rng: np.random.Generator) -> Genome:
        """Return a genome that combines parts of both."""

    def build(self, genome: Genome, input_shape: Sequence[int], num_outputs: int) -> nn.Module:
        """Return the network, from inputs [batch, *input_shape] to outputs [batch, num_outputs]."""


@dataclass(frozen=True)
class Node:
    """A layer or operation of a drawn network."""

    name: str
    label: str


@dataclass(frozen=True)
class Graph:
    """A network as it is drawn and compared: nodes in topological order, and edges."""

    nodes: tuple[Node, ...]
    edges: tuple[tuple[int, int], ...]
    """Edges as pairs of node indices; an edge listed twice means that the value is used twice."""


class BuiltInSpace(ABC):
    """A space that can also draw, compare and describe its networks."""

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
        """Return the network as a graph to draw."""

    def key(self, genome: Genome) -> str:
        """Return a key that two genomes share exactly if their networks are the same up to the order of nodes."""
        return plain_key(genome)

    def text(self, genome: Genome) -> str:
        """Return a readable description of the genome."""
        return ", ".join(node.label for node in self.graph(genome).nodes if node.name != "input")


def plain_key(genome: Genome) -> str:
    """Return a hash of the genome as it is written."""
    written = json.dumps(genome, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(written.encode()).hexdigest()[:32]


def key_of(space: ArchitectureSpace, genome: Genome) -> str:
    """Return the key under which the evaluation of a genome is cached."""
    return space.key(genome) if isinstance(space, BuiltInSpace) else plain_key(genome)
