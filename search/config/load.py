"""Loading of search configs from YAML, overrides or plain data, with all problems reported at once."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from orchestray.platform.config import overrides as override_rules
from orchestray.platform.config import yaml_text
from orchestray.platform.config.config_kind import refuse_another_kind
from orchestray.platform.config.paths import absolute, is_file_type, resolve, resolve_classes
from orchestray.platform.config.problems import Problem, shown, translate
from orchestray.platform.errors import ConfigError
from orchestray.platform.usercode.class_names import name_of_class
from orchestray.search.config.checks import Parts, find_search_problems
from orchestray.search.config.dimensions import Dimension
from orchestray.search.config.methods import AnyMethod
from orchestray.search.config.schema import Architecture, Budget, Objectives, SearchConfig, Start
from orchestray.trainers.config.load import Origin, check_data, read, set_name, without_problems
from orchestray.trainers.config.modes import type_of_task, with_mode
from orchestray.trainers.config.schema import TrainConfig

SearchSource = str | os.PathLike[str] | Mapping[str, Any] | SearchConfig

_STAND_IN = {
    "name": "unnamed",
    "task": {"type": "digits"},
    "train": {"batch_size": 1, "steps": 1, "optimizer": {"type": "sgd", "lr": 1.0}},
}
"""A valid base, to check the rest of a config whose own base is invalid."""


def load_search_config(
    source: SearchSource, overrides: Sequence[str] = (), *, name: str | None = None, look_at_task: bool = True
) -> SearchConfig:
    """Read and check the config of a search.

    Args:
        source: a YAML file, or its content as plain data, or a config.
        overrides: `key.path=value`, applied after loading; relative paths in them start at the working directory.
        name: replaces the config's name; without either it is that of the file.
        look_at_task: check the files that the base names; False for a search that has ended.

    Raises:
        ConfigError: with every problem, one line each: "<file>: <dotted.path>: <sentence>".
    """
    origin = read(source)
    refuse_another_kind(origin.data, "search", label=origin.label)
    data = copy.deepcopy(origin.data)
    pairs, problems = override_rules.parse(overrides)
    _read_base(data, origin, [given for keys, given in pairs if keys == ("base",)])
    _resolve(data, origin.base)
    new = override_rules.in_empty(data, [keys for keys, _ in pairs])
    for keys, given in pairs:
        problems += [] if keys == ("base",) else _override(data, keys, given, is_new=keys in new)
    set_name(data, name, origin)
    base, base_problems = _check_base(data, look_at_task)
    problems += base_problems
    _fill_modes(data)
    config = None
    try:
        stand_in = {"base": base or TrainConfig.model_validate(_STAND_IN)} if "base" in data else {}
        config = SearchConfig.model_validate({**data, **stand_in})
    except ValidationError as error:
        problems += [_plainly(problem, data) for problem in translate(error, SearchConfig)]
    parts = _parts(data, base)
    if parts is not None:
        reported = [problem.path for problem in problems]
        broken = [_plainly(problem, data) for problem in find_search_problems(parts)]
        problems += [problem for problem in broken if not _is_reported(problem, reported)]
    if problems or config is None:
        raise ConfigError([problem.line(origin.label) for problem in problems])
    return config


def dump_search_yaml(config: SearchConfig) -> str:
    """Return the config as YAML, with its base and every default; loading it gives an equal config."""
    return yaml_text.write(config.model_dump(mode="json"))


def is_search_source(source: object) -> bool:
    """Return True if a file, or plain data, is a search config: it has a key `search`.

    A file that cannot be read is not one; loading it as another kind reports the problem.
    """
    try:
        data = read(source).data if isinstance(source, str | os.PathLike | Mapping) else {}
    except ConfigError:
        return False
    return "search" in data


def search_schema() -> dict[str, Any]:
    """Return the JSON schema of a search config as a user writes it."""
    schema = SearchConfig.model_json_schema()
    base = schema["properties"]["base"]
    reference = {"$ref": base.pop("$ref")}
    base["anyOf"] = [{"type": "string", "minLength": 1}, reference]
    for name in ("objective", "start", "learn_from"):  # one, or a list
        entry = schema["$defs"]["SearchSection"]["properties"][name]
        many = {key: entry.pop(key) for key in ("items", "minItems", "type") if key in entry}
        entry["anyOf"] = [many["items"], many]
    return schema


def _read_base(data: dict[str, Any], origin: Origin, given: Sequence[Any]) -> None:
    """Replace the base's path by its content, in place."""
    place, relative_to = data.get("base"), origin.base
    if given:
        place, relative_to = given[-1], str(Path.cwd())
    if isinstance(place, str) and place:
        try:
            base = read(absolute(place, relative_to))
            refuse_another_kind(base.data, "training", label=base.label)
        except ConfigError as error:
            raise ConfigError([f"{origin.label}: base: {problem}" for problem in error.problems]) from None
        data["base"] = copy.deepcopy(base.data)
        resolve(data["base"], base.base)
    elif isinstance(place, Mapping):
        data["base"] = copy.deepcopy(dict(place))
        resolve(data["base"], relative_to)
    elif given:
        data["base"] = place


def _resolve(data: dict[str, Any], base: str) -> None:
    """Make the paths of a user's own space and callbacks, and of earlier searches, absolute, in place."""
    resolve_classes(_section(data, "search"), "callbacks", base)
    architecture = _section(_section(data, "search"), "architecture")
    space = architecture.get("space")
    if isinstance(space, type):
        architecture["space"] = space = name_of_class(space, "search.architecture.space")
    if isinstance(space, str) and is_file_type(space):
        place, _, class_name = space.rpartition(":")
        architecture["space"] = f"{absolute(place, base)}:{class_name}"
    search = _section(data, "search")
    if isinstance(earlier := search.get("learn_from"), str | os.PathLike | list | tuple):
        places = [earlier] if isinstance(earlier, str | os.PathLike) else earlier
        is_path = (isinstance(place, str | os.PathLike) for place in places)
        pairs = zip(places, is_path, strict=True)
        search["learn_from"] = [absolute(os.fspath(place), base) if known else place for place, known in pairs]


def _override(data: dict[str, Any], keys: tuple[str, ...], given: Any, *, is_new: bool) -> list[Problem]:
    fragment = override_rules.nested(keys, given)
    if isinstance(fragment.get("base"), dict):
        resolve(fragment["base"], str(Path.cwd()))
    _resolve(fragment, str(Path.cwd()))
    value = reduce(lambda place, key: place[key], keys, fragment)
    problem = override_rules.apply(data, _joined(data, keys, given), value, None if is_new else SearchConfig)
    return [] if problem is None else [problem]


def _joined(data: dict[str, Any], keys: tuple[str, ...], given: Any) -> tuple[str, ...]:
    """Return the keys of an override, with a dotted key of `search.space` or of a grid's points as one key."""
    for names in (("search", "space"), ("search", "method", "points"), ("search", "method", "proposals", "points")):
        if keys[: len(names)] != names or len(keys) == len(names):
            continue
        rest = keys[len(names) :]
        # A new dimension, even if the key before its last dot has one; but for the conditions of that.
        if isinstance(given, dict) and rest[-1] != "when":
            return (*names, ".".join(rest))
        known = reduce(_section, names, data)
        dotted = [".".join(rest[:end]) for end in range(len(rest), 0, -1)]
        found = next((key for key in dotted if key in known), dotted[0])
        inside = rest[found.count(".") + 1 :]
        if inside[:1] == ("when",) and len(inside) > 1:
            inside = ("when", ".".join(inside[1:]))
        return (*names, found, *inside)
    return keys


def _check_base(data: dict[str, Any], look_at_task: bool) -> tuple[TrainConfig | None, list[Problem]]:
    if "base" not in data:
        return None, []
    base = data["base"]
    if not isinstance(base, dict):
        return None, [Problem("base", f"must be the path of a training config, or one itself, got {shown(base)}")]
    base.setdefault("name", data.get("name", "unnamed"))
    budget = _section(_section(data, "search"), "budget")
    if isinstance(base.get("train"), dict):
        base["train"] = {**base["train"], **_length(budget, base["train"])}
    config, problems = check_data(base, look_at_task=look_at_task)
    return config, [Problem(f"base.{problem.path}" if problem.path else "base", problem.text) for problem in problems]


def _fill_modes(data: dict[str, Any]) -> None:
    """Give objectives the `mode` that the user's own task says, in place."""
    search = _section(data, "search")
    objective, task_type = search.get("objective"), type_of_task(_section(data, "base"))
    if isinstance(objective, Mapping):
        search["objective"] = with_mode(objective, task_type)
    elif isinstance(objective, list):
        search["objective"] = [with_mode(one, task_type) if isinstance(one, Mapping) else one for one in objective]


def _length(budget: Mapping[str, Any], train: Mapping[str, Any]) -> dict[str, int | None]:
    """Return `epochs` and `steps` of the base by the budget of a trial; empty if that says nothing valid."""
    steps, epochs, samples = (budget.get(f"{unit}_per_trial") for unit in ("steps", "epochs", "samples"))
    if isinstance(epochs, int) and epochs > 0:
        return {"epochs": epochs, "steps": None}
    size = train.get("batch_size")
    if isinstance(samples, int) and isinstance(size, int) and min(samples, size) > 0:
        return {"epochs": None, "steps": math.ceil(samples / size)}
    if isinstance(steps, int) and steps > 0:
        return {"epochs": None, "steps": steps}
    is_said = any(one is not None for one in (steps, epochs, samples))
    return {"epochs": None, "steps": 1} if is_said else {}  # a length that is wrong is reported by itself


def _parts(data: dict[str, Any], base: TrainConfig | None) -> Parts | None:
    """Return the parts that are valid by themselves; None if the section `search` is missing."""
    search = data.get("search")
    if not isinstance(search, dict):
        return None
    space, architecture = search.get("space"), search.get("architecture")
    keys = space if isinstance(space, dict) else {}
    dimensions = {key: _valid(Dimension, dimension) for key, dimension in keys.items()}
    return Parts(
        base=base or without_problems(_section(data, "base")),
        method=_valid(AnyMethod, search.get("method")),
        budget=_valid(Budget, search.get("budget", {})),
        dimensions={key: dimension for key, dimension in dimensions.items() if dimension is not None},
        objectives=_valid(Objectives, search.get("objective")) or (),
        architecture=_valid(Architecture, architecture),
        keys=tuple(keys),
        names_space=bool(space),
        start=_valid(Start, search.get("start", ())) or (),
        names_architecture=architecture is not None,
    )


def _valid(kind: Any, value: Any) -> Any:
    try:
        return TypeAdapter(kind).validate_python(value)
    except ValidationError:
        return None


def _plainly(problem: Problem, data: dict[str, Any]) -> Problem:
    """Return a problem of a single objective, or first trial, without its index."""
    path, search = problem.path, _section(data, "search")
    for name in ("objective", "start"):
        if not isinstance(search.get(name), list | tuple):
            path = path.replace(f"search.{name}.0", f"search.{name}")
    return Problem(path, problem.text)


def _is_reported(problem: Problem, reported: Sequence[str]) -> bool:
    """Return True if a problem's key, or the base's key that it searches, has a problem already."""
    searched = f"base.{problem.path.removeprefix('search.space.')}"
    return problem.path in reported or any(f"{searched}.".startswith(f"{path}.") for path in reported)


def _section(data: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = data.get(key)
    return value if isinstance(value, dict) else {}
