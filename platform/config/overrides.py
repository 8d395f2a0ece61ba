"""Overrides `key.path=value` of the command line: values are YAML, applied to plain data before it is checked.

A value without quotes, brackets or line breaks is one number or text, whatever YAML would read it as. So nothing of a
path or a colour is taken for a comment, an anchor or a key.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from orchestray.platform.config import yaml_text
from orchestray.platform.config.base import Section
from orchestray.platform.config.error_location import sections_of, tag_of
from orchestray.platform.config.problems import Problem, nearest

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


def apply(
    data: dict[str, Any], keys: tuple[str, ...], value: Any, model: type[Section] | None = None
) -> Problem | None:
    """Set one key in place, creating missing sections on the way; return a problem if that is impossible.

    A key of a mapping may have dots in it: the longest one that is there counts.

    Args:
        data: plain data of a config.
        keys: path of the key, split at its dots.
        value: new value.
        model: schema of the config. Mappings that it leaves to the user get no key that they lack, unless they are
            empty: that would be a misspelt one.
    """
    place: Any = data
    at = 0
    while (end := at + _length(place, keys[at:])) < len(keys):
        if _may_be_unknown(place, keys, at, end) and (problem := _unknown(place, data, keys, at, model)) is not None:
            return problem
        key = ".".join(keys[at:end])
        if isinstance(place, list):
            place = place[int(key)] if _in_range(place, key) else None
        else:
            if place.get(key) is None:
                place[key] = {}
            place = place[key]
        if not isinstance(place, dict | list):
            return Problem(".".join(keys), f"cannot be set: {'.'.join(keys[:end])} holds no keys")
        at = end
    if _may_be_unknown(place, keys, at, end) and (problem := _unknown(place, data, keys, at, model)) is not None:
        return problem
    last = ".".join(keys[at:])
    if isinstance(place, dict):
        place[last] = value
    elif _in_range(place, last):
        place[int(last)] = value
    else:
        return Problem(".".join(keys), f"cannot be set: the list has the positions 0 to {len(place) - 1}")
    return None


def in_empty(data: Any, paths: Iterable[tuple[str, ...]]) -> set[tuple[str, ...]]:
    """Return those of some paths that lie in a mapping that is empty or missing, and that none of them sets as a whole.

    Each of these may be a new key, though `apply` takes the second of one mapping for a misspelt one.
    """
    given = set(paths)
    empty = {keys for keys in given if not find(data, keys[:-1])}
    return {keys for keys in empty if not any(keys[:depth] in given for depth in range(1, len(keys)))}


def find(data: Any, keys: tuple[str, ...]) -> Any:
    """Return the value that `apply` would replace; None if there is none."""
    place, at = data, 0
    while at < len(keys):
        end = at + _length(place, keys[at:])
        key = ".".join(keys[at:end])
        if isinstance(place, dict):
            place = place.get(key)
        else:
            place = place[int(key)] if isinstance(place, list) and _in_range(place, key) else None
        at = end
    return place


def _length(place: Any, keys: tuple[str, ...]) -> int:
    """Return how many of the keys make the longest key that a mapping has; 1 if it has none."""
    ends = range(len(keys), 1, -1) if isinstance(place, dict) else ()
    return next((end for end in ends if ".".join(keys[:end]) in place), 1)


def _own_from(model: type[Section], data: Any, keys: tuple[str, ...]) -> int | None:
    """Return the index of the key at which a path leaves the schema for an argument of the user's; None: it does not.

    Args:
        model: schema of the config.
        data: plain data of the config; a `type` in it selects the section.
        keys: path of a key.
    """
    sections, place = [model], data
    for index, key in enumerate(keys):
        if isinstance(place, list):
            place = place[int(key)] if _in_range(place, key) else None
            continue
        kind = place.get("type") if isinstance(place, dict) else None
        chosen = [section for section in sections if tag_of(section) == kind]
        sections = chosen or [section for section in sections if tag_of(section) is None] or sections
        entries = [section.model_fields[key] for section in sections if key in section.model_fields]
        if not entries:
            return index if any(section.model_config.get("extra") == "allow" for section in sections) else None
        sections = [section for entry in entries for section in sections_of(entry.annotation)]
        if not sections:
            return None
        place = place.get(key) if isinstance(place, dict) else None
    return None


def _may_be_unknown(place: Any, keys: tuple[str, ...], at: int, end: int) -> bool:
    """Return True if a mapping that has keys lacks this one."""
    return isinstance(place, dict) and bool(place) and ".".join(keys[at:end]) not in place


def _unknown(place: Any, data: Any, keys: tuple[str, ...], at: int, model: type[Section] | None) -> Problem | None:
    """Return the problem of a key that a mapping lacks, if it is a user's own; None if it may get the key."""
    own = None if model is None else _own_from(model, data, keys)
    if own is None or at <= own:
        return None
    rest, mapping = ".".join(keys[at:]), ".".join(keys[:at])
    hint = nearest(rest, place) or f"; it has {', '.join(place)}"
    return Problem(".".join(keys), f"is no key of {mapping}{hint} (to add one, set the whole of {mapping})")


def nested(keys: tuple[str, ...], value: Any) -> dict[str, Any]:
    """Return nested mappings that contain only this key."""
    return {keys[0]: value if len(keys) == 1 else nested(keys[1:], value)}


def _in_range(items: list[Any], key: str) -> bool:
    return key.isdecimal() and int(key) < len(items)
