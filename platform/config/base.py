"""The building blocks of config sections: strict scalars and a frozen model.

Scalars are strict: `true` is not accepted as a number, nor `"3"` as an integer. Values that YAML itself would misread
(`1e-3`) are handled where the YAML is read (yaml_text.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Strict

Text = Annotated[str, Strict(), Field(min_length=1)]
Flag = Annotated[bool, Strict()]
Whole = Annotated[int, Strict()]
Count = Annotated[int, Strict(), Field(ge=0)]
Positive = Annotated[int, Strict(), Field(ge=1)]
Seed = Annotated[int, Strict(), Field(ge=0, le=2**64 - 1)]
"""The seeds that torch's generators take."""
Number = Annotated[float, Strict(), Field(allow_inf_nan=False)]
AtLeastZero = Annotated[float, Strict(), Field(allow_inf_nan=False, ge=0)]
AboveZero = Annotated[float, Strict(), Field(allow_inf_nan=False, gt=0)]
Fraction = Annotated[float, Strict(), Field(allow_inf_nan=False, gt=0, lt=1)]
BelowOne = Annotated[float, Strict(), Field(allow_inf_nan=False, ge=0, lt=1)]
ZeroToOne = Annotated[float, Strict(), Field(allow_inf_nan=False, ge=0, le=1)]


WORDS_OF_PATTERNS: dict[str, str] = {}
"""Maps the pattern of a text to what it wants, in words."""


def text_like(pattern: str, words: str, *, max_length: int | None = None) -> Any:
    """Return the field of a text.

    Args:
        pattern: regular expression that the text has to match.
        words: the pattern in words, for the error of another text.
        max_length: most characters; None: any number.
    """
    WORDS_OF_PATTERNS[pattern] = words
    return Field(strict=True, pattern=pattern, max_length=max_length)


class Section(BaseModel):
    """A part of a config: frozen, and an unknown key is an error."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        validate_default=True,
        protected_namespaces=(),
        ser_json_inf_nan="constants",
    )


def type_or(default: str) -> Discriminator:
    """Return a discriminator that selects the union member by `type`; a mapping without it is of the default type."""

    def tag(value: Any) -> str | None:
        if isinstance(value, dict):
            return str(value.get("type", default))
        return getattr(value, "type", None)

    chosen: Callable[[Any], str | None] = tag
    return Discriminator(chosen)


OWN_CLASS = "module:Class"
"""Tag of the section for a `type` that names a class."""


def type_or_class() -> Discriminator:
    """Return a discriminator that selects the union member by `type`; a `type` with a colon names a user's class."""

    def tag(value: Any) -> str | None:
        name = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
        return OWN_CLASS if isinstance(name, str) and ":" in name else name

    chosen: Callable[[Any], str | None] = tag
    return Discriminator(chosen)
