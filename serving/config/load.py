"""Loading of a serve config from YAML, a run directory or plain data; all problems are reported at once."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from orchestray.platform.config import overrides as override_rules
from orchestray.platform.config import yaml_text
from orchestray.platform.config.config_kind import refuse_another_kind
from orchestray.platform.config.paths import absolute
from orchestray.platform.config.problems import Problem, translate
from orchestray.platform.errors import ConfigError
from orchestray.serving.config.checks import find_serve_problems
from orchestray.serving.config.own_class import class_name, names_class
from orchestray.serving.config.schema import ServeConfig
from orchestray.trainers.config.load import Origin, read, set_name

ServeSource = str | os.PathLike[str] | Mapping[str, Any] | ServeConfig


def load_serve_config(
    source: ServeSource, overrides: Sequence[str] = (), *, name: str | None = None, look_at_files: bool = True
) -> ServeConfig:
    """Read and check the config of an endpoint.

    Args:
        source: a YAML file, or its content as plain data, or a config; or a run directory, which is then served under
            its own name as version 1.
        overrides: `key.path=value`, applied after loading; relative paths in them start at the working directory.
        name: replaces the config's name; without either it is that of the file.
        look_at_files: True if the runs and files that it names must exist.

    Raises:
        ConfigError: all problems, a line each: "<file>: <dotted.path>: <sentence>".
    """
    origin = _origin(source)
    refuse_another_kind(origin.data, "endpoint", label=origin.label)
    data = copy.deepcopy(origin.data)
    _resolve(data, origin.base)
    pairs, problems = override_rules.parse(overrides)
    for keys, given in pairs:
        fragment = override_rules.nested(keys, given)
        _resolve(fragment, str(Path.cwd()))
        problem = override_rules.apply(data, keys, reduce(lambda place, key: place[key], keys, fragment))
        problems += [] if problem is None else [problem]
    set_name(data, name, origin)
    config, found = _check(data, look_at_files)
    problems += found
    if config is None or problems:
        raise ConfigError([problem.line(origin.label) for problem in problems])
    return config


def is_serve_source(source: object) -> bool:
    """Return True if a file, or plain data, is a serve config, which has a key `models`."""
    try:
        data = read(source).data if isinstance(source, str | os.PathLike | Mapping) else {}
    except ConfigError:
        return False
    return "models" in data


def dump_serve_yaml(config: ServeConfig) -> str:
    """Return the config as YAML with every default; loading it gives an equal config."""
    return yaml_text.write(config.model_dump(mode="json"))


def _origin(source: ServeSource) -> Origin:
    if isinstance(source, ServeConfig):  # unset keys stay unset: a default is not a wish to change anything
        return Origin("config", str(Path.cwd()), source.model_dump(mode="json", exclude_unset=True))
    if isinstance(source, str) and names_class(source):
        name = class_name(source)
        run = absolute(source, str(Path.cwd()))
        return Origin(source, str(Path.cwd()), {"name": name, "models": [{"name": name, "run": run}]})
    if isinstance(source, str | os.PathLike) and Path(source).suffix == ".py":
        raise ConfigError(f"{os.fspath(source)}: name a class or a function of it, as in {os.fspath(source)}:Model")
    if isinstance(source, str) and ":" in source and not Path(source).exists():
        raise ConfigError(f"{source}: a class is served by its file, as in path/to/file.py:Model")
    if not isinstance(source, str | os.PathLike) or not Path(source).is_dir():
        if isinstance(source, str | os.PathLike) and not Path(source).exists() and not Path(source).suffix:
            raise ConfigError(f"{os.fspath(source)}: there is no such run; `orchestray runs list` shows the runs")
        return read(source)
    path = Path(source).absolute()
    is_best = path.name == "best" and (path.parent / "trials.jsonl").is_file()
    name = path.parent.name if is_best else path.name
    data = {"name": name, "models": [{"name": name, "run": str(path)}]}
    return Origin(os.fspath(source), str(Path.cwd()), data)


def _check(data: dict[str, Any], look_at_files: bool) -> tuple[ServeConfig | None, list[Problem]]:
    try:
        config = ServeConfig.model_validate(data)
    except ValidationError as error:
        problems = translate(error, ServeConfig)
        rest = _without(data, problems)
        reported = {problem.path for problem in problems}
        more = [] if rest is None else find_serve_problems(rest, look_at_files=look_at_files)
        return None, problems + [problem for problem in more if problem.path not in reported]
    return config, find_serve_problems(config, look_at_files=look_at_files)


def _without(data: Mapping[str, Any], problems: Sequence[Problem]) -> ServeConfig | None:
    """Return the config without the sections that have a problem, or None if the rest is not a config."""
    broken = {problem.path.partition(".")[0] for problem in problems}
    rest = {key: value for key, value in data.items() if key not in broken}
    if "name" in broken or "name" not in rest:
        rest["name"] = "unnamed"
    try:
        return ServeConfig.model_validate(rest)
    except ValidationError:
        return None


def _resolve(data: Mapping[str, Any], base: str) -> None:
    """Make every path absolute, in place; malformed values are left to the schema."""
    for section, key in _paths(data):
        if isinstance(section.get(key), str) and section[key]:
            section[key] = absolute(section[key], base)


def _paths(data: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    models = data.get("models")
    for model in models.values() if isinstance(models, dict) else models if isinstance(models, list) else ():
        if isinstance(model, dict):
            yield model, "run"
    http, auth = data.get("http"), data.get("auth")
    if isinstance(auth, dict):
        yield auth, "tokens_file"
    if isinstance(http, dict) and isinstance(http.get("tls"), dict):
        yield http["tls"], "certificate"
        yield http["tls"], "key"
