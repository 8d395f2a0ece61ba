"""The results of earlier searches and runs, as observations for the method of a new search."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestray.platform.config import overrides
from orchestray.platform.errors import ConfigError
from orchestray.platform.run.directory import RunPaths, read_result
from orchestray.platform.run.metrics import read_lines
from orchestray.platform.terminal.format import short_path
from orchestray.search.config.dimensions import own_value, why_outside
from orchestray.search.config.load import load_search_config
from orchestray.search.engine.objective import Objectives, objectives_of
from orchestray.search.methods.base import Observation, violation_of
from orchestray.search.registry.check import hyper_space_of, method_of
from orchestray.search.results.paths import SearchPaths, is_search
from orchestray.trainers.config.load import load_train_config

if TYPE_CHECKING:
    from collections.abc import Sequence

    from orchestray.search.config.schema import SearchConfig
    from orchestray.search.methods.space import Space

_WHY = "search.learn_from"


@dataclass(frozen=True)
class Earlier:
    """The trials of earlier searches that a new one can learn from."""

    observations: tuple[Observation, ...] = ()
    notes: tuple[str, ...] = ()
    """A sentence on each directory: how many of its trials are used, and why not all."""


@dataclass(frozen=True)
class _Trial:
    """A trial of an earlier search, or a run."""

    changes: Mapping[str, Any]
    genome: Any
    metrics: Mapping[str, float]
    is_trained: bool = True


def earlier_trials(config: SearchConfig) -> Earlier:
    """Read the directories of `search.learn_from`.

    Raises:
        ConfigError: a directory is not that of a search or a run, or it has another objective or other keys.
    """
    objectives, space, observations, notes = objectives_of(config), hyper_space_of(config), [], []
    for place in config.search.learn_from:
        trials = list(_trials(config, Path(place)))
        inside = [trial for trial in trials if _is_inside(config, space, trial.changes)]
        used = [made for trial in inside if (made := _observation(config, objectives, trial)) is not None]
        observations += used
        reasons = [f"{len(trials) - len(inside)} lie outside of search.space"] if len(inside) < len(trials) else []
        if len(used) < len(inside):
            reasons.append(f"{len(inside) - len(used)} lack a value of the objective or of a bound")
        if (length := _other_length(config, Path(place))) is not None:
            reasons.append(length)
        text = f"{_WHY}: {len(used)} of {len(trials)} trials of {short_path(Path(place))} are used"
        notes.append("; ".join([text, *reasons]))
    return Earlier(tuple(observations), tuple(notes))


def check_earlier(config: SearchConfig, *, label: str = "config") -> Sequence[str]:
    """Return a sentence on each directory of `search.learn_from`.

    Raises:
        ConfigError: a directory cannot be learnt from, or the method does not learn.
    """
    if not config.search.learn_from:
        return ()
    try:
        earlier = earlier_trials(config)
        learns = method_of(config).learn(earlier.observations)
    except ConfigError as error:
        raise ConfigError([f"{label}: {problem}" for problem in error.problems]) from None
    if not learns:
        raise ConfigError(f"{label}: {does_not_learn(config)}")
    return earlier.notes


def does_not_learn(config: SearchConfig) -> str:
    """Return the sentence that refuses earlier results for a method."""
    return (
        f"{_WHY}: is not for {config.search.method.type}, which cannot take in results of other trials; use bayesian, "
        "spectral, regularized_evolution or hierarchical_evolution, by themselves or as proposals of an early stopping"
    )


def _trials(config: SearchConfig, place: Path) -> Iterator[_Trial]:
    if is_search(place):
        yield from _of_search(config, place)
    elif RunPaths(place).config.is_file() and (result := read_result(RunPaths(place))) is not None:
        yield _of_run(config, place, result)
    else:
        raise ConfigError(f"{_WHY}: {place} is not the directory of a search, or of a run that has ended")


def _of_search(config: SearchConfig, place: Path) -> Iterator[_Trial]:
    paths, search = SearchPaths(place), config.search
    before = load_search_config(paths.config, look_at_task=False).search
    goal, other = search.objective[0], before.objective[0]
    if (goal.metric, goal.mode) != (other.metric, other.mode):
        raise ConfigError(
            f"{_WHY}: the objective of {place} is {other.metric} ({other.mode}), and this search's is {goal.metric} "
            f"({goal.mode}); only results of the same objective can be compared"
        )
    if search.space.keys() != before.space.keys():
        differ = ", ".join(sorted(search.space.keys() ^ before.space.keys()))
        raise ConfigError(f"{_WHY}: {place} searched other keys; give both the same (they differ in {differ})")
    if search.architecture != before.architecture:
        raise ConfigError(f"{_WHY}: {place} has another search.architecture; give both the same")
    for line in read_lines(paths.trials):
        found = {name: line[name] for name in ("parameters", "flops", "latency_ms") if line.get(name) is not None}
        found |= {**(line.get("constraints") or {}), **(line.get("objectives") or {})}
        if line.get("objective") is not None:
            found[goal.metric] = line["objective"]
        changes, is_trained = line.get("best_config") or line["config"], line.get("steps") != 0
        yield _Trial(changes, line.get("genome"), found, is_trained or line.get("feasible", True))


def _of_run(config: SearchConfig, place: Path, result: Mapping[str, Any]) -> _Trial:
    if config.search.architecture is not None:
        raise ConfigError(f"{_WHY}: {place} is a run, which has no genome; name a search over the same networks")
    data = load_train_config(RunPaths(place).config, look_at_task=False).model_dump(mode="json")
    validation = (result.get("final") or {}).get("validation") or {}
    metrics = {name: value for name, value in validation.items() if isinstance(value, int | float)}
    found = {key: overrides.find(data, tuple(key.split("."))) for key in config.search.space}
    return _Trial(config.conditions.active(found), None, metrics)


def _other_length(config: SearchConfig, place: Path) -> str | None:
    """Return a warning that earlier trials were longer or shorter, which makes their scores others."""
    if not is_search(place):
        return None
    before = load_search_config(SearchPaths(place).config, look_at_task=False)
    was, now = before.length_text, config.length_text
    return None if was == now else f"its trials had {was}, and these have {now}: scores may not compare"


def _is_inside(config: SearchConfig, space: Space, changes: Mapping[str, Any]) -> bool:
    """Return True if a trial could be one of this search: it has the keys of a point, and no others."""
    if any(space.conditions.is_active(key, changes) != (key in changes) for key in space):
        return False
    dimensions = config.search.space
    return all(why_outside(dimensions[key], value) is None for key, value in changes.items()) and space.is_allowed(
        changes
    )


def _observation(config: SearchConfig, objectives: Objectives, trial: _Trial) -> Observation | None:
    """Return what a method learns of a trial; None if it lacks a metric, or kept no bound of its search but these."""
    try:
        scores = objectives.scores(trial.metrics)
    except ConfigError:
        return None
    changes = {key: own_value(config.search.space[key], value) for key, value in trial.changes.items()}
    violations = objectives.violations(trial.metrics)
    if not (trial.is_trained or violation_of(violations)):
        return None  # the bounds of its search were others, so that its network was not trained
    return Observation(changes, trial.genome, scores[0], scores, violations, trial.is_trained)
