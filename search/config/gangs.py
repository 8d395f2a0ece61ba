"""Number of workers of a search's trials, by the base config and the space."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

from orchestray.search.config.conditions import settings_under, space_conditions
from orchestray.search.config.dimensions import edges
from orchestray.search.config.trial import changed
from orchestray.trainers.config.schema import TrainConfig

_SIZES = ("strategy.network", "resources.spares")
_OTHERS = ("strategy", "faults")


def is_alone(config: TrainConfig) -> bool:
    """Return True if a run has one worker and no further processes, so that its trial's process trains it."""
    network, exchange = config.strategy.network, config.strategy.exchange
    plain = exchange.type == "allreduce" and config.strategy.compression.type == "none"
    return plain and network.data * network.tensor * network.pipeline == 1 and not config.faults


def num_workers(config: TrainConfig) -> int:
    """Return the number of workers of a run, including spares."""
    network = config.strategy.network
    return network.data * network.tensor * network.pipeline + config.resources.spares


def most_workers(base: TrainConfig, dimensions: Mapping[str, Any]) -> int:
    """Return the most workers of a trial that is a gang; 0 if every trial is trained by its own process.

    Args:
        base: base config of the search.
        dimensions: dimensions of its space, by key of the base.
    """
    gangs = [config for config in _kinds(base, dimensions) if not is_alone(config)]
    return max(map(num_workers, gangs), default=0)


def _kinds(base: TrainConfig, dimensions: Mapping[str, Any]) -> Iterator[TrainConfig]:
    """Yield configs of a space that may differ in the number of workers.

    These are every layout of the network, and every other value of the strategy. Each is combined with the
    base's values of the other keys, and with either end of their dimensions.
    """
    values = {key: edges(dimension) for key, dimension in dimensions.items() if _is_of(key, (*_SIZES, *_OTHERS))}
    if not values:
        yield base
        return
    ends: list[Mapping[str, Any]] = [{}, *({key: known[end] for key, known in values.items()} for end in (0, -1))]
    sizes = {key: known for key, known in values.items() if _is_of(key, _SIZES)}
    changes = [dict(zip(sizes, sized, strict=True)) for sized in product(*sizes.values())]
    changes += [{key: value} for key, known in values.items() if key not in sizes for value in known]
    conditions = space_conditions(base, dimensions)
    for change in changes:
        settings = [{}, *(setting for key in change for setting in settings_under(key, dimensions, conditions))]
        for others, setting in product(ends, settings):
            config = changed(base, conditions.active({**others, **setting, **change}))
            if isinstance(config, TrainConfig):
                yield config


def _is_of(key: str, sections: tuple[str, ...]) -> bool:
    return any(key == section or key.startswith(f"{section}.") for section in sections)
