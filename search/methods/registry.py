"""The methods by name; each is imported when it is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from orchestray.platform.errors import ConfigError

if TYPE_CHECKING:
    from orchestray.search.methods.base import Method
    from orchestray.search.spaces.base import ArchitectureSpace
    from orchestray.search.spaces.dimensions import Dimension

_HYPER = "orchestray.search.methods.hyper"
_EVOLUTION = "orchestray.search.methods.evolution"
_CONTROLLERS = "orchestray.search.methods.controllers"
_ONE_SHOT = "orchestray.search.methods.one_shot"

METHODS: Mapping[str, str] = {
    "grid": f"{_HYPER}.grid:Grid",
    "random": f"{_HYPER}.random:Random",
    "bayesian": f"{_HYPER}.bayesian:Bayesian",
    "asha": f"{_HYPER}.asha:Asha",
    "median_stopping": f"{_HYPER}.median_stopping:MedianStopping",
    "learning_curve": f"{_HYPER}.learning_curve:LearningCurve",
    "particle_swarm": f"{_HYPER}.particle_swarm:ParticleSwarm",
    "spectral": f"{_HYPER}.spectral:Spectral",
    "population_based_training": "orchestray.search.methods.population.training:PopulationBasedTraining",
    "omnivore": "orchestray.search.methods.population.omnivore:Omnivore",
    "regularized_evolution": f"{_EVOLUTION}.regularized:RegularizedEvolution",
    "large_scale_evolution": f"{_EVOLUTION}.large_scale:LargeScaleEvolution",
    "genetic_cnn": f"{_EVOLUTION}.genetic_cnn:GeneticCnn",
    "hierarchical_evolution": f"{_EVOLUTION}.hierarchical:HierarchicalEvolution",
    "codeepneat": f"{_EVOLUTION}.codeepneat:CoDeepNeat",
    "neat": f"{_EVOLUTION}.neat:Neat",
    "reinforce": f"{_CONTROLLERS}.reinforce:Reinforce",
    "q_learning": f"{_CONTROLLERS}.q_learning:QLearning",
    "progressive": f"{_CONTROLLERS}.progressive:Progressive",
    "enas": f"{_ONE_SHOT}.enas:Enas",
    "darts": f"{_ONE_SHOT}.darts:Darts",
    "smash": f"{_ONE_SHOT}.smash:Smash",
}
"""Name of each method, with "module:Class"."""


def make_method(
    type: str,  # noqa: A002 - the config's own word
    *,
    space: Mapping[str, Dimension],
    architecture: ArchitectureSpace | None = None,
    seed: int = 0,
    trials: int | None = None,
    steps_per_trial: int = 1,
    **parameters: Any,
) -> Method:
    """Make a method by its name.

    Args:
        type: a key of `METHODS`.
        space: as of `Method`.
        architecture: as of `Method`.
        seed: as of `Method`.
        trials: as of `Method`.
        steps_per_trial: as of `Method`.
        parameters: the method's own.

    Raises:
        ConfigError: there is no such method, or it cannot search this space.
    """
    if type not in METHODS:
        raise ConfigError(f"there is no method of search {type!r}; there are {', '.join(sorted(METHODS))}")
    module, class_name = METHODS[type].split(":")
    made: Method = getattr(import_module(module), class_name)(
        space=space, architecture=architecture, seed=seed, trials=trials, steps_per_trial=steps_per_trial, **parameters
    )
    return made
