"""The config of one trial: the base with the values that were proposed put in."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import reduce
from importlib import import_module
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from orchestray.platform.config import overrides
from orchestray.platform.config.base import Section
from orchestray.platform.config.checks import find_problems
from orchestray.platform.config.places import sections_of, tag_of
from orchestray.platform.config.problems import Problem, translate
from orchestray.platform.config.schema import TrainConfig
from orchestray.platform.config.search.schema import SearchConfig
from orchestray.platform.config.view import View
from orchestray.platform.errors import ConfigError


def trial_config(
    config: SearchConfig,
    changes: Mapping[str, Any],
    genome: Any = None,
    steps: int | None = None,
    *,
    trial: int | None = None,
) -> TrainConfig:
    """The config of a trial: an ordinary training config, which trains it again.

    Args:
        config: of the search.
        changes: dotted keys of the base config, and their values.
        genome: the architecture; None: the task's own model.
        steps: it is trained; None (or 0, for one that is only validated): the budget's.
        trial: its number, for its name.

    Raises:
        ConfigError: the base config refuses the values.
    """
    data = config.base.model_dump(mode="json")
    data["name"] = f"{config.name}-trial" if trial is None else f"{config.name}-trial-{trial}"
    data["train"] |= {"epochs": None, "steps": steps or config.steps_per_trial}
    problems = put_in(data, config.base, changes)
    if genome is not None:
        data["task"] = searched_task(data["task"], config, genome)
    made = problems or checked(data, look_at_task=False)
    if isinstance(made, TrainConfig):
        return made
    values = ", ".join(f"{key}={value!r}" for key, value in changes.items())
    raise ConfigError([problem.line(f"a trial with {values}") for problem in made])


def searched_task(task: Mapping[str, Any], config: SearchConfig, genome: Any) -> dict[str, Any]:
    """The `task` section that is the base's task with a network built from a genome."""
    architecture = config.search.architecture
    if architecture is None:
        raise ConfigError("a genome needs search.architecture, which says what it is built by")
    # Loaded by name: the platform imports nothing from the rooms that stand on it.
    make_section = import_module("orchestray.search.spaces.searched_task").searched_task_section
    section: dict[str, Any] = make_section(dict(task), architecture.model_dump(mode="json"), genome)
    return section


def changed(base: TrainConfig, changes: Mapping[str, Any]) -> TrainConfig | list[Problem]:
    """The base with other values, or why there is none."""
    data = base.model_dump(mode="json")
    return put_in(data, base, changes) or checked(data, look_at_task=True)


def checked(data: Mapping[str, Any], *, look_at_task: bool) -> TrainConfig | list[Problem]:
    """A training config of plain data, or what is wrong with it."""
    try:
        made = TrainConfig.model_validate(data)
    except ValidationError as error:
        return translate(error, TrainConfig)
    return find_problems(View(made), look_at_task=look_at_task) or made


def put_in(data: dict[str, Any], base: TrainConfig, changes: Mapping[str, Any]) -> list[Problem]:
    """Set dotted keys of a config's plain data, in place; returns what cannot be set.

    Where a key chooses another `type`, what was said of the old one goes, unless the new one has it too and it was not
    the old one's default.
    """
    problems = []
    for key, value in changes.items():
        keys = tuple(key.split("."))
        if keys[-1] == "type":
            _adapt(data, base, keys[:-1], value)
        if (problem := overrides.apply(data, keys, copy.deepcopy(value))) is not None:
            problems.append(problem)
    return problems


def _adapt(data: dict[str, Any], base: TrainConfig, keys: tuple[str, ...], new: Any) -> None:
    try:
        holder: Any = reduce(lambda place, key: place[key], keys, data)
        section: Any = reduce(getattr, keys, base)
        entry = type(reduce(getattr, keys[:-1], base)).model_fields[keys[-1]]
    except (KeyError, IndexError, TypeError, AttributeError):
        return
    if not isinstance(holder, dict) or not isinstance(section, Section) or holder.get("type") == new:
        return
    fields = _fields_of(entry, new)
    old = type(section).model_fields
    for name in list(holder):
        was_default = name in old and getattr(section, name) == old[name].get_default(call_default_factory=True)
        if name != "type" and fields is not None and (name not in fields or was_default):
            del holder[name]


def _fields_of(entry: FieldInfo, tag: Any) -> Mapping[str, FieldInfo] | None:
    """The keys of the member of a union that a type chooses."""
    found = [section for section in sections_of(entry.annotation) if tag_of(section) == tag]
    return found[0].model_fields if found else None
