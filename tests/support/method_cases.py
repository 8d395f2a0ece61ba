"""Every method of the registry on a space it can search, for what must hold of all of them."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from orchestray.search.methods.base import Method, Proposal
from orchestray.search.registry.methods import make_method
from orchestray.search.spaces.architectures.base import ArchitectureSpace
from orchestray.search.spaces.architectures.cell import Cell
from orchestray.search.spaces.architectures.layer_graph import LayerGraph
from orchestray.search.spaces.architectures.memory_bank import MemoryBank
from orchestray.search.spaces.architectures.modules import Modules
from orchestray.search.spaces.architectures.topology import Topology
from orchestray.search.spaces.dimensions import Binary, Choice, Dimension, Uniform
from support.bit_space import BitSpace

NUMBERS: dict[str, Dimension] = {"x": Uniform(0.0, 1.0), "k": Choice((1, 2, 3))}
BITS: dict[str, Dimension] = {f"bit{bit}": Binary() for bit in range(8)}


def small_cell() -> Cell:
    return Cell(nodes=2, operations=["identity", "conv_1x1", "max_3x3"], channels=4, reductions=0)


def small_banks() -> MemoryBank:
    return MemoryBank(blocks=1, banks=2, channels=[2], unit=2, max_ops=2, kernels=[3], dilations=[1])


@dataclass(frozen=True)
class Case:
    """A method with the arguments of a short search."""

    method: str
    space: Mapping[str, Dimension] = field(default_factory=dict)
    architecture: Callable[[], ArchitectureSpace] | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)
    trials: int | None = 24
    steps: int = 12

    def make(self, seed: int = 0, **changed: Any) -> Method:
        """Make a new method, with a space of its own."""
        given: dict[str, Any] = {"space": self.space, "trials": self.trials, "steps_per_trial": self.steps}
        given |= {"architecture": None if self.architecture is None else self.architecture(), "seed": seed}
        return make_method(self.method, **{**given, **self.parameters, **changed})


CASES: dict[str, Case] = {
    "grid": Case("grid", NUMBERS, parameters={"points": {"x": 5}}, trials=None),
    "random": Case("random", NUMBERS),
    "random, sobol": Case("random", NUMBERS, parameters={"sequence": "sobol"}),
    "random architectures": Case("random", architecture=lambda: BitSpace(6)),
    "bayesian": Case("bayesian", NUMBERS, parameters={"initial": 6}, trials=12),
    "bayesian, tpe": Case("bayesian", NUMBERS, parameters={"model": "tpe"}),
    "bayesian architectures": Case("bayesian", architecture=lambda: BitSpace(6), parameters={"initial": 6}, trials=12),
    "asha": Case("asha", NUMBERS, parameters={"eta": 2, "grace_steps": 2}),
    "median_stopping": Case("median_stopping", NUMBERS, parameters={"min_trials": 2}),
    "learning_curve": Case("learning_curve", NUMBERS, trials=8),
    "particle_swarm": Case("particle_swarm", NUMBERS, parameters={"population": 4}),
    "particle_swarm, synchronous": Case("particle_swarm", NUMBERS, parameters={"population": 4, "synchronous": True}),
    "spectral": Case("spectral", BITS, parameters={"samples": 8, "stages": 2}),
    "population_based_training": Case(
        "population_based_training", NUMBERS, parameters={"population": 6, "interval_steps": 3}
    ),
    "population_based_training, t-test": Case(
        "population_based_training", NUMBERS, parameters={"population": 6, "interval_steps": 3, "exploit": "t_test"}
    ),
    "population_based_training, synchronous": Case(
        "population_based_training",
        NUMBERS,
        parameters={"population": 6, "interval_steps": 3, "synchronous": True, "exploit": "binary_tournament"},
    ),
    "omnivore": Case("omnivore", {"k": Choice((1, 2, 3))}, parameters={"every_steps": 6, "probe_steps": 2}),
    "regularized_evolution": Case(
        "regularized_evolution", architecture=lambda: BitSpace(6), parameters={"population": 6, "sample_size": 3}
    ),
    "large_scale_evolution": Case(
        "large_scale_evolution", {"x": Uniform(0.0, 1.0)}, architecture=LayerGraph, parameters={"population": 6}
    ),
    "large_scale_evolution, bare": Case(
        "large_scale_evolution",
        architecture=lambda: BitSpace(6),
        parameters={"population": 6, "inherit_weights": False},
    ),
    "genetic_cnn": Case("genetic_cnn", BITS, architecture=lambda: BitSpace(3, 2), parameters={"population": 6}),
    "hierarchical_evolution": Case(
        "hierarchical_evolution",
        architecture=lambda: BitSpace(6),
        parameters={"population": 6, "initial_mutations": 3},
    ),
    "codeepneat": Case(
        "codeepneat",
        {"x": Uniform(0.0, 1.0)},
        architecture=lambda: Modules(channels=[4, 8]),
        parameters={"population": 4, "modules": 6, "networks": 8, "species": 2},
    ),
    "neat": Case("neat", architecture=lambda: Topology(inputs=2, outputs=1), parameters={"population": 8}),
    "reinforce": Case("reinforce", architecture=lambda: BitSpace(6), parameters={"children": 4}),
    "reinforce, controllers": Case(
        "reinforce",
        NUMBERS,
        architecture=lambda: BitSpace(6),
        parameters={"children": 4, "controllers": 3, "shards": 2},
    ),
    "q_learning": Case("q_learning", {"k": Choice((1, 2, 3))}, architecture=lambda: BitSpace(6)),
    "tree_search": Case("tree_search", {"k": Choice((1, 2, 3))}, architecture=lambda: BitSpace(6)),
    "tree_search, bisection": Case("tree_search", NUMBERS, parameters={"bisection": True}),
    "progressive": Case("progressive", architecture=small_cell, parameters={"grow_by": "nodes", "beam": 4}),
    "progressive, stretches": Case("progressive", NUMBERS, parameters={"levels": 2, "beam": 4}),
    "enas": Case("enas", architecture=small_cell, parameters={"finalists": 3}, trials=4),
    "darts": Case("darts", architecture=small_cell, parameters={"finalists": 1}, trials=2),
    "smash": Case("smash", architecture=small_banks, parameters={"finalists": 3}, trials=4),
}
"""By name; a method is there once for each way in which it works otherwise."""


def luck(proposal: Proposal, step: int = 0, seed: int = 0) -> float:
    """Return a number in [0, 1) that depends on the proposal, the step and the seed alone."""
    written = json.dumps([proposal.genome, dict(proposal.changes), step, seed], sort_keys=True)
    return zlib.crc32(written.encode()) / 2**32


def smooth(proposal: Proposal, step: int) -> float:
    """Return a score that rises with the steps, to what the trial is worth."""
    return luck(proposal) * (1.0 - 0.8**step) if step else luck(proposal)


def told_by(architecture: ArchitectureSpace | None) -> Callable[[Proposal, int], Mapping[str, Any]]:
    """Return the reports of a program of shared weights at its end: networks it has found."""

    def told(proposal: Proposal, step: int) -> Mapping[str, Any]:
        if proposal.program is None or architecture is None or step < (proposal.steps or 0):
            return {}
        import numpy as np

        rng = np.random.default_rng(7)
        return {"genomes": [architecture.sample(rng) for _ in range(5)]}

    return told
