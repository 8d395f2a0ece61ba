"""Conditional keys: those of a space that exist only under values of others (`when`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

ABSENT: Final = object()
"""Value of a key that a trial does not have."""


@dataclass(frozen=True)
class Conditions:
    """The conditions of a space's keys, by the values of others."""

    when: Mapping[str, Mapping[str, tuple[Any, ...]]] = field(default_factory=dict)
    """For each conditional key the keys that it depends on, with the values under which it exists; all must hold."""
    base: Mapping[str, Any] = field(default_factory=dict)
    """Values in the base config of the keys in conditions that are not searched."""

    def __bool__(self) -> bool:
        return bool(self.when)

    def is_active(self, key: str, values: Mapping[str, Any]) -> bool:
        """Return True if a trial with these values has a key."""
        return all(self._holds(other, allowed, values) for other, allowed in self.when.get(key, {}).items())

    def _holds(self, other: str, allowed: tuple[Any, ...], values: Mapping[str, Any]) -> bool:
        return self.is_active(other, values) and is_among(self.value_of(other, values), allowed)

    def active(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of the keys that a trial with these values has."""
        made = dict(values)
        while gone := [key for key in made if not self.is_active(key, made)]:
            for key in gone:
                del made[key]
        return made

    def value_of(self, key: str, values: Mapping[str, Any]) -> Any:
        """Return the value that a trial has at a key of the space or the base; `ABSENT` if it has none."""
        if key in values:
            return values[key]
        section = around(key, values)
        if section is None or not self.is_active(section, values):
            return self.base.get(key, ABSENT)
        place = values[section]
        for name in key.removeprefix(f"{section}.").split("."):
            place = place.get(name, ABSENT) if isinstance(place, Mapping) else ABSENT
        return place

    def parents(self, key: str, keys: Iterable[str]) -> list[str]:
        """Return the keys of a space that a key's existence depends on, directly."""
        found = []
        known = list(keys)
        for other in self.when.get(key, {}):
            parent = other if other in known else around(other, known)
            if parent is not None:
                found.append(parent)
        return found

    def order(self, keys: Iterable[str]) -> list[str]:
        """Return the keys of a space, each after those that it depends on; else in their order.

        Raises:
            ValueError: keys depend on each other in a circle; its text names them.
        """
        known, placed = list(keys), dict[str, None]()

        def place(key: str, way: tuple[str, ...]) -> None:
            if key in way:
                raise ValueError(" -> ".join([*way[way.index(key) :], key]))
            for parent in self.parents(key, known):
                if parent not in placed:
                    place(parent, (*way, key))
            placed[key] = None

        for key in known:
            if key not in placed:
                place(key, ())
        return list(placed)


def around(key: str, keys: Iterable[str]) -> str | None:
    """Return the innermost section around a key that is among `keys`; None if there is none."""
    return max((other for other in keys if key.startswith(f"{other}.")), key=len, default=None)


def is_among(value: Any, allowed: Iterable[Any]) -> bool:
    """Return True if a value is one of some; true and 1 differ."""
    return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in allowed)


def conditions_of(when: Mapping[str, Mapping[str, Any]], base: Mapping[str, Any]) -> Conditions:
    """Return the conditions of a space as a config has them.

    Args:
        when: for each conditional key, keys with a value or a list of values.
        base: values in the base config of keys that are not searched.
    """
    listed = {
        key: {other: tuple(value) if isinstance(value, list | tuple) else (value,) for other, value in given.items()}
        for key, given in when.items()
        if given
    }
    return Conditions(listed, base)
