"""JSON of what models return: values of libraries become plain ones, and what has no form is refused."""

from __future__ import annotations

import datetime as dt
from collections import deque
from decimal import Decimal
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from pydantic import BaseModel

from orchestray.serving.models.json_values import json_values

_FAR = [np.array(["2024", year], "M8[s]") for year in ("0000", "10000")]
_TABLE = np.array([(1, (2.5, np.nan))], [("id", "i8"), ("scores", "f4", 2)])
_ROW = {"id": 1, "scores": [2.5, None]}
_UNITS = ("D", "s", "us", "ns")


class Box(NamedTuple):
    left: int
    size: Any


class Point(BaseModel):
    x: int
    next: Point | None = None


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        ({"a": torch.ones(2), "b": [torch.tensor(2), np.arange(4)[::2]]}, {"a": [1.0, 1.0], "b": [2, [0, 2]]}),
        (torch.ones(1, dtype=torch.bfloat16, requires_grad=True), [1.0]),
        ([torch.ones(1, dtype=torch.float8_e5m2), torch.eye(1).to_sparse()], [[1.0], [[1.0]]]),
        (torch.ones(1, dtype=torch.complex64).conj().imag, [-0.0]),
        ({0: 0.25, np.int64(1): 0.5, np.str_("c"): 0.25}, {"0": 0.25, "1": 0.5, "c": 0.25}),
        ([{"top": {np.int64(3): [1]}}], [{"top": {"3": [1]}}]),
        (Box(1, (2, Box(3, 4))), {"left": 1, "size": [2, {"left": 3, "size": 4}]}),
        ([{1}, deque([2]), range(2)], [[1], [2], [0, 1]]),
        (MappingProxyType({"a": 1}), {"a": 1}),
        (np.datetime64("2024-01-01T00:00:00", "ns"), "2024-01-01T00:00:00"),
        ([dt.date(2024, 1, 1), pd.Timestamp("2024-01-01")], ["2024-01-01", "2024-01-01T00:00:00"]),
        ([np.float32("nan"), float("inf"), pd.NaT, pd.NA, None], [None] * 5),
        *[([np.array([["NaT", "2024-01-01"]], f"M8[{unit}]")], [[[None, "2024-01-01T00:00:00"]]]) for unit in _UNITS],
        ([np.datetime64("NaT"), {"a": np.datetime64("NaT", "ns")}], [None, {"a": None}]),
        ([np.array([1, 2**64 - 1], np.uint64), np.array(2.5)], [[1, 2**64 - 1], 2.5]),
        (pd.Series([1, None]), [1.0, None]),
        ([pd.array([2**53 + 1, None], "Int64"), pd.Series([None, 1], dtype="UInt8")], [[2**53 + 1, None], [None, 1]]),
        ([pa.array([2**53 + 1, None]), pa.chunked_array([[2**53 + 1]])], [[2**53 + 1, None], [2**53 + 1]]),
        (pa.array([[2**53 + 1, None], []]), [[2**53 + 1, None], []]),
        ([_TABLE, _TABLE[0], _TABLE.reshape(())], [[_ROW], _ROW, _ROW]),
        ([Decimal("1.10"), {"a": Decimal("NaN")}], ["1.10", {"a": None}]),
        ([type("Share", (float,), {})(0.5), type("Share", (float,), {})("nan")], [0.5, None]),
        (Point(x=1, next=Point(x=2)), {"x": 1, "next": {"x": 2, "next": None}}),
        ([np.longdouble(1.5), np.ones(2, np.longdouble)], [1.5, [1.0, 1.0]]),
        ([dt.timedelta(seconds=1.5), -dt.timedelta(days=1)], ["PT1.5S", "-P1D"]),
        *[(np.array([1500, "NaT"], f"m8[{unit}]"), [text, None]) for unit, text in (("ms", "PT1.5S"), ("s", "PT25M"))],
        ([np.timedelta64(1_500_000_000, "ns"), np.timedelta64("NaT", "ns")], ["PT1.5S", None]),
    ],
)
def test_values_of_libraries_become_plain_ones(value: Any, wanted: Any) -> None:
    assert json_values(value) == wanted


@pytest.mark.parametrize("value", [b"ab", 1j, 2**70, object(), {(1, 2): 3}, pd.DataFrame({"a": [1]}), "\ud800", *_FAR])
def test_what_has_no_form_is_refused_and_not_guessed(value: Any) -> None:
    with pytest.raises(TypeError):
        json_values([value])
