"""JSON of what models return: values of libraries become plain ones, and what has no form is refused."""

from __future__ import annotations

import datetime as dt
from collections import deque
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pytest
import torch

from orchestray.serving.models.json_values import json_values


class Box(NamedTuple):
    left: int
    size: Any


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        ({"a": torch.ones(2), "b": [torch.tensor(2), np.arange(4)[::2]]}, {"a": [1.0, 1.0], "b": [2, [0, 2]]}),
        (torch.ones(1, dtype=torch.bfloat16, requires_grad=True), [1.0]),
        ({0: 0.25, np.int64(1): 0.5, np.str_("c"): 0.25}, {"0": 0.25, "1": 0.5, "c": 0.25}),
        ([{"top": {np.int64(3): [1]}}], [{"top": {"3": [1]}}]),
        (Box(1, (2, Box(3, 4))), {"left": 1, "size": [2, {"left": 3, "size": 4}]}),
        ([{1}, deque([2]), range(2)], [[1], [2], [0, 1]]),
        (MappingProxyType({"a": 1}), {"a": 1}),
        (np.datetime64("2024-01-01T00:00:00", "ns"), "2024-01-01T00:00:00"),
        ([dt.date(2024, 1, 1), pd.Timestamp("2024-01-01")], ["2024-01-01", "2024-01-01T00:00:00"]),
        ([np.float32("nan"), float("inf"), pd.NaT, pd.NA, None], [None] * 5),
        (pd.Series([1, None]), [1.0, None]),
    ],
)
def test_values_of_libraries_become_plain_ones(value: Any, wanted: Any) -> None:
    assert json_values(value) == wanted


@pytest.mark.parametrize("value", [b"ab", 1j, 2**70, object(), {(1, 2): 3}, pd.DataFrame({"a": [1]}), "\ud800"])
def test_what_has_no_form_is_refused_and_not_guessed(value: Any) -> None:
    with pytest.raises(TypeError):
        json_values([value])
