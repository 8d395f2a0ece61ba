"""The loading of a checked config from YAML, overrides or plain data, with all problems reported at once."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from orchestray.platform.config import overrides as override_rules
from orchestray.platform.config import yaml_text
from orchestray.platform.config.base import Section
from orchestray.platform.config.config_kind import refuse_another_kind
from orchestray.platform.config.paths import resolve
from orchestray.platform.config.problems import Problem, translate
from orchestray.platform.errors import ConfigError
from orchestray.trainers.config.checked_view import View
from orchestray.trainers.config.checks import find_problems
from orchestray.trainers.config.dump import dump_yaml as dump_yaml  # noqa: PLC0414 - exported here as well
from orchestray.trainers.config.modes import with_modes
from orchestray.trainers.config.schema import TrainConfig

Source = str | os.PathLike[str] | Mapping[str, Any] | TrainConfig

_PLACEHOLDERS: dict[str, Any] = {
    "name": "unnamed",
    "task": {"type": "digits"},
    "train": {},
    "train.batch_size": 1,
}
"""Values that replace required keys with a problem while the rules on other keys are checked."""


@dataclass(frozen=True)
class Origin:
    """The source of a config."""

    label: str
    """Name of the source in reports of problems: its file, or `config`."""
    base: str
    """Directory that relative paths in the config start from."""
    data: dict[str, Any]
    """Content of the config as plain data."""

    @property
    def name(self) -> str | None:
        """Default of the config's `name`, from the name of its file; None for plain data."""
        return None if self.label == "config" else re.sub(r"[^A-Za-z0-9._-]+", "-", Path(self.label).stem).lstrip("._-")


def load_train_config(
    source: Source, overrides: Sequence[str] = (), *, name: str | None = None, look_at_task: bool = True
) -> TrainConfig:
    """Read and check the config of a training run.

    Args:
        source: a YAML file, its content as plain data, or a config.
        overrides: `key.path=value`, applied after loading; relative paths in them start at the working directory.
        name: name that replaces the config's own; if both are missing, the name comes from the file.
        look_at_task: False not to check the files that the config names (a user's own task, the teacher's run), which
            may have moved since the run of the config ended.

    Raises:
        ConfigError: the config has problems; one line for each: "<file>: <dotted.path>: <sentence>".
    """
    origin = read(source)
    refuse_another_kind(origin.data, "training", label=origin.label)
    data = copy.deepcopy(origin.data)
    resolve(data, origin.base)
    problems = _override(data, overrides)
    set_name(data, name, origin)
    config, found = check_data(data, problems, look_at_task=look_at_task)
    if config is None or found:
        raise ConfigError([problem.line(origin.label) for problem in found])
    return config


def set_name(data: dict[str, Any], name: str | None, origin: Origin) -> None:
    """Set the name in a config's data: to `name`, else leave its own, else take the name of its file."""
    if name is not None:
        data["name"] = name
    elif data.get("name") is None and origin.name:
        data["name"] = origin.name
    elif "name" in data and data["name"] is None:
        del data["name"]


def check_data(
    data: dict[str, Any], problems: Sequence[Problem] = (), *, look_at_task: bool = True
) -> tuple[TrainConfig | None, list[Problem]]:
    """Check plain data; return the config, or None if a value is invalid, and every problem.

    Args:
        data: plain data with absolute paths.
        problems: problems found before; if a value is invalid, rules that read these keys are skipped as well.
        look_at_task: same as in `load_train_config`.
    """
    found = list(problems)
    data = with_modes(data)
    try:
        config = TrainConfig.model_validate(data)
    except ValidationError as error:
        found += translate(error, TrainConfig)
        return None, found + _problems_between_usable_keys(data, found, look_at_task)
    return config, found + find_problems(View(config), look_at_task=look_at_task)


def read(source: str | os.PathLike[str] | Mapping[str, Any] | Section) -> Origin:
    """Read a config's plain data.

    Raises:
        ConfigError: the file does not exist, or is not YAML with keys and values.
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
    new = override_rules.in_empty(data, [keys for keys, _ in pairs])
    for keys, given in pairs:
        fragment = override_rules.nested(keys, given)
        resolve(fragment, str(Path.cwd()))
        model = None if keys in new else TrainConfig
        problem = override_rules.apply(data, keys, reduce(lambda place, key: place[key], keys, fragment), model)
        if problem is not None:
            problems.append(problem)
    return problems


def _problems_between_usable_keys(
    data: dict[str, Any], problems: Sequence[Problem], look_at_task: bool
) -> list[Problem]:
    """Return the problems between keys, except where a rule needs a key that has a problem itself."""
    unusable = frozenset(problem.path for problem in problems)
    config = without_problems(data)
    return [] if config is None else find_problems(View(config, unusable), look_at_task=look_at_task)


def without_problems(data: Mapping[str, Any]) -> TrainConfig | None:
    """Return a config in which defaults or placeholders replace the invalid keys of plain data; None on failure."""
    rest = copy.deepcopy(dict(data))
    for _ in range(8):
        try:
            return TrainConfig.model_validate(rest)
        except ValidationError as error:
            for problem in translate(error, TrainConfig):
                _take_out(rest, problem.path)
    return None


def _take_out(data: dict[str, Any], path: str) -> None:
    """Remove a key, or the nearest section around it, and put placeholders for missing required keys."""
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
