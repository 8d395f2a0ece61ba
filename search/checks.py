"""The last check of a search config: does the space of networks exist, and can the method search what it is given?"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from orchestray.platform.config.search.methods import parameters_of
from orchestray.platform.errors import ConfigError
from orchestray.search.methods.one_shot.base import OneShot
from orchestray.search.methods.population import packing
from orchestray.search.methods.registry import make_method
from orchestray.search.spaces.dimensions import make_dimension
from orchestray.search.spaces.registry import make_space

if TYPE_CHECKING:
    from collections.abc import Sequence

    from orchestray.platform.config.search.schema import SearchConfig
    from orchestray.search.methods.base import Method
    from orchestray.search.methods.population.training import PopulationBasedTraining
    from orchestray.search.spaces.base import ArchitectureSpace


def check_method(config: SearchConfig, *, label: str = "config") -> Sequence[str]:
    """Make the space and the method of a search, and forget them.

    Returns:
        What is allowed and hardly meant, in sentences.

    Raises:
        ConfigError: with every problem.
    """
    try:
        return method_of(config).cautions()
    except ConfigError as error:
        raise ConfigError([f"{label}: {problem}" for problem in error.problems]) from None


def space_of(config: SearchConfig) -> ArchitectureSpace | None:
    """The space of networks of a search.

    Raises:
        ConfigError: there is no such space, or it refuses its arguments.
    """
    architecture = config.search.architecture
    return None if architecture is None else make_space(architecture.space, **architecture.arguments)


def method_of(config: SearchConfig, *, trials: int | None = None) -> Method:
    """The method of a search, as it begins.

    Args:
        config: of the search.
        trials: that there may be in all; None: as the config's budget says.

    Raises:
        ConfigError: it cannot search what it is given.
    """
    search = config.search
    space = {
        key: make_dimension(dimension.type, **dimension.model_dump(exclude={"type"}))
        for key, dimension in search.space.items()
    }
    method = make_method(
        search.method.type,
        space=space,
        architecture=space_of(config),
        seed=search.seed,
        trials=search.budget.trials if trials is None else trials,
        steps_per_trial=config.steps_per_trial,
        **parameters_of(search.method),
    )
    first = search.objective[0]
    if search.method.type == "population_based_training" and search.method.packed:
        packing.check_config(config.base, list(search.space))
        cast("PopulationBasedTraining", method).judge_by(first.metric, str(first.mode))
    elif isinstance(method, OneShot):
        method.judge_by(first.metric, str(first.mode))
    return method
