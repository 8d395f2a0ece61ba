"""The registry of methods by name; each is imported on demand."""

from __future__ import annotations

import builtins
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from orchestray.platform.config.registry import Registry
from orchestray.platform.errors import ConfigError

if TYPE_CHECKING:
    from orchestray.search.methods.base import Method
    from orchestray.search.methods.params import MethodSection
    from orchestray.search.spaces.architectures.base import ArchitectureSpace
    from orchestray.search.spaces.dimensions import Dimension


def _entry(folder: str, place: str) -> tuple[str, str]:
    """Return the places of the section and of the class of a method; both have the same name."""
    package = f"orchestray.search.methods.{folder}"
    return f"{package}.params:{place.partition(':')[2]}", f"{package}.{place}"


METHODS: Registry[MethodSection] = Registry(
    "search.method",
    {
        "grid": _entry("hyper", "grid:Grid"),
        "random": _entry("hyper", "random:Random"),
        "bayesian": _entry("hyper", "bayesian:Bayesian"),
        "particle_swarm": _entry("hyper", "particle_swarm:ParticleSwarm"),
        "spectral": _entry("hyper", "spectral:Spectral"),
        "asha": _entry("hyper", "asha:Asha"),
        "median_stopping": _entry("hyper", "median_stopping:MedianStopping"),
        "learning_curve": _entry("hyper", "learning_curve:LearningCurve"),
        "population_based_training": _entry("population", "pbt:PopulationBasedTraining"),
        "omnivore": _entry("population", "omnivore:Omnivore"),
        "regularized_evolution": _entry("evolution", "regularized:RegularizedEvolution"),
        "large_scale_evolution": _entry("evolution", "large_scale:LargeScaleEvolution"),
        "genetic_cnn": _entry("evolution", "genetic_cnn:GeneticCnn"),
        "hierarchical_evolution": _entry("evolution", "hierarchical:HierarchicalEvolution"),
        "codeepneat": _entry("evolution", "codeepneat:CoDeepNeat"),
        "neat": _entry("evolution", "neat:Neat"),
        "reinforce": _entry("controllers", "reinforce:Reinforce"),
        "q_learning": _entry("controllers", "q_learning:QLearning"),
        "progressive": _entry("controllers", "progressive:Progressive"),
        "tree_search": _entry("controllers", "tree_search:TreeSearch"),
        "enas": _entry("one_shot", "enas:Enas"),
        "darts": _entry("one_shot", "darts:Darts"),
        "smash": _entry("one_shot", "smash:Smash"),
    },
    noun="a method of search",
)


def why_not_within(name: object) -> str | None:
    """Return why no other method may end the trials of a method early; None: one may, or the method does not exist."""
    reason = METHODS.params(name).why_not_within if isinstance(name, str) and name in METHODS else None
    return None if reason is None else f"{name} {reason}"


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
    """Create a method by its name.

    Args:
        type: name of the method in `METHODS`.
        space: dimension of each dotted key that is searched.
        architecture: space of networks; None: only hyper-parameters are searched.
        seed: seed of all random numbers.
        trials: most trials; None: as many as the method makes.
        steps_per_trial: training steps of each trial.
        parameters: parameters of the method's section.

    Raises:
        ConfigError: the method does not exist, or cannot search this space.
    """
    found: builtins.type[Method] = METHODS.find(type)
    common: dict[str, Any] = {
        "space": space,
        "architecture": architecture,
        "seed": seed,
        "trials": trials,
        "steps_per_trial": steps_per_trial,
    }
    if found.takes_proposer:
        parameters["proposer"] = _make_proposer(parameters.pop("proposals", None) or {}, common)
    return found(**common, **parameters)


def _make_proposer(proposals: Mapping[str, Any], common: Mapping[str, Any]) -> Method:
    """Create the method inside another one, which stops its trials early.

    Args:
        proposals: its `type` (default: random) and its parameters.
        common: arguments of both methods.

    Raises:
        ConfigError: the method does not exist, cannot search this space, or its trials must not be stopped.
    """
    inner = {"type": "random", **proposals}
    if inner["type"] not in METHODS:
        raise ConfigError(
            f"search.method.proposals.type: there is no method {inner['type']!r}; there are "
            f"{', '.join(sorted(METHODS))}"
        )
    reason = why_not_within(inner["type"])
    if reason is not None:
        raise ConfigError(f"search.method.proposals: {reason}")
    return make_method(**inner, **common)
