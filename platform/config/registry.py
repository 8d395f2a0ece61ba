"""Registries of sections: union members selected by `type`, each with the class that it configures."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from difflib import get_close_matches
from functools import reduce
from importlib import import_module
from operator import or_
from typing import Annotated, Any, Generic, TypeVar

from pydantic import Field, Tag

from orchestray.platform.config.base import OWN_CLASS, Section, type_or, type_or_class
from orchestray.platform.errors import ConfigError

Params = TypeVar("Params", bound=Section)


class Registry(Collection[str], Generic[Params]):
    """The choices of a config key that has a `type`.

    A choice is a section with the parameters and, if one class implements it, that class. Both are named as
    "module:Class" and imported on demand: reading a config imports only the sections. So a module whose imports are
    slow keeps its section in a light module beside it.
    """

    def __init__(
        self,
        key: str,
        entries: Mapping[str, tuple[str, str | None]],
        *,
        noun: str,
        default: str | None = None,
        own: str | None = None,
    ) -> None:
        """Define the choices.

        Args:
            key: dotted key of the config, for messages.
            entries: maps each `type` to its section and its class or None.
            noun: name for a choice in messages.
            default: the `type` of a section without one; None: the `type` is required.
            own: "module:Class" of the section for a `type` that names a class, as "module:Class"; None: no such types.
        """
        self.key = key
        self._entries = dict(entries)
        self._noun = noun
        self._default = default
        self._own = own

    def add(self, name: str, params: str, place: str | None = None) -> None:
        """Register one more choice, before the union is made.

        Args:
            name: its `type`.
            params: "module:Class" of its section.
            place: "module:Class" of the class that implements it.
        """
        self._entries[name] = (params, place)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def params(self, name: str) -> type[Params]:
        """Return the section of a choice.

        Raises:
            ConfigError: the choice does not exist.
        """
        found: type[Params] = _load(self._entry(name)[0])
        return found

    def find(self, name: str) -> Any:
        """Return the class that implements a choice.

        Raises:
            ConfigError: the choice does not exist, or is not implemented by one class.
        """
        place = self._entry(name)[1]
        if place is None:
            raise ConfigError(f"{self.key}.type: {name!r} is not made of one class.")
        return _load(place)

    def name_of(self, implementation: type) -> str | None:
        """Return the name of the choice that a class implements, or None; imports nothing."""
        place = f"{implementation.__module__}:{implementation.__qualname__}"
        return next((name for name, entry in self._entries.items() if entry[1] == place), None)

    def union(self) -> Any:
        """Return the annotation of a field that holds one of the choices; imports all sections."""
        sections = {name: _load(params) for name, (params, _) in self._entries.items()}
        if self._own is not None:
            tagged = [Annotated[section, Tag(name)] for name, section in sections.items()]
            return Annotated[reduce(or_, [*tagged, Annotated[_load(self._own), Tag(OWN_CLASS)]]), type_or_class()]
        if self._default is None:
            return Annotated[reduce(or_, sections.values()), Field(discriminator="type")]
        tagged = [Annotated[section, Tag(name)] for name, section in sections.items()]
        return Annotated[reduce(or_, tagged), type_or(self._default)]

    def _entry(self, name: str) -> tuple[str, str | None]:
        if name not in self._entries:
            close = get_close_matches(name, self._entries, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            there = ", ".join(self._entries)
            raise ConfigError(f"{self.key}.type: {name!r} is not {self._noun}; there are {there}{hint}")
        return self._entries[name]


def _load(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)
