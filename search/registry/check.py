"""The last check of a search config: the space of networks exists, and the method can search the spaces."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestray.platform.errors import ConfigError
from orchestray.search.methods.space import Space
from orchestray.search.registry.methods import make_method
from orchestray.search.spaces.dimensions import make_dimension
from orchestray.search.spaces.registry import make_space

if TYPE_CHECKING:
    from collections.abc import Sequence

    from orchestray.search.config.schema import SearchConfig
    from orchestray.search.methods.base import Method
    from orchestray.search.spaces.architectures.base import ArchitectureSpace


def check_method(config: SearchConfig, *, label: str = "config") -> Sequence[str]:
    """Create the space and the method of a search, to check them.

    Returns:
        Warnings about arguments that are valid but hardly intended.

    Raises:
        ConfigError: with every problem.
    """
    try:
        cautions = method_of(config).cautions()
    except ConfigError as error:
        raise ConfigError([f"{label}: {problem}" for problem in error.problems]) from None
    found = config.combinations
    if found.is_every_one_refused:
        raise ConfigError(f"{label}: search.space: no combination of its values can be trained. {found.caution}")
    return [*cautions, *([] if found.caution is None else [found.caution])]


def space_of(config: SearchConfig) -> ArchitectureSpace | None:
    """Return the space of networks of a search.

    Raises:
        ConfigError: the space does not exist, or refuses its arguments.
    """
    architecture = config.search.architecture
    return None if architecture is None else make_space(architecture.space, **architecture.arguments)


def hyper_space_of(config: SearchConfig) -> Space:
    """Return the space of hyper-parameters of a search.

    Raises:
        ConfigError: a range cannot be searched.
    """
    dimensions = {}
    for key, dimension in config.search.space.items():
        try:
            dimensions[key] = make_dimension(dimension.type, **dimension.model_dump(exclude={"type", "when"}))
        except ConfigError as error:
            raise ConfigError([f"search.space.{key}: {problem}" for problem in error.problems]) from None
    return Space(dimensions, config.conditions, config.combinations.refusal)


def method_of(config: SearchConfig, *, trials: int | None = None) -> Method:
    """Return a new method for a search.

    Args:
        config: config of the search.
        trials: most trials; None: the config's budget.

    Raises:
        ConfigError: the method cannot search these spaces.
    """
    search = config.search
    method = make_method(
        search.method.type,
        space=hyper_space_of(config),
        architecture=space_of(config),
        seed=search.seed,
        trials=search.budget.trials if trials is None else trials,
        steps_per_trial=config.steps_per_trial,
        **search.method.arguments,
    )
    if search.start and not method.begin_with(config.first_trials):
        raise ConfigError(
            f"search.start: is not for {search.method.type}, which chooses all of its trials itself; take it out, or "
            "use a method that proposes hyper-parameters"
        )
    first = search.objective[0]
    method.check_base(config.base)
    method.judge_by(first.metric, str(first.mode))
    return method
