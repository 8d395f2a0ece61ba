"""Rules between the keys of a search config, each a sentence with its reason.

They look at those parts that are right by themselves, so that one mistake gives one line.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestray.platform.config.own_task import is_file_type
from orchestray.platform.config.problems import Problem, nearest
from orchestray.platform.config.schema import TrainConfig
from orchestray.platform.config.search.dimensions import LogInteger, LogUniform, Range, Uniform, why_outside
from orchestray.platform.config.search.gangs import most_workers
from orchestray.platform.config.search.methods import (
    COUNTS_ITSELF,
    ONLY_ARCHITECTURE,
    ONLY_SPACE,
    SHARES_WEIGHTS,
    counts_of,
    is_one_process,
    proposer_of,
)
from orchestray.platform.config.search.paths_of_base import path_problems
from orchestray.platform.config.search.schema import Architecture, Budget, Objective


@dataclass(frozen=True)
class Parts:
    """The parts of a search config; None (or not there) is what is missing or has a problem of its own."""

    base: TrainConfig | None
    method: Any
    budget: Budget | None
    dimensions: Mapping[str, Any]
    objectives: tuple[Objective, ...]
    architecture: Architecture | None
    keys: Collection[str]
    """Of `space`, with dimensions that are right or wrong."""
    names_space: bool
    """Whether there is anything in `space`."""
    names_architecture: bool


def find_search_problems(parts: Parts) -> list[Problem]:
    """Every rule between keys that the config breaks."""
    return [problem for rule in _RULES for problem in rule(parts)]


def _something_to_search(parts: Parts) -> Iterator[Problem]:
    if parts.method is None:
        if not parts.names_space and not parts.names_architecture:
            yield Problem("search.space", "is required, and missing: name keys of the base config, or an architecture")
        return
    name = proposer_of(parts.method)[1].type
    if name in ONLY_ARCHITECTURE and not parts.names_architecture:
        yield Problem(
            "search.architecture", f"is required by {name}, and missing: say which space of networks it searches"
        )
    elif name in ONLY_SPACE and parts.names_architecture:
        text = f"is not for {name}, which searches hyper-parameters; use random or bayesian, or an evolution"
        yield Problem("search.architecture", text)
    elif name in ONLY_SPACE and not parts.names_space:
        yield Problem("search.space", f"is required by {name}, and missing: name the keys of the base config to search")
    elif not parts.names_space and not parts.names_architecture:
        yield Problem("search.space", "is required, and missing: name keys of the base config, or an architecture")


def _bounds(parts: Parts) -> Iterator[Problem]:
    for key, dimension in parts.dimensions.items():
        path = f"search.space.{key}"
        if not isinstance(dimension, Range):
            continue
        if isinstance(dimension, LogUniform | LogInteger) and dimension.low <= 0:
            text = f"must be > 0, got {dimension.low:g}: {dimension.type} is even in the logarithm"
            yield Problem(f"{path}.low", text)
        if dimension.low > dimension.high:
            text = f"must be less than high ({dimension.high:g}), got {dimension.low:g}; are the two reversed?"
            yield Problem(f"{path}.low", text)
        elif dimension.low == dimension.high:
            text = f"is high as well ({dimension.high:g}): set {key} in the base and take it out of the space"
            yield Problem(f"{path}.low", text)


def _base_takes_them(parts: Parts) -> Iterator[Problem]:
    if parts.base is not None:
        yield from path_problems(parts.base, _usable(parts))


def _usable(parts: Parts) -> dict[str, Any]:
    """The dimensions whose bounds are in order."""
    bad = {problem.path.removeprefix("search.space.").removesuffix(".low") for problem in _bounds(parts)}
    return {key: dimension for key, dimension in parts.dimensions.items() if key not in bad}


def _objective(parts: Parts) -> Iterator[Problem]:
    first: dict[str, int] = {}
    for place, objective in enumerate(parts.objectives):
        if (before := first.setdefault(objective.metric, place)) != place:
            text = f"is that of search.objective.{before} as well ({objective.metric}): name each metric once"
            yield Problem(f"search.objective.{place}.metric", text)


def _initial(parts: Parts) -> Iterator[Problem]:
    if parts.method is None or parts.method.type != "population_based_training" or not parts.keys:
        return
    usable = _usable(parts)
    for number, values in enumerate(parts.method.initial):
        for key, value in values.items():
            path = f"search.method.initial.{number}.{key}"
            if key not in parts.keys:
                yield Problem(path, f"is no key of search.space{nearest(key, parts.keys)}")
            elif key in usable and (text := why_outside(usable[key], value)) is not None:
                yield Problem(path, f"{text}, which is what search.space says of {key}")


def _budget(parts: Parts) -> Iterator[Problem]:
    if parts.method is None or parts.budget is None:
        return
    place, proposer = proposer_of(parts.method)
    trials, name = parts.budget.trials, proposer.type
    if trials is None and name not in COUNTS_ITSELF:
        yield Problem("search.budget.trials", f"is required by {name}, and missing: how many trials may there be?")
    if trials is None:
        return
    for key, count in counts_of(proposer).items():
        if count > trials:
            text = f"must be at most the budget's trials ({trials}), got {count}; raise search.budget.trials"
            yield Problem(f"{place}.{key}", text)
    others = parts.method.min_trials if parts.method.type == "median_stopping" else 0
    if others >= trials and _is_meant(parts, "min_trials"):
        text = f"must be less than the budget's trials ({trials}), or none is ever stopped; got {others}"
        yield Problem("search.method.min_trials", text)
    if name in SHARES_WEIGHTS and _is_meant(parts, "finalists") and proposer.finalists >= trials:
        yield Problem(
            "search.method.finalists",
            f"must be at most {trials - 1}, the budget's trials ({trials}) without the one that trains the shared "
            f"weights, got {proposer.finalists}; raise search.budget.trials",
        )


def _is_meant(parts: Parts, key: str) -> bool:
    """Whether a number of the method was chosen: the default says nothing of how many trials there are."""
    fields = type(parts.method).model_fields
    return bool(getattr(parts.method, key) != fields[key].default)


def _length(parts: Parts) -> Iterator[Problem]:
    if parts.base is None or parts.budget is None:
        return
    if parts.budget.steps_per_trial is None and parts.base.train.steps is None:
        yield Problem(
            "search.budget.steps_per_trial",
            "is required, and missing: how long is each trial trained? (base.train.steps would do as well; epochs have "
            "as many steps as the batch size makes them)",
        )


def _engine(parts: Parts) -> Iterator[Problem]:
    if parts.base is None or parts.base.engine != "ray_train":
        return
    most = most_workers(parts.base, parts.dimensions)
    if most > 1:
        yield Problem(
            "base.engine",
            f"must be actors where a trial has several workers ({most} here), got ray_train: the workers of a "
            "trial sit in the places that the trial was given and stay warm between its reports, and Ray Train makes "
            "places of its own, which a trial that is stopped would leave behind; strategies are the same under both",
        )


def _one_process(parts: Parts) -> Iterator[Problem]:
    """What one process trains for many networks, or members, at once takes no notice of other processes."""
    if parts.base is None or parts.method is None or not is_one_process(parts.method):
        return
    name, strategy = parts.method.type, parts.base.strategy
    why, instead = f"{name} trains the weights that all networks share in one process", "another method"
    if name not in SHARES_WEIGHTS:
        why, instead = "a packed population is one process", "search.method.packed: false"
    network = strategy.network
    if (workers := network.data * network.tensor * network.pipeline) > 1:
        text = f"must have one worker, got {workers}: {why}; use data: 1, tensor: 1 and pipeline: 1, or {instead}"
        yield Problem("base.strategy.network", text)
    for key, known in (("exchange", "allreduce"), ("compression", "none")):
        if (kind := getattr(strategy, key).type) != known:
            text = f"must be {known}, got {kind!r}: {why}, which exchanges nothing; use {known}, or {instead}"
            yield Problem(f"base.strategy.{key}.type", text)
    if parts.base.faults:
        yield Problem("base.faults", f"must be empty: {why}, which no fault reaches; take them out, or use {instead}")


def _memory(parts: Parts) -> Iterator[Problem]:
    if parts.base is None or parts.budget is None or parts.budget.trial_memory_mb is None:
        return
    if most_workers(parts.base, parts.dimensions) == 0:
        return
    whose = "by base.strategy or base.faults each trial here is"
    if most_workers(parts.base, {}) == 0:
        whose = "by search.space trials here may be"
    yield Problem(
        "search.budget.trial_memory_mb",
        f"is for trials of one process, and {whose} a gang of processes, of "
        "which it would limit the one that keeps their checkpoints; take it out, and have no more at once than there "
        "is memory for: lower search.parallel, or raise base.resources.cpus_per_worker on a cluster",
    )


def _grid(parts: Parts) -> Iterator[Problem]:
    if parts.method is None:
        return
    place, proposer = proposer_of(parts.method)
    if proposer.type != "grid":
        return
    points = proposer.points
    for key, dimension in parts.dimensions.items():
        if isinstance(dimension, Uniform | LogUniform) and key not in points:
            text = f"a grid needs to know how many of its values to try: say {place}.points: {{{key}: N}}"
            yield Problem(f"search.space.{key}", f"{text}, or make it a choice")
    if parts.names_space:
        for key in points:
            if key not in parts.keys:
                yield Problem(f"{place}.points.{key}", f"is no key of search.space{nearest(key, parts.keys)}")


def _architecture(parts: Parts) -> Iterator[Problem]:
    if parts.architecture is None:
        return
    name = parts.architecture.space
    place, colon, class_name = name.rpartition(":")
    if not colon:
        return  # the spaces that come along are known where they are: the rest of the check builds one
    if not class_name.isidentifier():
        yield Problem("search.architecture.space", f"must end with the name of a class after the colon, got {name!r}")
    elif is_file_type(name) and not Path(place).is_file():
        yield Problem("search.architecture.space", f"there is no file {place}")


_RULES: tuple[Callable[[Parts], Iterator[Problem]], ...] = (
    _something_to_search,
    _architecture,
    _bounds,
    _base_takes_them,
    _grid,
    _objective,
    _initial,
    _budget,
    _length,
    _engine,
    _one_process,
    _memory,
)
