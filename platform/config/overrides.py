"""`key.path=value` on the command line: values are YAML, applied to the plain data before it is checked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from orchestray.platform.config import yaml_text
from orchestray.platform.config.problems import Problem


def parse(overrides: Sequence[str]) -> tuple[list[tuple[tuple[str, ...], Any]], list[Problem]]:
    """Split overrides into (path, value) pairs, and what is wrong with those that cannot be split."""
    pairs: list[tuple[tuple[str, ...], Any]] = []
    problems: list[Problem] = []
    for override in overrides:
        path, equals, text = override.partition("=")
        keys = tuple(path.split("."))
        if not equals or not all(key.strip() == key and key for key in keys):
            problems.append(Problem("", f"{override!r} is no override; one looks like train.epochs=3"))
            continue
        try:
            pairs.append((keys, yaml_text.read(text)))
        except yaml_text.YamlError as problem:
            problems.append(Problem(path, f"the value {text!r} is no YAML: {problem}"))
    return pairs, problems


def apply(data: dict[str, Any], keys: tuple[str, ...], value: Any) -> Problem | None:
    """Set one key, in place; sections on the way that are not there are made."""
    place: Any = data
    for index, key in enumerate(keys[:-1]):
        if isinstance(place, list):
            place = place[int(key)] if _in_range(place, key) else None
        else:
            if place.get(key) is None:
                place[key] = {}
            place = place[key]
        if not isinstance(place, dict | list):
            return Problem(".".join(keys), f"cannot be set: {'.'.join(keys[: index + 1])} holds no keys")
    if isinstance(place, dict):
        place[keys[-1]] = value
    elif _in_range(place, keys[-1]):
        place[int(keys[-1])] = value
    else:
        return Problem(".".join(keys), f"cannot be set: the list has the positions 0 to {len(place) - 1}")
    return None


def nested(keys: tuple[str, ...], value: Any) -> dict[str, Any]:
    """The data that holds nothing but this key."""
    return {keys[0]: value if len(keys) == 1 else nested(keys[1:], value)}


def _in_range(items: list[Any], key: str) -> bool:
    return key.isdecimal() and int(key) < len(items)
