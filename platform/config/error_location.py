"""The place of a pydantic error in the schema: its location is followed through sections, lists and unions."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

from pydantic import Discriminator
from pydantic.fields import FieldInfo

from orchestray.platform.config.base import Section


@dataclass(frozen=True)
class Choice:
    """One form of a key that may have several, such as a number or a word."""

    path: str
    """Dotted path of the key."""
    is_inside: bool
    """True if the error is inside the form: then the value has this form."""


@dataclass(frozen=True)
class Place:
    """The place of an error in the schema."""

    path: str
    """Dotted path, without what pydantic adds for the members of unions."""
    section: type[Section] | None
    """Section that contains the last key."""
    family: list[type[Section]] = field(default_factory=list)
    """Sections of the union that `section` belongs to, itself included, if `type` selects the member."""
    members: list[type[Section]] = field(default_factory=list)
    """Sections that are possible at this place."""
    choice: Choice | None = None


def locate(model: type[Section], location: tuple[int | str, ...]) -> Place:
    """Follow a pydantic location through the schema of `model`, and return the place."""
    path: list[str] = []
    members: list[type[Section]] = [model]
    family: list[type[Section]] = []
    holder: type[Section] | None = None
    is_choice, choice = False, None
    is_container = False
    for index, item in enumerate(location):
        if is_container:
            path.append(str(item))
            is_container = False
        elif len(members) > 1:
            family = members
            members = [section for section in members if tag_of(section) in (item, None)][:1]
        elif is_choice:  # pydantic's name of the form that did not fit
            choice = Choice(".".join(path), is_inside=index < len(location) - 1)
            is_choice = False
        elif isinstance(item, int):
            path.append(str(item))
        else:
            holder = members[0] if members else None
            path.append(item)
            entry = holder.model_fields.get(item) if holder else None
            members = sections_of(entry.annotation) if entry else []
            is_choice = entry is not None and has_forms(entry)
            is_container = entry is not None and get_origin(entry.annotation) in (dict, list, tuple)
    return Place(".".join(path), holder, family if holder in family else [], members, choice)


def sections_of(annotation: Any) -> list[type[Section]]:
    """Return the sections that an annotation allows."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return [annotation]
    return [section for argument in get_args(annotation) for section in sections_of(argument)]


def tag_of(section: type[Section]) -> str | None:
    """Return the value of `type` that selects this section in its union; None if it has none."""
    entry = section.model_fields.get("type")
    names = get_args(entry.annotation) if entry else ()
    return str(names[0]) if names else None


def has_forms(entry: FieldInfo) -> bool:
    """Return True if a key has several possible forms that `type` does not distinguish."""
    if get_origin(entry.annotation) not in (Union, UnionType) or entry.discriminator is not None:
        return False
    forms = [form for form in get_args(entry.annotation) if form is not NoneType]
    return len(forms) > 1 and not any(isinstance(item, Discriminator) for item in entry.metadata)
