"""What is wrong with a config, as sentences: pydantic's errors put in a user's words, with the nearest known key."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, get_args

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from orchestray.platform.config.base import Section


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong."""

    path: str
    """Dotted path of the key; empty for the config as a whole."""
    text: str
    """What is wrong with it, and what to do."""

    def line(self, label: str) -> str:
        """The problem as it is printed, `label` being the file."""
        return ": ".join(part for part in (label, self.path, self.text) if part)


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint of the form "; did you mean 'x'?", or nothing where no known name is near."""
    close = get_close_matches(name, sorted(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""


def shown(value: object) -> str:
    """A value as a user would write it in the file, cut to a line."""
    if isinstance(value, str):
        text = repr(value)
    else:
        try:
            text = json.dumps(value)
        except (TypeError, ValueError):
            text = f"a value of type {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:57]}..."


def translate(error: ValidationError, model: type[Section]) -> list[Problem]:
    """Every problem of a validation error of `model`, in the order of the schema."""
    places = [_locate(model, details["loc"]) for details in error.errors(include_url=False)]
    unusable = {
        path.removesuffix(".type")
        for (path, _, _), details in zip(places, error.errors(include_url=False), strict=True)
        if path.endswith(".type") and details["type"] == "literal_error"
    }
    problems = []
    for (path, section, union), details in zip(places, error.errors(include_url=False), strict=True):
        if details["type"] == "extra_forbidden" and path.rpartition(".")[0] in unusable:
            continue  # keys of another type than the one that is known: the type is what is wrong
        problems.append(_problem(path, section, union, details))
    return problems


def _members(annotation: Any) -> list[type[Section]]:
    """The sections an annotation may stand for."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return [annotation]
    return [section for argument in get_args(annotation) for section in _members(argument)]


def _tag(section: type[Section]) -> str | None:
    names = get_args(section.model_fields["type"].annotation)
    return str(names[0]) if names else None


def _locate(
    model: type[Section], location: tuple[int | str, ...]
) -> tuple[str, type[Section] | None, list[type[Section]]]:
    """Follow pydantic's location through the schema.

    Returns: the dotted path without the tags of unions; the section that holds the last key; and, where the location
    ends at a union, its members.
    """
    path: list[str] = []
    members: list[type[Section]] = [model]
    holder: type[Section] | None = None
    for item in location:
        if len(members) > 1:
            members = [section for section in members if _tag(section) in (item, None)][:1]
            continue
        holder = members[0] if members else None
        path.append(str(item))
        field = holder.model_fields.get(str(item)) if holder else None
        members = _members(field.annotation) if field else []
    return ".".join(path), holder, members if len(members) > 1 else []


def _problem(path: str, section: type[Section] | None, union: list[type[Section]], details: ErrorDetails) -> Problem:
    kind, value, context = details["type"], details["input"], details.get("ctx", {})
    if kind in {"union_tag_invalid", "union_tag_not_found"}:
        return _type_problem(path, value, [tag for tag in map(_tag, union) if tag])
    if kind == "extra_forbidden":
        return Problem(path, _unknown_key(path, section))
    if kind == "value_error":
        return Problem(path, str(context["error"]))
    if kind == "missing":
        return Problem(path, "is required, and missing")
    wanted = _wanted(kind, path, context)
    return Problem(path, f"must be {wanted}, got {shown(value)}{_remark(kind, value, context)}")


def _unknown_key(path: str, section: type[Section] | None) -> str:
    known = sorted(section.model_fields) if section else []
    hint = nearest(path.rpartition(".")[2], known)
    return f"is no known key{hint}" if hint else f"is no known key; known here: {', '.join(known)}"


def _type_problem(path: str, value: object, tags: list[str]) -> Problem:
    choice = ", ".join(tags)
    if not isinstance(value, Mapping):
        return Problem(path, f"must be a mapping with a type ({choice}), got {shown(value)}")
    if value.get("type") is None:
        return Problem(f"{path}.type", f"is required, and missing; there are {choice}")
    given = value["type"]
    hint = nearest(given, tags) if isinstance(given, str) else ""
    return Problem(f"{path}.type", f"must be one of {choice}, got {shown(given)}{hint}")


_KINDS = {
    "int_type": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "finite_number": "a finite number",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "a mapping of keys to values",
    "model_type": "a mapping of keys to values",
    "model_attributes_type": "a mapping of keys to values",
    "invalid_key": "a key of text",
}
_BOUNDS = {"greater_than_equal": (">=", "ge"), "greater_than": (">", "gt"), "less_than_equal": ("<=", "le")}


def _wanted(kind: str, path: str, context: Mapping[str, Any]) -> str:
    if kind in _KINDS:
        return _KINDS[kind]
    if kind in _BOUNDS or kind == "less_than":
        sign, key = _BOUNDS.get(kind, ("<", "lt"))
        return f"{sign} {context[key]:g}"
    if kind == "literal_error":
        return _choice(context)
    if kind == "string_pattern_mismatch" and path == "name":
        return "letters, digits, '.', '_' and '-', starting with a letter or a digit"
    if kind == "string_too_short":
        return "text that is not empty"
    if kind == "string_too_long":
        return f"at most {context['max_length']} characters"
    if kind == "too_long":
        return f"a list of {context['max_length']}"
    return "of another form"


def _remark(kind: str, value: object, context: Mapping[str, Any]) -> str:
    if kind == "string_type" and isinstance(value, int | float):
        return " (put it in quotes)"
    if kind in {"int_type", "float_type"} and isinstance(value, str) and _is_number(value):
        return " (take it out of its quotes)"
    if kind == "literal_error" and isinstance(value, str):
        return nearest(value, _expected(context))
    return ""


def _expected(context: Mapping[str, Any]) -> list[str]:
    """The values of a literal, from pydantic's "'a', 'b' or 'c'"."""
    return [part.strip(" '") for part in str(context["expected"]).replace(" or ", ",").split(",")]


def _choice(context: Mapping[str, Any]) -> str:
    names = _expected(context)
    return names[0] if len(names) == 1 else f"one of {', '.join(names)}"


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
