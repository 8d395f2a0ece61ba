"""Names in attributes of a user's class: in their order, whatever holds them, or refused before anything is trained."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from orchestray.platform.errors import TaskError
from orchestray.platform.usercode.listed_names import feature_counts, listed_names, lower_names, problems_of_names


@pytest.mark.parametrize(
    "names",
    [
        ["cat", "dog"],
        np.array(["cat", "dog"]),
        [*np.array(["cat", "dog"])],
        pd.Index(["cat", "dog"]),
        {1: "dog", 0: "cat"},
        {"1": "dog", "0": "cat"},
    ],
)
def test_names_keep_their_order_in_whatever_holds_them(names: Any) -> None:
    assert listed_names(names) == ["cat", "dog"]


@pytest.mark.parametrize("numbers", [range(2), np.arange(2), [*np.arange(2)], torch.arange(2), (0, 1)])
def test_numbers_are_names_and_those_of_python(numbers: Any) -> None:
    names = listed_names(numbers)
    assert (names, {*map(type, names)}) == ([0, 1], {int})


@pytest.mark.parametrize("names", [{"cat", "dog"}, "cat", {"cat": 0, "dog": 1}, len, 5])
def test_what_has_no_order_is_refused(names: Any) -> None:
    with pytest.raises(TaskError, match=f"class_names must be a list .* got a {type(names).__name__}"):
        listed_names(names)


def test_features_are_counted_by_name_and_each_comes_once() -> None:
    assert feature_counts(pd.DataFrame({"a": [1], "b": [2]}).columns) == {"a": 1, "b": 1}
    assert feature_counts({"a": 1, "b": 3}) == {"a": 1, "b": 3}
    with pytest.raises(TaskError, match="each name once, got 'a' 2 times"):
        feature_counts(["a", "b", "a"])


def test_a_metric_that_is_better_when_lower_is_no_list_of_letters() -> None:
    assert lower_names("rmse") == ["rmse"]
    assert lower_names({"rmse", "mae"}) == ["mae", "rmse"]


class Wrong:
    feature_names = "ab"

    def class_names(self) -> list[str]:
        return ["cat"]

    @property
    def lower_is_better(self) -> Any:
        raise AssertionError("it reads the data")


class Late:
    @cached_property
    def class_names(self) -> Any:
        raise AssertionError("it reads the data")


def test_attributes_are_looked_at_and_properties_are_not_called() -> None:
    wanted = "must be a list of names in their order, got a"
    assert [*problems_of_names(Wrong())] == [f"class_names {wanted} function", f"feature_names {wanted} str"]
    assert not [*problems_of_names(Late())]
