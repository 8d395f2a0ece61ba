"""Samples of `POST /invocations`, in the forms of MLflow: rows by place or by names of columns, and CSV."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from orchestray.serving.http.problems import HttpProblem, wrong_input
from orchestray.serving.models.signature import Signature, fixed_shape, kind_of, num_elements

FORMS = ("inputs", "instances", "dataframe_split", "dataframe_records")
Row: TypeAlias = tuple[str, Any]
"""A place, as in errors, and the values of a sample there."""
_LONGEST_FIELD = 2**31 - 1
"""Longest value of a CSV, such as an image in base64: the body itself has a limit."""
_MOST_NAMED = 20
"""Most columns that an error lists."""
CHARSETS = {
    **dict.fromkeys(("utf-8", "utf8"), "utf-8-sig"),  # which passes over a byte order mark
    **{name: name for name in ("us-ascii", "ascii", "utf-16", "iso-8859-1", "latin1", "windows-1252", "cp1252")},
}
"""Maps names of encodings of CSV to Python's."""
_FLAGS = {"true": True, "True": True, "false": False, "False": False}


def rows_of_json(value: Mapping[str, Any], signature: Signature) -> list[Row]:
    """Return the values of each sample of a request, in any of MLflow's four forms.

    Raises:
        HttpProblem: 422.
    """
    given = [name for name in FORMS if name in value]
    if len(given) != 1 or value.keys() - {*FORMS, "params"}:
        raise wrong_input("the body", f"exactly one of {', '.join(FORMS)}", ", ".join(sorted(value)) or "none")
    if not isinstance(value.get("params"), dict | None):
        raise wrong_input("params", "an object", kind_of(value["params"]))
    field = given[0]
    rows = value[field]
    if field == "dataframe_split":
        return _ordered(_split(rows), signature, "dataframe_split.data")
    if field == "inputs" and isinstance(rows, dict):
        rows = _rows_of_columns(rows)
    if not isinstance(rows, list):
        raise wrong_input(field, "a list of samples", kind_of(rows))
    for index, row in enumerate(rows):
        if field == "dataframe_records" and not isinstance(row, dict):
            raise wrong_input(f"{field}[{index}]", "an object: values by column", kind_of(row))
    return _ordered(rows, signature, field)


def rows_of_csv(body: bytes, signature: Signature, has_header: bool | None = None, charset: str = "utf-8") -> list[Row]:
    """Return the values of each line; where the model takes any values, they may be texts.

    Args:
        body: the text.
        signature: inputs of the model.
        has_header: True if the first line has the names of the columns; None: if it has texts.
        charset: encoding of the text, one of `CHARSETS`.

    Raises:
        HttpProblem: 422.
    """
    csv.field_size_limit(_LONGEST_FIELD)
    if charset not in CHARSETS:
        raise wrong_input("charset", f"one of {', '.join(CHARSETS)}", repr(charset[:60]))
    try:
        whole = [line for line in csv.reader(io.StringIO(body.decode(CHARSETS[charset]))) if line]
        if not whole:
            return []
        first, *lines = whole
        has_names = _are_names(first) if has_header is None else has_header
        read = _cell if takes_any(signature) else _number
        rows = [[read(value) for value in line] for line in (lines if has_names else [first, *lines])]
    except (UnicodeDecodeError, ValueError, csv.Error) as error:
        raise HttpProblem(422, f"The body is not CSV of numbers, with or without a header: {error}.") from None
    if has_names and not lines:
        raise wrong_input("the body", "lines of values behind the header, which is the first line", "none")
    if has_names:
        return _ordered(_named(first, rows, "line", start=2), signature, "line", start=2)
    lines_of = [(f"line {number}", row) for number, row in enumerate(rows, 1)]
    if takes_any(signature):
        return lines_of
    if len(signature.inputs) > 1:
        names = ", ".join(spec.name for spec in signature.inputs)
        raise wrong_input("the body", f"a header with the names of the inputs, {names}", "numbers in the first line")
    spec = signature.inputs[0]
    for place, row in lines_of:
        if len(row) != num_elements(spec):
            raise wrong_input(place, f"{num_elements(spec)} columns (the input is {spec})", f"{len(row)}")
    return [(place, np.array(row, dtype=object).reshape(fixed_shape(spec)).tolist()) for place, row in lines_of]


def takes_any(signature: Signature) -> bool:
    """Return True if a row of named columns is a sample as it is, or none: the columns have no order to be put in."""
    return signature.takes_any_value or any(spec.is_variable for spec in signature.inputs)


def _ordered(rows: Sequence[Any], signature: Signature, field: str, start: int = 0) -> list[Row]:
    """Return the rows with their places; those by column become the value of the only input."""
    is_named = len(signature.inputs) == 1 and not takes_any(signature)  # values of several inputs are named anyway
    ordered = []
    for index, row in enumerate(rows, start):
        place = f"{field} {index}" if start else f"{field}[{index}]"
        ordered.append((place, _in_order(row, signature, place) if is_named and isinstance(row, dict) else row))
    return ordered


def _in_order(row: Mapping[str, Any], signature: Signature, field: str) -> Any:
    """Return the value of the only input from values by column: one for the input, or one for each of its features."""
    spec, features = signature.inputs[0], signature.feature_names
    if row.keys() == {spec.name} and spec.name not in features:
        return row[spec.name]
    if not features:
        features = {str(place): 1 for place in range(num_elements(spec))}
        if not features.keys() >= {name for name in row if name.isdecimal()} == row.keys():
            wanted = "rows without names, as its task has no feature_names to put columns in order by"
            raise wrong_input(field, wanted, f"the columns {_listed(row)}")
    for name in (*row, *features):
        if name not in row or name not in features:
            got = f"one named {name[:60]!r} as well" if name in row else f"none named {name!r}"
            raise wrong_input(field, f"{len(features)} columns, {_listed(features)}", got)
    values: list[Any] = []
    for name, count in features.items():
        part = np.array([row[name]], dtype=object).reshape(-1).tolist()
        if len(part) != count or isinstance(part[0], list):
            raise wrong_input(f"{field}.{name}", "a number" if count == 1 else f"{count} numbers", kind_of(row[name]))
        values += part
    if spec.numpy_dtype.kind == "f":  # a column of flags was trained on as 0 and 1
        values = [int(value) if isinstance(value, bool) else value for value in values]
    return np.array(values, dtype=object).reshape(fixed_shape(spec)).tolist()


def _listed(names: Mapping[str, Any]) -> str:
    return ", ".join([*names][:_MOST_NAMED]) + (", ..." if len(names) > _MOST_NAMED else "")


def _split(value: Any) -> list[dict[str, Any]]:
    """Return the rows of a data frame in pandas' orientation `split`, as values by column."""
    columns = value.get("columns") if isinstance(value, dict) else None
    rows = value.get("data") if isinstance(value, dict) else None
    if not isinstance(columns, list) or not isinstance(rows, list) or {*map(type, columns)} - {str, int}:
        wanted = '{"columns": [<name>, ...], "data": [[<value>, ...], ...]}'
        raise wrong_input("dataframe_split", wanted, kind_of(value))
    return _named([str(column) for column in columns], rows, "dataframe_split.data")


def _named(columns: Sequence[str], rows: Sequence[Any], field: str, start: int = 0) -> list[dict[str, Any]]:
    if len({*columns}) < len(columns):
        raise wrong_input(field, "each column once", f"the columns {_listed(dict.fromkeys(sorted(columns)))}")
    for index, row in enumerate(rows, start):
        if not isinstance(row, list) or len(row) != len(columns):
            place = f"{field} {index}" if start else f"{field}[{index}]"
            raise wrong_input(place, f"a list of {len(columns)}", kind_of(row))
    return [dict(zip(columns, row, strict=True)) for row in rows]


def _rows_of_columns(columns: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the samples in a mapping from names to lists of values of equal length."""
    lengths = {len(column) if isinstance(column, list) else -1 for column in columns.values()}
    if len(lengths) != 1 or -1 in lengths:
        wanted = "a list of samples, or lists by name that are as long as each other"
        raise wrong_input("inputs", wanted, "other values")
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _are_names(first: Sequence[str]) -> bool:
    """Return True if the first line is a header: it has texts, or the numbers of pandas' columns beside an index."""
    return any(isinstance(_value(text), str) for text in first) or [*first] == ["", *map(str, range(len(first) - 1))]


def _cell(text: str) -> float | str | None:
    """Parse a value for a model that takes any: as in JSON, no number is infinite or NaN, and Nan may be a name."""
    value = _value(text)
    return text if isinstance(value, float) and not math.isfinite(value) else value


def _value(text: str) -> float | str | None:
    """Parse a number; what is none is a text, or None where nothing stands."""
    try:
        return _number(text)
    except ValueError:
        return text or None


def _number(text: str) -> float:
    """Parse a number; an integer stays one, since models that take integers accept nothing else."""
    if text in _FLAGS:
        return _FLAGS[text]
    if "_" in text:  # which Python takes in numbers, and 0_1 is a name
        raise ValueError(f"{text[:60]!r} is no number")
    try:
        return int(text)
    except ValueError:
        return float(text)
