"""Conversion of answers of the user's own code to JSON values. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import numpy as np
import orjson

_OPTIONS = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS
_MISSING = ("NaT", "<NA>")
"""Texts of pandas' missing values."""


def json_values(value: Any) -> Any:
    """Return a value as JSON values of its own; numbers that are not finite, and missing values, become None.

    Any process can read them, and nothing that the caller does later changes them.

    Args:
        value: JSON values, also of numpy, torch and pandas, named tuples, sets, sequences and times, nested; keys may
            be numbers.

    Raises:
        TypeError: something in it has no such form.
    """
    try:
        text = orjson.dumps(value, _plain, _OPTIONS)
    except TypeError:  # keys are not passed to the hook
        text = orjson.dumps(_with_plain_keys(value), _plain, _OPTIONS)
    return orjson.loads(text)


def as_numpy(value: Any) -> Any:
    """Return a tensor of any library as an array; anything else, and a table, as it is."""
    if hasattr(value, "detach"):  # of torch
        tensor = value.detach().cpu()
        return (tensor.float() if str(tensor.dtype) == "torch.bfloat16" else tensor).numpy()  # numpy lacks that type
    is_array = hasattr(value, "__array__") and not isinstance(value, np.ndarray | np.generic)
    return np.asarray(value) if is_array and not hasattr(value, "columns") else value


def _plain(value: Any) -> Any:
    value = as_numpy(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    if hasattr(value, "_asdict"):  # a named tuple
        return value._asdict()
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, AbstractSet | Sequence) and not isinstance(value, bytes | bytearray | memoryview):
        return list(value)
    if str(value) in _MISSING:
        return None
    if hasattr(value, "isoformat"):  # pandas' own
        return value.isoformat()
    raise TypeError(f"no JSON for a {type(value).__name__}")


def _with_plain_keys(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {
            key.item() if isinstance(key, np.generic) else key: _with_plain_keys(each) for key, each in value.items()
        }
    if type(value) in {list, tuple}:
        return [_with_plain_keys(each) for each in value]
    return value
