"""The config of one trial: the base with the proposed values."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from functools import reduce
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from orchestray.platform.config import overrides
from orchestray.platform.config.base import Section
from orchestray.platform.config.error_location import sections_of, tag_of
from orchestray.platform.config.problems import Problem, shown, translate
from orchestray.platform.errors import ConfigError
from orchestray.trainers.config.checked_view import View
from orchestray.trainers.config.checks import find_problems
from orchestray.trainers.config.schema import TrainConfig

if TYPE_CHECKING:
    from orchestray.search.config.schema import SearchConfig


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
    _fit_steps(data, units if config.unit == "samples" else None)
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


def changed(
    base: TrainConfig, changes: Mapping[str, Any], *, samples: int | None = None, look_at_task: bool = True
) -> TrainConfig | list[Problem]:
    """Return the base with other values, or the problems of these values.

    Args:
        base: config before the changes.
        changes: dotted keys with their values.
        samples: samples to train on, in batches of the new size; None: as many steps or epochs as the base has.
        look_at_task: check the task's files as well.
    """
    data = base.model_dump(mode="json")
    problems = put_in(data, base, changes)
    _fit_steps(data, samples)
    return problems or checked(data, look_at_task=look_at_task)


def _fit_steps(data: dict[str, Any], samples: int | None) -> None:
    """Set the steps of a config's plain data, in place, to those that the samples fill; None: keep them."""
    train = data["train"]
    batch_size = train.get("batch_size") if isinstance(train, dict) else None
    if samples is not None and isinstance(batch_size, int) and batch_size > 0:
        train |= {"epochs": None, "steps": math.ceil(samples / batch_size)}


def checked(data: Mapping[str, Any], *, look_at_task: bool) -> TrainConfig | list[Problem]:
    """Return a training config from plain data, or its problems."""
    try:
        made = TrainConfig.model_validate(data)
    except ValidationError as error:
        return translate(error, TrainConfig)
    return find_problems(View(made), look_at_task=look_at_task) or made


def put_in(data: dict[str, Any], base: TrainConfig, changes: Mapping[str, Any]) -> list[Problem]:
    """Set dotted keys of a config's plain data, in place; return the problems of those that cannot be set.

    Keys are set by depth, and a `type` before the other keys of its section, whatever their order in `changes`. If a
    key selects another `type`, the keys of the old one are removed. A key that the new one has too is kept, unless the
    base has the old one's default there.

    Args:
        data: plain data of a config.
        base: the config before the changes.
        changes: dotted keys with their values.
    """
    problems = []
    paths = {key: tuple(key.split(".")) for key in sorted(changes, key=_turn)}
    new = overrides.in_empty(data, paths.values())
    for key, keys in paths.items():
        if keys[-1] == "type" and not _is_within(key, changes):
            _adapt(data, base, keys[:-1], changes[key])
        model = None if keys in new else TrainConfig
        if (problem := overrides.apply(data, keys, copy.deepcopy(changes[key]), model)) is not None:
            problems.append(problem)
    return problems or _lost(data, changes)


def _turn(key: str) -> tuple[int, bool]:
    """Return the sort key by which changes are applied: sections first, then types, then what a type has."""
    return key.count("."), not key.endswith(".type")


def _is_within(key: str, changes: Mapping[str, Any]) -> bool:
    """Return True if a section around a key is among the changes as a whole: the base's keys are not in it."""
    parts = key.split(".")
    return any(".".join(parts[:depth]) in changes for depth in range(1, len(parts)))


def _lost(data: Mapping[str, Any], changes: Mapping[str, Any]) -> list[Problem]:
    """Return a problem for each proposed value that is not in the config, which would be trained with another one."""
    problems = []
    for key, value in changes.items():
        wanted = _with_inner(key, value, changes) if isinstance(value, dict | list) else value
        found = overrides.find(data, tuple(key.split(".")))
        if found != wanted:
            inner = [other for other in changes if other.startswith(f"{key}.")]
            why = f": {', '.join(inner)} would replace it" if inner else ""
            text = f"the value {shown(value)} would not be in the config, which would have {shown(found)}{why}"
            problems.append(Problem(key, text))
    return problems


def _with_inner(key: str, section: Any, changes: Mapping[str, Any]) -> Any:
    """Return the proposed value of a section or list with those that are proposed for the keys in it."""
    whole = copy.deepcopy(section)
    for other in sorted(changes, key=_turn):
        if other.startswith(f"{key}."):
            overrides.apply(whole, tuple(other.removeprefix(f"{key}.").split(".")), changes[other])
    return whole


def _adapt(data: dict[str, Any], base: TrainConfig, keys: tuple[str, ...], new: Any) -> None:
    """Remove the keys of a section that its new `type` does not have, or that the base has at their defaults."""
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


def fields_of_type(base: TrainConfig, section: str, tag: Any) -> Mapping[str, FieldInfo]:
    """Return the fields that a section has with another `type`; empty if it has no such type.

    Args:
        base: config with the section.
        section: dotted key of the section.
        tag: the `type`.
    """
    *around, name = section.split(".")
    try:
        entry = type(reduce(getattr, around, base)).model_fields[name]
    except (AttributeError, KeyError):
        return {}
    return _fields_of(entry, tag) or {}
