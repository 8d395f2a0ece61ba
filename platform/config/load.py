"""From YAML, overrides or plain data to a checked config, or to every problem at once."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from orchestray.platform.config import overrides as override_rules
from orchestray.platform.config import yaml_text
from orchestray.platform.config.base import Section
from orchestray.platform.config.checks import find_problems
from orchestray.platform.config.dump import dump_yaml as dump_yaml  # noqa: PLC0414 - what reads configs offers it, too
from orchestray.platform.config.kinds import refuse_another_kind
from orchestray.platform.config.paths import resolve
from orchestray.platform.config.problems import Problem, translate
from orchestray.platform.config.schema import TrainConfig
from orchestray.platform.config.view import View
from orchestray.platform.errors import ConfigError

Source = str | os.PathLike[str] | Mapping[str, Any] | TrainConfig

_PLACEHOLDERS: dict[str, Any] = {
    "name": "unnamed",
    "task": {"type": "digits"},
    "train": {},
    "train.batch_size": 1,
    "train.optimizer": {"type": "sgd", "lr": 1.0},
}
"""What stands in for a required key that has a problem, while the rules on other keys are looked at."""


@dataclass(frozen=True)
class Origin:
    """Where a config comes from."""

    label: str
    """How it is called in a line about a problem: its file, or `config`."""
    base: str
    """The directory that its paths are relative to."""
    data: dict[str, Any]
    """Its plain data."""


def load_train_config(
    source: Source, overrides: Sequence[str] = (), *, name: str | None = None, look_at_task: bool = True
) -> TrainConfig:
    """Read and check the config of a training run.

    Args:
        source: a YAML file, or its content as plain data, or a config.
        overrides: `key.path=value`, applied after loading; relative paths in them start at the working directory.
        name: takes the place of the config's name.
        look_at_task: whether the file of a user's own task is looked at. Not so for the config of a run that is over:
            it can be read long after that file has moved.

    Raises:
        ConfigError: with every problem, a line each: "<file>: <dotted.path>: <sentence>".
    """
    origin = read(source)
    refuse_another_kind(origin.data, "training", label=origin.label)
    data = copy.deepcopy(origin.data)
    resolve(data, origin.base)
    problems = _override(data, overrides)
    if name is not None:
        data["name"] = name
    config, found = check_data(data, problems, look_at_task=look_at_task)
    if config is None or found:
        raise ConfigError([problem.line(origin.label) for problem in found])
    return config


def check_data(
    data: dict[str, Any], problems: Sequence[Problem] = (), *, look_at_task: bool = True
) -> tuple[TrainConfig | None, list[Problem]]:
    """The config that plain data is, or None; and every problem it has.

    Args:
        data: paths in it are absolute.
        problems: found before; the rules between keys leave those keys alone.
        look_at_task: as of `load_train_config`.
    """
    found = list(problems)
    try:
        config = TrainConfig.model_validate(data)
    except ValidationError as error:
        found += translate(error, TrainConfig)
        return None, found + _problems_between_usable_keys(data, found, look_at_task)
    return config, found + find_problems(View(config), look_at_task=look_at_task)


def read(source: str | os.PathLike[str] | Mapping[str, Any] | Section) -> Origin:
    """Read a config's plain data.

    Raises:
        ConfigError: there is no such file, or it is no YAML of keys and values.
    """
    if isinstance(source, Section):
        return Origin("config", str(Path.cwd()), source.model_dump(mode="json"))
    if isinstance(source, Mapping):
        return Origin("config", str(Path.cwd()), dict(source))
    label = os.fspath(source)
    data = _read_file(label)
    if not isinstance(data, dict):
        raise ConfigError(f"{label}: must hold keys and values, {'is empty' if data is None else 'and does not'}")
    return Origin(label, str(Path(label).parent.absolute()), data)


def _read_file(label: str) -> Any:
    try:
        return yaml_text.read(Path(label).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{label}: there is no such file") from None
    except OSError as error:
        inside = Path(label) / "config.yaml"
        hint = f"; there is a config in it, {inside}" if inside.is_file() else ""
        raise ConfigError(f"{label}: cannot be read: {error.strerror}{hint}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{label}: is no text in UTF-8, so no YAML") from None
    except yaml_text.YamlError as problem:
        raise ConfigError(f"{label}: {problem}") from None


def _override(data: dict[str, Any], overrides: Sequence[str]) -> list[Problem]:
    pairs, problems = override_rules.parse(overrides)
    for keys, given in pairs:
        fragment = override_rules.nested(keys, given)
        resolve(fragment, str(Path.cwd()))
        problem = override_rules.apply(data, keys, reduce(lambda place, key: place[key], keys, fragment))
        if problem is not None:
            problems.append(problem)
    return problems


def _problems_between_usable_keys(
    data: dict[str, Any], problems: Sequence[Problem], look_at_task: bool
) -> list[Problem]:
    """The problems of the rules between keys, as far as those keys have no problem themselves."""
    unusable = frozenset(problem.path for problem in problems)
    config = without_problems(data)
    return [] if config is None else find_problems(View(config, unusable), look_at_task=look_at_task)


def without_problems(data: Mapping[str, Any]) -> TrainConfig | None:
    """The config that is left of plain data when unusable keys are taken out (their defaults, or the placeholders,
    stand in); None if none is.
    """
    rest = copy.deepcopy(dict(data))
    for _ in range(8):
        try:
            return TrainConfig.model_validate(rest)
        except ValidationError as error:
            for problem in translate(error, TrainConfig):
                _take_out(rest, problem.path)
    return None


def _take_out(data: dict[str, Any], path: str) -> None:
    """Remove a key, or the nearest section around it that can be removed, and put placeholders for required ones."""
    keys = path.split(".")
    while keys:
        holder = _section(data, keys[:-1])
        if holder is not None and keys[-1] in holder:
            del holder[keys[-1]]
            break
        keys.pop()
    for required, value in _PLACEHOLDERS.items():
        *parents, last = required.split(".")
        holder = _section(data, parents)
        if holder is not None:
            holder.setdefault(last, copy.deepcopy(value))


def _section(data: dict[str, Any], keys: Sequence[str]) -> dict[str, Any] | None:
    place: Any = data
    for key in keys:
        place = place.get(key) if isinstance(place, dict) else None
    return place if isinstance(place, dict) else None
