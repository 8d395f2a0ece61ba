"""How many workers the trials of a search have: those of the base config, or what the space makes of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

from orchestray.platform.config.schema import TrainConfig
from orchestray.platform.config.search.dimensions import edges
from orchestray.platform.config.search.trial import changed

_SIZES = ("strategy.network", "resources.spares")
_OTHERS = ("strategy", "faults")


def is_alone(config: TrainConfig) -> bool:
    """Whether a run has one worker and no further processes: then the process of its trial trains it."""
    network, exchange = config.strategy.network, config.strategy.exchange
    plain = exchange.type == "allreduce" and config.strategy.compression.type == "none"
    return plain and network.data * network.tensor * network.pipeline == 1 and not config.faults


def num_workers(config: TrainConfig) -> int:
    """Workers of a run, spares too."""
    network = config.strategy.network
    return network.data * network.tensor * network.pipeline + config.resources.spares


def most_workers(base: TrainConfig, dimensions: Mapping[str, Any]) -> int:
    """The most workers that a trial has which is a gang; 0: each is trained by its own process.

    Args:
        base: of the search.
        dimensions: of its space, by the keys of the base that they change.
    """
    gangs = [config for config in _kinds(base, dimensions) if not is_alone(config)]
    return max(map(num_workers, gangs), default=0)


def _kinds(base: TrainConfig, dimensions: Mapping[str, Any]) -> Iterator[TrainConfig]:
    """The configs of a space that may differ in whether a trial is a gang, and of how many: every layout of the
    network, and every other value of the strategy, each by itself and with what goes along with it at either end.
    """
    values = {key: edges(dimension) for key, dimension in dimensions.items() if _is_of(key, (*_SIZES, *_OTHERS))}
    if not values:
        yield base
        return
    ends: list[Mapping[str, Any]] = [{}, *({key: known[end] for key, known in values.items()} for end in (0, -1))]
    sizes = {key: known for key, known in values.items() if _is_of(key, _SIZES)}
    changes = [dict(zip(sizes, sized, strict=True)) for sized in product(*sizes.values())]
    changes += [{key: value} for key, known in values.items() if key not in sizes for value in known]
    for change in changes:
        for others in ends:
            config = changed(base, {**others, **change})
            if isinstance(config, TrainConfig):
                yield config


def _is_of(key: str, sections: tuple[str, ...]) -> bool:
    return any(key == section or key.startswith(f"{section}.") for section in sections)
