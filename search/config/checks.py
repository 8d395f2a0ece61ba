"""Rules between the keys of a search config, each a sentence with its reason.

They apply to the parts that are valid by themselves, so that one mistake gives one line. The rules of a method's own
keys are in its section (`MethodSection.problems`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestray.platform.config.paths import is_file_type
from orchestray.platform.config.problems import Problem, nearest
from orchestray.platform.usercode.class_names import in_a_cell
from orchestray.search.config.dimensions import LogInteger, LogUniform, Range, why_outside
from orchestray.search.config.gangs import most_workers
from orchestray.search.config.paths_of_base import path_problems
from orchestray.search.config.schema import Architecture, Budget, Objective
from orchestray.search.config.start import start_problems
from orchestray.search.methods.one_shot.obeyed import refused
from orchestray.search.methods.params import MethodSection, Searched
from orchestray.search.spaces.architectures.measures import MEASURES
from orchestray.trainers.config.modes import mode_is_missing
from orchestray.trainers.config.schema import TrainConfig
from orchestray.trainers.config.task_lint import metric_names


@dataclass(frozen=True)
class Parts:
    """The parts of a search config; None (or absent) for those that are missing or invalid by themselves."""

    base: TrainConfig | None
    method: MethodSection | None
    budget: Budget | None
    dimensions: Mapping[str, Any]
    objectives: tuple[Objective, ...]
    architecture: Architecture | None
    keys: Collection[str]
    """Keys of `space`, with valid and invalid dimensions."""
    names_space: bool
    """True if `space` is not empty."""
    names_architecture: bool
    start: tuple[Mapping[str, Any], ...] = ()


def find_search_problems(parts: Parts) -> list[Problem]:
    """Return a problem for every broken rule between keys."""
    return [problem for rule in _RULES for problem in rule(parts)]


def _without_trackers(parts: Parts) -> Iterator[Problem]:
    """Refuse trackers of the base: a search's trials are not runs of their own."""
    if parts.base is not None and parts.base.trackers:
        text = (
            "trials are not tracked one by one; take it out. Afterwards, `orchestray runs export` exports the best run"
        )
        yield Problem("base.trackers", text)


def _known_metric(parts: Parts) -> Iterator[Problem]:
    """Refuse a metric that the task does not report, as far as a look at the task shows, or without a direction."""
    there_are = _reported(parts.base)
    for place, objective in enumerate(parts.objectives):
        at = f"search.objective.{place}"
        named = {f"{at}.metric": objective.metric, **{f"{at}.subject_to.{one}": one for one in objective.subject_to}}
        unknown = {path: metric for path, metric in named.items() if not _may_be_reported(metric, there_are)}
        for path, metric in unknown.items():
            text = f"the task has no metric {metric!r}{nearest(metric, there_are or ())}"
            yield Problem(path, f"{text} (there are: {', '.join(there_are or ())})")
        if objective.mode is None and f"{at}.metric" not in unknown:
            yield Problem(f"{at}.mode", mode_is_missing(objective.metric))


def _reported(base: TrainConfig | None) -> list[str] | None:
    """Return the metrics that a trial reports, as far as the task's source shows; None if it does not."""
    if base is None:
        return None
    names = metric_names(base.task.type) if base.task.metric_names is None else base.task.metric_names
    of_distill = () if base.distill is None else ("task_loss",)
    return None if names is None else sorted({*names, "loss", "train_loss", *of_distill, *MEASURES})


def _may_be_reported(metric: str, there_are: Collection[str] | None) -> bool:
    return there_are is None or metric in there_are or metric.startswith("members.")


def _subject_to(parts: Parts) -> Iterator[Problem]:
    """Refuse bounds that say nothing, exclude each other, or do not reach the trials."""
    first: dict[str, int] = {}
    for place, objective in enumerate(parts.objectives):
        at = f"search.objective.{place}.subject_to"
        for metric, bounds in objective.subject_to.items():
            if (before := first.setdefault(metric, place)) != place:
                text = f"has bounds in search.objective.{before} as well: write all bounds of a metric in one place"
                yield Problem(f"{at}.{metric}", text)
            if bounds.max is None and bounds.min is None:
                yield Problem(f"{at}.{metric}", "must have a bound, got none: say max, the most, or min, the least")
            elif bounds.max is not None and bounds.min is not None and bounds.min > bounds.max:
                text = f"must be at most max ({bounds.max:g}), got {bounds.min:g}; are the two reversed?"
                yield Problem(f"{at}.{metric}.min", text)
        if objective.subject_to and parts.method is not None and parts.method.is_one_process:
            instead = "use another method" if parts.method.shares_weights else "use packed: false"
            text = f"is not for {parts.method.type} in one process, which compares by one number itself; {instead}"
            yield Problem(at, text)


def _something_to_search(parts: Parts) -> Iterator[Problem]:
    if parts.method is None:
        if not parts.names_space and not parts.names_architecture:
            yield Problem("search.space", "is required, and missing: name keys of the base config, or an architecture")
        return
    proposer = parts.method.proposer
    name, searches = proposer.type, proposer.searches
    if searches == "architecture" and not parts.names_architecture:
        yield Problem(
            "search.architecture", f"is required by {name}, and missing: say which space of networks it searches"
        )
    elif searches == "space" and parts.names_architecture:
        text = f"is not for {name}, which searches hyper-parameters; use random or bayesian, or an evolution"
        yield Problem("search.architecture", text)
    elif searches == "space" and not parts.names_space:
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
        yield from path_problems(parts.base, _usable(parts), _samples(parts))


def _samples(parts: Parts) -> int | None:
    return None if parts.budget is None else parts.budget.samples_per_trial


def _usable(parts: Parts) -> dict[str, Any]:
    """Return the dimensions whose bounds are valid."""
    bad = {problem.path.removeprefix("search.space.").removesuffix(".low") for problem in _bounds(parts)}
    return {key: dimension for key, dimension in parts.dimensions.items() if key not in bad}


def _objective(parts: Parts) -> Iterator[Problem]:
    first: dict[str, int] = {}
    for place, objective in enumerate(parts.objectives):
        if (before := first.setdefault(objective.metric, place)) != place:
            text = f"is that of search.objective.{before} as well ({objective.metric}): name each metric once"
            yield Problem(f"search.objective.{place}.metric", text)


def _method(parts: Parts) -> Iterator[Problem]:
    if parts.method is not None:
        trials = None if parts.budget is None else parts.budget.trials
        yield from parts.method.problems("search.method", Searched(parts.keys, _usable(parts), why_outside, trials))


def _start(parts: Parts) -> Iterator[Problem]:
    """Refuse more first trials than trials, and those that cannot be."""
    trials = None if parts.budget is None else parts.budget.trials
    if trials is not None and len(parts.start) > trials:
        text = f"must have at most the budget's trials ({trials}), got {len(parts.start)}; raise search.budget.trials"
        yield Problem("search.start", text)
    # In a space that has problems itself, values are not tried together.
    usable = _usable(parts) if parts.start and not any(_base_takes_them(parts)) else {}
    yield from start_problems(parts.start, list(parts.keys), usable, parts.base, _samples(parts))


def _budget(parts: Parts) -> Iterator[Problem]:
    if parts.method is None or parts.budget is None:
        return
    proposer = parts.method.proposer
    if parts.budget.trials is None and not proposer.counts_itself:
        text = f"is required by {proposer.type}, and missing: how many trials may there be?"
        yield Problem("search.budget.trials", text)


def _length(parts: Parts) -> Iterator[Problem]:
    if parts.base is None or parts.budget is None:
        return
    budget = parts.budget
    named = ("steps_per_trial", "epochs_per_trial", "samples_per_trial")
    given = [name for name in named if getattr(budget, name) is not None]
    if not given and parts.base.train.steps is None:
        yield Problem(
            "search.budget.steps_per_trial",
            "is required, and missing: how long is each trial trained? (epochs_per_trial, samples_per_trial or "
            "base.train.steps would do as well)",
        )
    for name in given[1:]:
        yield Problem(f"search.budget.{name}", f"is given beside {given[0]}: say the length of a trial in one unit")
    if parts.method is None or not given or given == ["steps_per_trial"]:
        return
    if parts.method.is_one_process:
        text = f"is not for {parts.method.type} in one process, which counts steps; use steps_per_trial"
        yield Problem(f"search.budget.{given[0]}", text)
    elif parts.method.changes_running and "train.batch_size" in parts.keys:
        text = (
            f"must stay as it is while a trial is counted in {given[0].partition('_')[0]}, and {parts.method.type} "
            "changes it in the middle of trials; use steps_per_trial"
        )
        yield Problem("search.space.train.batch_size", text)


def _batch_schedule(parts: Parts) -> Iterator[Problem]:
    """Refuse batches that grow where steps are counted in other units, and where many networks train in one process."""
    if parts.base is None:
        return
    train, method = parts.base.train, parts.method
    if method is not None and method.is_one_process:
        for key in ("batch_schedule", "noise_scale"):
            if getattr(train, key) is not None:
                yield Problem(f"base.train.{key}", f"is not there for {method.type} in one process; take it out")
    elif train.batch_schedule is None or parts.budget is None:
        return
    elif parts.budget.epochs_per_trial is not None or parts.budget.samples_per_trial is not None:
        text = "makes epochs of unequal numbers of steps; give search.budget.steps_per_trial, or take it out"
        yield Problem("base.train.batch_schedule", text)


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
    """Refuse other processes if one process trains many networks, or members, at once."""
    if parts.base is None or parts.method is None or not parts.method.is_one_process:
        return
    name, strategy = parts.method.type, parts.base.strategy
    why, instead = f"{name} trains the weights that all networks share in one process", "another method"
    if not parts.method.shares_weights:
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


def _shared_weights(parts: Parts) -> Iterator[Problem]:
    """Refuse what weights that networks share are not trained with, before a trial finds it out."""
    if parts.base is None or parts.method is None or not parts.method.shares_weights:
        return
    for sentence in refused(parts.base):
        key, _, text = sentence.partition(": ")
        yield Problem(f"base.{key}", text)


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


def _architecture(parts: Parts) -> Iterator[Problem]:
    if parts.architecture is None:
        return
    name = parts.architecture.space
    place, colon, class_name = name.rpartition(":")
    if not colon:
        return  # the spaces that come along are known where they are: the rest of the check builds one
    if not class_name.isidentifier():
        yield Problem("search.architecture.space", f"must end with the name of a class after the colon, got {name!r}")
    elif place == "__main__":
        yield Problem("search.architecture.space", in_a_cell(class_name))
    elif is_file_type(name) and not Path(place).is_file():
        yield Problem("search.architecture.space", f"there is no file {place}")


_RULES: tuple[Callable[[Parts], Iterator[Problem]], ...] = (
    _something_to_search,
    _without_trackers,
    _architecture,
    _bounds,
    _base_takes_them,
    _method,
    _start,
    _objective,
    _known_metric,
    _subject_to,
    _budget,
    _length,
    _batch_schedule,
    _engine,
    _one_process,
    _shared_weights,
    _memory,
)
