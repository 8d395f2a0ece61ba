"""JSON objects as pydantic models, whose errors are `InputError`s."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ModelWrapValidatorHandler, ValidationError, model_validator
from pydantic.fields import FieldInfo

from orchestray.serving.models.errors import InputError
from orchestray.serving.models.signature import kind_of

_LONGEST_SHOWN = 100


class JsonObject(BaseModel):
    """A JSON object in which null stands for a field's default, 2.0 for 2, and an unknown name is an error.

    The description of a field begins with the values that it takes, up to a semicolon: errors repeat that.

    Raises:
        InputError: names a field that is invalid.
    """

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, protected_namespaces=(), use_attribute_docstrings=True
    )

    @model_validator(mode="wrap")
    @classmethod
    def _check(cls, value: Any, check: ModelWrapValidatorHandler[Self]) -> Self:
        if isinstance(value, dict):
            value = {name: _plain(each) for name, each in value.items() if each is not None}
        try:
            return check(value)
        except ValidationError as error:
            raise input_error(error.errors(include_url=False), cls.model_fields) from None


def _plain(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def input_error(errors: Iterable[Mapping[str, Any]], fields: Mapping[str, FieldInfo] | None = None) -> InputError:
    """Return one of pydantic's errors in words.

    Args:
        errors: as of `ValidationError.errors()`. Unknown names go first: a misspelt one is missing as well.
        fields: fields of the model; None: unknown.
    """
    error, fields = min(errors, key=lambda each: each["type"] != "extra_forbidden"), fields or {}
    name, *inner = error["loc"] or ("the body",)
    field = "".join([str(name), *(f"[{part}]" if isinstance(part, int) else f".{part}" for part in inner)])
    if error["type"] == "extra_forbidden" and fields:
        return InputError(field[:_LONGEST_SHOWN], f"one of {', '.join(fields)}", "a name that is none of them")
    described = fields[name].description if name in fields else None
    wanted = described.partition(";")[0] if described else str(error["msg"]).removeprefix("Input should be ")
    return InputError(field, wanted, "nothing" if error["type"] == "missing" else _shown(error["input"]))


def _shown(value: Any) -> str:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return str(value)[:_LONGEST_SHOWN] if is_number else "an empty text" if value == "" else kind_of(value)
