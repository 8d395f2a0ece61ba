"""The config of one trial: the base with the proposed values."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import reduce
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from orchestray.platform.config import overrides
from orchestray.platform.config.base import Section
from orchestray.platform.config.error_location import sections_of, tag_of
from orchestray.platform.config.problems import Problem, translate
from orchestray.platform.errors import ConfigError
from orchestray.search.config.schema import SearchConfig
from orchestray.trainers.config.checked_view import View
from orchestray.trainers.config.checks import find_problems
from orchestray.trainers.config.schema import TrainConfig


def trial_config(
    config: SearchConfig,
    changes: Mapping[str, Any],
    genome: Any = None,
    steps: int | None = None,
    *,
    trial: int | None = None,
) -> TrainConfig:
    """Return the config of a trial: an ordinary training config, with which it can be trained again.

    Args:
        config: config of the search.
        changes: dotted keys of the base config, and their values.
        genome: the architecture; None: the task's own model.
        steps: length in the unit of the budget; None (or 0, for a trial that is only validated): the budget's.
        trial: number of the trial, for its name.

    Raises:
        ConfigError: the base config refuses the values.
    """
    data = config.base.model_dump(mode="json")
    data["name"] = f"{config.name}-trial" if trial is None else f"{config.name}-trial-{trial}"
    units = steps or config.steps_per_trial
    data["train"] |= config.length_of(units, config.base.train.batch_size)
    problems = put_in(data, config.base, changes)
    if config.unit == "samples" and isinstance(batch_size := data["train"].get("batch_size"), int) and batch_size > 0:
        data["train"] |= config.length_of(units, batch_size)
    if genome is not None:
        data["task"] = searched_task(data["task"], config, genome)
    made = problems or checked(data, look_at_task=False)
    if isinstance(made, TrainConfig):
        return made
    values = ", ".join(f"{key}={value!r}" for key, value in changes.items())
    raise ConfigError([problem.line(f"a trial with {values}") for problem in made])


def searched_task(task: Mapping[str, Any], config: SearchConfig, genome: Any) -> dict[str, Any]:
    """Return the `task` section of the base's task with a network built from a genome."""
    architecture = config.search.architecture
    if architecture is None:
        raise ConfigError("a genome needs search.architecture, which says what it is built by")
    # Imported late, since it imports torch.
    from orchestray.search.spaces.searched_task import searched_task_section

    return searched_task_section(dict(task), architecture.model_dump(mode="json"), genome)


def changed(base: TrainConfig, changes: Mapping[str, Any]) -> TrainConfig | list[Problem]:
    """Return the base with other values, or the problems of these values."""
    data = base.model_dump(mode="json")
    return put_in(data, base, changes) or checked(data, look_at_task=True)


def checked(data: Mapping[str, Any], *, look_at_task: bool) -> TrainConfig | list[Problem]:
    """Return a training config from plain data, or its problems."""
    try:
        made = TrainConfig.model_validate(data)
    except ValidationError as error:
        return translate(error, TrainConfig)
    return find_problems(View(made), look_at_task=look_at_task) or made


def put_in(data: dict[str, Any], base: TrainConfig, changes: Mapping[str, Any]) -> list[Problem]:
    """Set dotted keys of a config's plain data, in place; return the problems of those that cannot be set.

    If a key selects another `type`, the keys of the old one are removed. A key that the new one has too is kept, unless
    it had the old one's default.

    Args:
        data: plain data of a config.
        base: the config before the changes.
        changes: dotted keys with their values.
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
    """Return the fields of the union member that a `type` selects; None if there is none."""
    found = [section for section in sections_of(entry.annotation) if tag_of(section) == tag]
    return found[0].model_fields if found else None
