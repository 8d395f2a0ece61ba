"""Conversion of answers of the user's own code to JSON values. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from datetime import timedelta
from decimal import Decimal
from typing import Any

import numpy as np
import orjson
from pydantic_core import to_jsonable_python

_OPTIONS = orjson.OPT_NON_STR_KEYS  # without OPT_SERIALIZE_NUMPY, which writes NaT as a date
_FIRST, _LAST = (np.datetime64(f"{year}", "us") for year in ("0001", "10000"))
_MISSING = ("NaT", "<NA>")
"""Texts of pandas' missing values."""


def json_values(value: Any) -> Any:
    """Return a value as JSON values of its own; numbers that are not finite, and missing values, become None.

    Any process can read them, and nothing that the caller does later changes them.

    Args:
        value: JSON values, also of numpy, torch, pandas and Arrow, named tuples, sets, sequences, times, durations and
            decimals, nested; keys may be numbers. Decimals become texts, which keep their digits.

    Raises:
        TypeError: something in it has no such form.
    """
    try:
        text = orjson.dumps(value, _plain, _OPTIONS)
    except TypeError:  # keys are not passed to the hook
        text = orjson.dumps(_with_plain_keys(value), _plain, _OPTIONS)
    return orjson.loads(text)


def as_numpy(value: Any) -> Any:
    """Return a tensor of any library as an array, or a list if values are missing; else, and a table, as it is."""
    if hasattr(value, "detach"):  # of torch
        tensor = value.detach().cpu().to_dense().resolve_neg()
        is_unknown = str(tensor.dtype).startswith(("torch.bfloat16", "torch.float8"))  # types that numpy lacks
        return (tensor.float() if is_unknown else tensor).numpy()
    if isinstance(value, np.ndarray | np.generic) or not hasattr(value, "__array__") or hasattr(value, "columns"):
        return value
    if hasattr(value, "to_pylist"):  # of Arrow; of its whole numbers numpy makes floats, too, also in lists of them
        return value.to_pylist() if value.null_count or value.type.num_fields else np.asarray(value)
    # Of whole numbers of pandas, numpy makes floats where one is missing: an id of 2**53 + 1 would be another.
    is_nullable = getattr(getattr(value, "dtype", None), "kind", "") in ("i", "u") and hasattr(value, "isna")
    return np.asarray(value, object) if is_nullable and value.isna().any() else np.asarray(value)


def times(value: Any) -> Any:
    """Return the times or durations of an array of numpy as those of Python, and None for NaT.

    Raises:
        TypeError: a time is before the year 1, or after 9999.
    """
    value = value.astype(f"{value.dtype.kind}8[us]")  # of nanoseconds `tolist` makes integers
    known = value[~np.isnat(value)]
    if value.dtype.kind == "M" and not ((known >= _FIRST) & (known < _LAST)).all():
        raise TypeError("no JSON for times before the year 1 or after 9999")
    return value.tolist()


def _written(array: np.ndarray[Any, Any]) -> Any:
    try:
        return orjson.Fragment(orjson.dumps(array, option=orjson.OPT_SERIALIZE_NUMPY))
    except TypeError:  # of a type such as longdouble
        return array.tolist()


def _of_numpy(value: Any) -> Any:
    if value.dtype.kind in "mM":
        return times(value)
    if value.dtype.names:  # `tolist` leaves the names out
        is_row = isinstance(value, np.void)
        return {name: value[name] for name in value.dtype.names} if is_row else list(value) if value.ndim else value[()]
    if isinstance(value, np.ndarray) and value.dtype.kind in "fiub" and value.flags.c_contiguous:
        return _written(value)
    return float(value) if isinstance(value, np.longdouble) else value.tolist()  # which returns a longdouble as it is


def _plain(value: Any) -> Any:
    value = as_numpy(value)
    if isinstance(value, np.ndarray | np.generic):
        return _of_numpy(value)
    if isinstance(value, float):  # of a class of its own
        return float(value)
    if isinstance(value, Decimal):
        return str(value) if value.is_finite() else None
    if hasattr(value, "tolist"):
        return value.tolist()
    if hasattr(value, "_asdict"):  # a named tuple
        return value._asdict()
    if hasattr(value, "model_dump"):  # of pydantic
        return value.model_dump()
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, AbstractSet | Sequence) and not isinstance(value, bytes | bytearray | memoryview):
        return list(value)
    if str(value) in _MISSING:
        return None
    if hasattr(value, "isoformat"):  # pandas' own
        return value.isoformat()
    if isinstance(value, timedelta):
        return to_jsonable_python(value)  # ISO 8601, as those of pandas
    raise TypeError(f"no JSON for a {type(value).__name__}")


def _with_plain_keys(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {
            key.item() if isinstance(key, np.generic) else key: _with_plain_keys(each) for key, each in value.items()
        }
    if type(value) in {list, tuple}:
        return [_with_plain_keys(each) for each in value]
    return value
