"""Overrides `key.path=value` of the command line: values are YAML, applied to plain data before it is checked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from orchestray.platform.config import yaml_text
from orchestray.platform.config.problems import Problem


def parse(overrides: Sequence[str]) -> tuple[list[tuple[tuple[str, ...], Any]], list[Problem]]:
    """Split overrides into (path, value) pairs, and return the problems of those that cannot be split."""
    pairs: list[tuple[tuple[str, ...], Any]] = []
    problems: list[Problem] = []
    for override in overrides:
        path, equals, text = override.partition("=")
        keys = tuple(path.split("."))
        if not equals or not all(key.strip() == key and key for key in keys):
            problems.append(Problem("", f"{override!r} is no override; one looks like train.epochs=3"))
            continue
        try:
            pairs.append((keys, _value(text)))
        except yaml_text.YamlError as problem:
            problems.append(Problem(path, f"the value {text!r} is no YAML: {problem}"))
    return pairs, problems


def _value(text: str) -> Any:
    """Return the value of an override: YAML, but for `::` and the like, which YAML reads as a key without a value."""
    value = yaml_text.read(text)
    is_key_alone = isinstance(value, dict) and list(value.values()) == [None] and text.rstrip().endswith(":")
    return text if is_key_alone else value


def apply(data: dict[str, Any], keys: tuple[str, ...], value: Any) -> Problem | None:
    """Set one key in place, creating missing sections on the way; return a problem if that is impossible."""
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
    """Return nested mappings that contain only this key."""
    return {keys[0]: value if len(keys) == 1 else nested(keys[1:], value)}


def _in_range(items: list[Any], key: str) -> bool:
    return key.isdecimal() and int(key) < len(items)
