"""Evolution of architectures, as a search config names it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from orchestray.platform.config.base import AboveZero, AtLeastZero, Count, Flag, Number, Positive, Section, ZeroToOne

Share = Annotated[Number, Field(gt=0, le=1)]


class RegularizedEvolution(Section):
    """Tournaments in which the oldest dies (Real et al., 2019)."""

    type: Literal["regularized_evolution"]
    """The method `regularized_evolution`."""
    population: Positive = 20
    """Individuals alive at a time."""
    sample_size: Positive = 5
    """Individuals drawn for a tournament."""
    aging: Flag = True
    """The oldest dies; false: the worst of a tournament does."""
    reuse_scores: Flag = True
    """A network that was evaluated before keeps its score; false: it is evaluated again."""


class LargeScaleEvolution(Section):
    """Mutations of whole networks, in pairwise tournaments (Real et al., 2017)."""

    type: Literal["large_scale_evolution"]
    """The method `large_scale_evolution`."""
    population: Annotated[int, Field(ge=2, strict=True)] = 20
    """Individuals alive at a time, once so many have grown from the first."""
    inherit_weights: Flag = True
    """A child starts from its parent's weights, as far as names and shapes agree."""
    identity_probability: ZeroToOne = 0.08
    """That a child is its parent trained on."""
    reset_probability: ZeroToOne = 0.08
    """That a child is its parent with fresh weights."""


class GeneticCnn(Section):
    """Connections between layers as a string of bits (Xie and Yuille, 2017)."""

    type: Literal["genetic_cnn"]
    """The method `genetic_cnn`."""
    population: Positive = 20
    """Strings of a generation."""
    mutation_probability: ZeroToOne = 0.8
    """That a string that was not crossed is mutated."""
    bit_flip_probability: ZeroToOne = 0.05
    """That a bit of a mutated string is flipped."""
    crossover_probability: ZeroToOne = 0.2
    """That two strings are crossed."""
    stage_swap_probability: ZeroToOne = 0.2
    """That a stage of crossed strings is exchanged."""


class HierarchicalEvolution(Section):
    """Motifs of motifs (Liu et al., 2018)."""

    type: Literal["hierarchical_evolution"]
    """The method `hierarchical_evolution`."""
    population: Positive = 20
    """Genotypes that are drawn before the first tournament."""
    tournament_fraction: Share = 0.05
    """Part of the population that takes part in a tournament; at least 2 individuals do."""
    initial_mutations: Count = 100
    """Mutations that each of the first genotypes goes through."""


class CoDeepNeat(Section):
    """Blueprints and modules evolved side by side (Miikkulainen et al., 2017)."""

    type: Literal["codeepneat"]
    """The method `codeepneat`."""
    population: Positive = 10
    """Blueprints of a generation."""
    modules: Positive = 15
    """Modules of a generation."""
    networks: Positive = 20
    """Networks assembled and evaluated in a generation."""
    species: Positive = 3
    """Species that the blueprints are divided into; of modules there are as many as the space has (`num_modules`)."""
    elite: Share = 0.4
    """Part of each species that has offspring; its best goes on as it is."""
    crossover_probability: ZeroToOne = 0.2
    """That an offspring has two parents."""


class Neat(Section):
    """Networks that grow node by node, with species (Stanley and Miikkulainen, 2002)."""

    type: Literal["neat"]
    """The method `neat`."""
    population: Positive = 150
    """Networks of a generation."""
    compatibility: AboveZero = 3.0
    """Distance within which genomes are of one species."""
    disjoint_weight: AtLeastZero = 1.0
    """Of genes that one genome lacks, in the distance."""
    weight_weight: AtLeastZero = 0.4
    """Of the mean difference of the weights, in the distance."""
    survival: Share = 0.2
    """Part of each species that has offspring."""
    stagnation: Positive = 15
    """Generations without progress after which a species dies out."""
    crossover_probability: ZeroToOne = 0.75
    """That an offspring has two parents."""
    weight_probability: ZeroToOne = 0.8
    """That an offspring's weights are mutated."""
    connection_probability: ZeroToOne = 0.3
    """That an offspring gets a connection."""
    node_probability: ZeroToOne = 0.1
    """That a connection of an offspring is split by a node."""


EvolutionMethod = RegularizedEvolution | LargeScaleEvolution | GeneticCnn | HierarchicalEvolution | CoDeepNeat | Neat
