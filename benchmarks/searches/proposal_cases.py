"""Every method of search on a space that it can search, for the benchmark of what a proposal costs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from orchestray.search.methods.base import Method
from orchestray.search.registry.methods import make_method
from orchestray.search.spaces.architectures.base import ArchitectureSpace
from orchestray.search.spaces.architectures.cell import Cell
from orchestray.search.spaces.architectures.chain import Chain
from orchestray.search.spaces.architectures.genetic import Genetic
from orchestray.search.spaces.architectures.hierarchical import Hierarchical
from orchestray.search.spaces.architectures.layer_graph import LayerGraph
from orchestray.search.spaces.architectures.memory_bank import MemoryBank
from orchestray.search.spaces.architectures.modules import Modules
from orchestray.search.spaces.architectures.topology import Topology
from orchestray.search.spaces.dimensions import Binary, Choice, Dimension, Integer, Uniform

STEPS = 64
SPACE: Mapping[str, Dimension] = {
    "lr": Uniform(1e-4, 1.0, is_log=True),
    "momentum": Uniform(0.0, 0.99),
    "decay": Uniform(1e-6, 1e-2, is_log=True),
    "width": Integer(8, 512, is_log=True),
    "depth": Integer(1, 8),
    "optimizer": Choice(("sgd", "adam", "rmsprop")),
}
BITS: Mapping[str, Dimension] = {f"b{bit}": Binary() for bit in range(20)}


@dataclass(frozen=True)
class Case:
    """A method with its parameters, and what it searches."""

    parameters: Mapping[str, Any] = field(default_factory=dict)
    space: Mapping[str, Dimension] = field(default_factory=dict)
    architecture: Callable[[], ArchitectureSpace] | None = None
    takes_trials: tuple[str, ...] = ()
    """Parameters that are as many as there are trials."""

    def make(self, name: str, trials: int) -> tuple[Method, ArchitectureSpace | None]:
        """Return the method for `trials` trials, and its space of networks."""
        architecture = None if self.architecture is None else self.architecture()
        parameters = {**self.parameters, **dict.fromkeys(self.takes_trials, trials)}
        made = make_method(
            name.split(",", maxsplit=1)[0],
            space=self.space,
            architecture=architecture,
            trials=trials,
            steps_per_trial=STEPS,
            **parameters,
        )
        return made, architecture


def _small_modules() -> ArchitectureSpace:
    return Modules(channels=[8, 16])


CASES: Mapping[str, Case] = {
    "grid": Case({"points": {"lr": 20, "momentum": 20, "decay": 20}}, SPACE),
    "random": Case({}, SPACE),
    "random, sobol": Case({"sequence": "sobol"}, SPACE),
    "random, cells": Case(architecture=Cell),
    "bayesian": Case({}, SPACE),
    "bayesian, tpe": Case({"model": "tpe"}, SPACE),
    "bayesian, cells": Case(architecture=Cell),
    "asha": Case({}, SPACE),
    "asha, bayesian": Case({"proposals": {"type": "bayesian"}}, SPACE),
    "median_stopping": Case({}, SPACE),
    "learning_curve": Case({}, SPACE),
    "particle_swarm": Case({}, SPACE),
    "spectral": Case({}, BITS),
    "population_based_training": Case({"interval_steps": STEPS // 4}, SPACE, takes_trials=("population",)),
    "omnivore": Case({"every_steps": 8, "probe_steps": 2}, {"momentum": Choice((0.0, 0.5, 0.9))}),
    "regularized_evolution": Case(architecture=Cell),
    "large_scale_evolution": Case({}, {"lr": SPACE["lr"]}, LayerGraph),
    "genetic_cnn": Case(architecture=Genetic),
    "hierarchical_evolution": Case(architecture=Hierarchical),
    "codeepneat": Case(architecture=_small_modules),
    "neat": Case({"population": 40}, architecture=lambda: Topology(inputs=2, outputs=1)),
    "reinforce": Case(architecture=Cell),
    "q_learning": Case(architecture=Cell),
    "tree_search": Case(architecture=Cell),
    "progressive": Case({"grow_by": "nodes"}, architecture=Cell),
    "progressive, chain": Case(architecture=Chain),
    "enas": Case(architecture=Cell, takes_trials=("finalists",)),
    "darts": Case(architecture=Cell, takes_trials=("finalists",)),
    "smash": Case(architecture=MemoryBank, takes_trials=("finalists",)),
}
"""By name; a method is there once for each way in which its proposals cost otherwise."""
FINITE: Mapping[str, str] = {
    "omnivore": "one for each point of its grid",
    "progressive": "as many as its beam for each level",
    "progressive, chain": "as many as its beam for each level",
    "reinforce": "until its policy has settled, and all that it draws is known",
    "spectral": "until it has tried what its polynomial says is best, and all near it",
}
"""Trials of the cases that end before the number they are asked for, by name; all others reach it."""


def score(changes: Mapping[str, Any], rng: np.random.Generator) -> float:
    """Return a score to learn from, with noise."""
    if "optimizer" not in changes:
        return float(sum(changes.values()) + rng.normal())
    distance = (np.log10(changes["lr"]) + 2) ** 2 + (changes["momentum"] - 0.9) ** 2 + (changes["depth"] - 4) ** 2 / 10
    return float(-distance + (changes["optimizer"] == "adam") + 0.1 * rng.normal())
