"""The parameters of evolutions."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from orchestray.platform.config.base import AboveZero, AtLeastZero, Count, Flag, Number, Positive, ZeroToOne
from orchestray.search.methods.params import MethodSection

Share = Annotated[Number, Field(gt=0, le=1)]


class RegularizedEvolution(MethodSection):
    """Tournaments in which the oldest dies (Real et al., 2019)."""

    counts = ("population",)

    type: Literal["regularized_evolution"]
    """The method `regularized_evolution`."""
    population: Positive = 20
    """Individuals alive at a time (P of the paper)."""
    sample_size: Positive = 5
    """Individuals drawn for a tournament (S of the paper)."""
    aging: Flag = True
    """The oldest dies; false: the worst of a tournament does."""
    reuse_scores: Flag = True
    """A network that was evaluated before keeps its score; false: it is evaluated again (for noisy scores)."""
    crossover_probability: ZeroToOne = 0.0
    """Probability that a child has two parents before it is mutated (0 in the paper)."""


class LargeScaleEvolution(MethodSection):
    """Mutations of whole networks, in pairwise tournaments (Real et al., 2017)."""

    counts = ("population",)

    type: Literal["large_scale_evolution"]
    """The method `large_scale_evolution`."""
    population: Annotated[int, Field(ge=2, strict=True)] = 20
    """Individuals alive at a time, once the population has grown from the first one."""
    inherit_weights: Flag = True
    """A child starts from its parent's weights, as far as names and shapes agree."""
    identity_probability: ZeroToOne = 0.08
    """Probability that a child is its parent, trained further."""
    reset_probability: ZeroToOne = 0.08
    """Probability that a child is its parent with fresh weights."""


class GeneticCnn(MethodSection):
    """Connections between layers as a string of bits (Xie and Yuille, 2017)."""

    counts = ("population",)

    type: Literal["genetic_cnn"]
    """The method `genetic_cnn`."""
    population: Positive = 20
    """Strings of a generation."""
    mutation_probability: ZeroToOne = 0.8
    """Probability that a string that was not crossed is mutated (p_M)."""
    bit_flip_probability: ZeroToOne = 0.05
    """Probability that a bit of a mutated string is flipped (q_M)."""
    crossover_probability: ZeroToOne = 0.2
    """Probability that two strings are crossed (p_C)."""
    stage_swap_probability: ZeroToOne = 0.2
    """Probability that a stage of crossed strings is exchanged (q_C)."""


class HierarchicalEvolution(MethodSection):
    """Motifs of motifs (Liu et al., 2018)."""

    counts = ("population",)

    type: Literal["hierarchical_evolution"]
    """The method `hierarchical_evolution`."""
    population: Positive = 20
    """Genotypes drawn before the first tournament."""
    tournament_fraction: Share = 0.05
    """Part of the population that takes part in a tournament; at least 2 individuals do."""
    initial_mutations: Count = 100
    """Mutations applied to each of the first genotypes (1000 in the paper)."""


class CoDeepNeat(MethodSection):
    """Blueprints and modules evolved side by side (Miikkulainen et al., 2017)."""

    searches = "architecture"
    counts = ("population", "networks")

    type: Literal["codeepneat"]
    """The method `codeepneat`."""
    population: Positive = 10
    """Blueprints of a generation."""
    modules: Positive = 15
    """Modules of a generation."""
    networks: Positive = 20
    """Networks assembled and evaluated in a generation."""
    species: Positive = 3
    """Largest number of species of blueprints; of modules it is `num_modules` of the space."""
    compatibility: AboveZero = 0.5
    """Largest distance of graphs of one species at first: the part of nodes and connections that only one has, plus
    that of choices that differ in nodes that both have. It rises while species are as many as may be, else it falls."""
    elite: Share = 0.4
    """Part of each species that has offspring; its best member survives unchanged."""
    crossover_probability: ZeroToOne = 0.2
    """Probability that an offspring has two parents."""


class Neat(MethodSection):
    """Networks that grow node by node, with species (Stanley and Miikkulainen, 2002)."""

    searches = "architecture"
    counts = ("population",)

    type: Literal["neat"]
    """The method `neat`."""
    population: Positive = 150
    """Networks of a generation."""
    compatibility: AboveZero = 3.0
    """Largest distance between genomes of one species."""
    disjoint_weight: AtLeastZero = 1.0
    """Weight of genes that one genome lacks, in the distance (c1 and c2 of the paper)."""
    weight_weight: AtLeastZero = 0.4
    """Weight of the mean difference of the weights, in the distance (c3)."""
    survival: Share = 0.2
    """Part of each species that has offspring."""
    stagnation: Positive = 15
    """Generations without progress after which a species dies out."""
    crossover_probability: ZeroToOne = 0.75
    """Probability that an offspring has two parents."""
    weight_probability: ZeroToOne = 0.8
    """Probability that an offspring's weights are mutated."""
    connection_probability: ZeroToOne = 0.3
    """Probability that an offspring gets another connection."""
    node_probability: ZeroToOne = 0.1
    """Probability that a connection of an offspring is split by a node."""
