"""Problems of a config as sentences: pydantic's errors in a user's words, with the nearest known key."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from math import isfinite
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from orchestray.platform.config.base import WORDS_OF_PATTERNS, Section
from orchestray.platform.config.error_location import Place, locate, tag_of


@dataclass(frozen=True)
class Problem:
    """One problem of a config."""

    path: str
    """Dotted path of the key; empty for the config as a whole."""
    text: str
    """Description of the problem, and what to do about it."""

    def line(self, label: str) -> str:
        """Return the problem as a line of text; `label` is the file."""
        return ": ".join(part for part in (label, self.path, self.text) if part)


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a hint of the form "; did you mean 'x'?", or an empty text if no known name is similar."""
    close = _close(name, known)
    return f"; did you mean {close[0]!r}?" if close else ""


def _close(name: str, known: Iterable[str]) -> list[str]:
    return get_close_matches(name, sorted(known), n=1, cutoff=0.6)


def shown(value: object) -> str:
    """Return a value as a user would write it in the file, cut to one line."""
    if isinstance(value, str):
        text = repr(value)
    else:
        try:
            text = json.dumps(value)
        except (TypeError, ValueError):
            text = f"a value of type {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:57]}..."


def translate(error: ValidationError, model: type[Section]) -> list[Problem]:
    """Return every problem in a validation error of `model`, in the order of the schema."""
    found = [(locate(model, details["loc"]), details) for details in error.errors(include_url=False)]
    mistyped = _mistyped(found)
    problems: dict[str, Problem] = {}
    for place, details in found:
        if place.path in mistyped:
            continue
        problem = _problem(place, details) if place.choice is None else _of_a_choice(place, details, found)
        if problem is not None:
            problems[problem.path] = problem
    return list(problems.values())


Found = tuple[Place, ErrorDetails]


def _mistyped(found: Sequence[Found]) -> set[str]:
    """Return the missing keys that are present under a misspelt name: the hint for that name is enough."""
    missing = {place.path for place, details in found if details["type"] == "missing"}
    meant = set()
    for place, details in found:
        if details["type"] == "extra_forbidden" and place.section is not None:
            parent, dot, name = place.path.rpartition(".")
            meant |= {f"{parent}{dot}{key}" for key in _close(name, place.section.model_fields)}
    return missing & meant


def _of_a_choice(place: Place, details: ErrorDetails, found: Sequence[Found]) -> Problem | None:
    """Return the problem of a key with several forms: the one inside its form, or that the value has none of them."""
    assert place.choice is not None
    path, inside = place.choice.path, place.choice.is_inside
    forms = [(other, entry) for other, entry in found if other.choice is not None and other.choice.path == path]
    if any(other.choice.is_inside for other, _ in forms if other.choice is not None):
        return _problem(place, details) if inside else None
    wanted = " or ".join(dict.fromkeys(_wanted(other, entry) for other, entry in forms))
    remarks = [_remark(entry["type"], entry["input"], entry.get("ctx", {})) for _, entry in forms]
    return Problem(path, f"must be {wanted}, got {shown(details['input'])}{next(filter(None, remarks), '')}")


def _problem(place: Place, details: ErrorDetails) -> Problem:
    kind, value, context = details["type"], details["input"], details.get("ctx", {})
    path = place.path
    if kind in {"union_tag_invalid", "union_tag_not_found"}:
        return _type_problem(path, value, [tag_of(member) for member in place.members])
    if kind == "extra_forbidden":
        return Problem(path, _unknown_key(place))
    if kind == "value_error":
        return Problem(path, str(context["error"]))
    if kind == "missing" and isinstance(details["loc"][-1], int):  # an item of a list of fixed length
        path, _, index = path.rpartition(".")
        return Problem(path, f"must be a list of {int(index) + 1}, got {shown(value)}")
    if kind == "missing":
        return Problem(path, "is required, and missing")
    return Problem(path, f"must be {_wanted(place, details)}, got {shown(value)}{_remark(kind, value, context)}")


def _unknown_key(place: Place) -> str:
    name = place.path.rpartition(".")[2]
    others = [tag_of(other) or "" for other in place.family if name in other.model_fields]
    if others and place.section is not None:
        return f"is no key of {tag_of(place.section)}; {', '.join(others)} {'has' if len(others) == 1 else 'have'} it"
    known = sorted(place.section.model_fields) if place.section else []
    hint = nearest(name, known)
    return f"is no known key{hint}" if hint else f"is no known key; known here: {', '.join(known)}"


def _type_problem(path: str, value: object, tags_or_none: Sequence[str | None]) -> Problem:
    """Return the problem of a `type`; a section without a tag takes classes."""
    tags = [tag for tag in tags_or_none if tag]
    choice = ", ".join(tags)
    if not isinstance(value, Mapping):
        return Problem(path, f"must be a mapping with a type ({choice}), got {shown(value)}")
    if value.get("type") is None:
        return Problem(f"{path}.type", f"is required, and missing; there are {choice}")
    given = value["type"]
    hint = nearest(given, tags) if isinstance(given, str) else ""
    if None in tags_or_none and isinstance(given, str) and "." in given:
        hint = f"; a class is written with a colon: {':'.join(given.rsplit('.', 1))!r}"
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


def _wanted(place: Place, details: ErrorDetails) -> str:
    kind, context = details["type"], details.get("ctx", {})
    if place.choice is not None and kind == "model_type":
        return f"a mapping with {', '.join(place.members[0].model_fields)}"
    if kind in _KINDS:
        return _KINDS[kind]
    if kind in _BOUNDS or kind == "less_than":
        sign, key = _BOUNDS.get(kind, ("<", "lt"))
        bound = context[key]
        return f"{sign} {bound if isinstance(bound, int) else format(bound, 'g')}"
    if kind == "literal_error":
        return _choice(context)
    if kind == "string_pattern_mismatch":
        return WORDS_OF_PATTERNS[context["pattern"]]
    if kind == "string_too_short":
        return "text that is not empty"
    if kind == "string_too_long":
        return f"at most {context['max_length']} characters"
    if kind == "too_short":
        return f"a list of {context['min_length']} or more"
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
    """Return the values of a literal, parsed from pydantic's "'a', 'b' or 'c'"."""
    return [part.strip(" '") for part in str(context["expected"]).replace(" or ", ",").split(",")]


def _choice(context: Mapping[str, Any]) -> str:
    names = _expected(context)
    return names[0] if len(names) == 1 else f"one of {', '.join(names)}"


def _is_number(text: str) -> bool:
    try:
        return isfinite(float(text))
    except ValueError:
        return False
