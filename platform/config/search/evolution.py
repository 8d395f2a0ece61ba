"""Evolution of architectures, as a search config names it."""

from __future__ import annotations

from typing import Literal

from orchestray.platform.config.base import Section


class RegularizedEvolution(Section):
    """Tournaments in which the oldest dies (Real et al., 2019)."""

    type: Literal["regularized_evolution"]
    """The method `regularized_evolution`."""


class LargeScaleEvolution(Section):
    """Mutations of whole networks, in pairwise tournaments (Real et al., 2017)."""

    type: Literal["large_scale_evolution"]
    """The method `large_scale_evolution`."""


class GeneticCnn(Section):
    """Connections between layers as a string of bits (Xie and Yuille, 2017)."""

    type: Literal["genetic_cnn"]
    """The method `genetic_cnn`."""


class HierarchicalEvolution(Section):
    """Motifs of motifs (Liu et al., 2018)."""

    type: Literal["hierarchical_evolution"]
    """The method `hierarchical_evolution`."""


class CoDeepNeat(Section):
    """Blueprints and modules evolved side by side (Miikkulainen et al., 2017)."""

    type: Literal["codeepneat"]
    """The method `codeepneat`."""


class Neat(Section):
    """Networks that grow node by node, with species (Stanley and Miikkulainen, 2002)."""

    type: Literal["neat"]
    """The method `neat`."""


EvolutionMethod = RegularizedEvolution | LargeScaleEvolution | GeneticCnn | HierarchicalEvolution | CoDeepNeat | Neat
