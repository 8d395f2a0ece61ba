"""Overrides `key.path=value` of the command line: values are YAML, applied to plain data before it is checked.

A value without quotes, brackets or line breaks is one number or text, whatever YAML would read it as. So nothing of a
path or a colour is taken for a comment, an anchor or a key.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from orchestray.platform.config import yaml_text
from orchestray.platform.config.problems import Problem

_YAML_BEGINS_WITH = ("{", "[", '"', "'", "!!")
_QUOTE = "quote what is text, as in 'name=\"a #1\"'"


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
            pairs.append((keys, value_of(text)))
        except yaml_text.YamlError as problem:
            problems.append(Problem(path, f"the value {text!r} cannot be read: {problem}"))
    return pairs, problems


def value_of(text: str) -> Any:
    """Return the value that the text after the equals sign stands for.

    Raises:
        YamlError: it is not YAML, or could be read in two ways.
    """
    plain = text.strip()
    if not plain.startswith(_YAML_BEGINS_WITH):
        if "\n" not in plain:
            _refuse_block(plain)
            return yaml_text.scalar(plain)
        if yaml_text.is_plain_text(plain):  # YAML would make blanks of its line breaks
            return plain
    elif "\n" not in plain and yaml_text.has_comment(plain):
        raise yaml_text.YamlError(f"a # after a blank begins a comment, which would cut it; {_QUOTE}")
    return yaml_text.read(text)


def _refuse_block(text: str) -> None:
    """Refuse a line that is text as well as keys or a list of YAML."""
    if len(text) > 1 and not text.endswith(":") and yaml_text.is_block(text):
        raise yaml_text.YamlError(f"it may be text, or keys or a list; {_QUOTE}, or write {{key: value}} or [value]")


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
