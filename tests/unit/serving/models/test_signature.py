"""Samples are checked: each refusal names the place, what was wanted and what came."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from orchestray.serving.models import InputError, Signature, TensorSpec
from orchestray.serving.models.padding import Padding

IMAGE = TensorSpec("inputs", "float32", (2, 3))
OUTPUT = TensorSpec("outputs", "float32", (2,))


def signature(*inputs: TensorSpec) -> Signature:
    return Signature("m", "1", inputs or (IMAGE,), (OUTPUT,), [[0.0] * 3] * 2)


def test_nested_lists_become_an_array_of_the_wanted_type_and_integers_are_taken_for_floats() -> None:
    sample = signature().parse([[1, 2, 3], [4, 5.5, 6]])
    assert sample["inputs"].dtype == np.float32
    assert sample["inputs"].tolist() == [[1, 2, 3], [4, 5.5, 6]]


def test_whole_numbers_of_64_bits_stay_whole_beside_small_ones_and_longer_ones_are_refused_by_their_size() -> None:
    long = signature(TensorSpec("inputs", "uint64", (2,)))
    assert long.parse([2**64 - 1, 1])["inputs"].tolist() == [2**64 - 1, 1]
    for dtype, wrong in (("int64", 2**63), ("int64", 2**64), ("uint64", 2**64)):
        with pytest.raises(InputError, match="numbers that are too large"):
            signature(TensorSpec("inputs", dtype, (2,))).parse([wrong, 1])


@pytest.mark.parametrize(
    ("value", "place", "wanted", "got"),
    [
        (None, "inputs", "float32 of shape [2, 3]", "null"),
        ("text", "inputs", "float32 of shape [2, 3]", "text"),
        ([[1, 2, 3]], "inputs", "float32 of shape [2, 3]", "a list of 1"),
        ([[1, 2, 3], [1, 2]], "inputs[1]", "a list of 3", "a list of 2"),
        ([[1, 2, 3], 4], "inputs[1]", "a list of 3", "a number"),
        ([[1, 2, 3], [1, "2", 3]], "inputs[1][1]", "a number", "text"),
        ([[1, 2, 3], [1, True, 3]], "inputs[1][1]", "a number", "true"),
        ([[1, 2, 3], [1, [2], 3]], "inputs[1][1]", "a number", "a list of 1"),
        ([[1, 2, math.nan], [1, 2, 3]], "inputs[0][2]", "a finite number", "NaN"),
        ([[1, 2, 3], [-math.inf, 2, 3]], "inputs[1][0]", "a finite number", "infinity"),
        ([[1, 2, 3], [1e300, 2, 3]], "inputs[1][0]", "a finite number", "more than the type holds"),
        ([[1, 2, 3], [10**400, 2, 3]], "inputs", "float32", "too large"),
        (np.zeros((3, 2), np.float32), "inputs", "float32 of shape [2, 3]", "[3, 2]"),
        (np.zeros((2, 3), np.complex64), "inputs", "float32", "complex64"),
    ],
)
def test_what_is_no_sample_is_refused_with_its_place_what_was_wanted_and_what_came(
    value: object, place: str, wanted: str, got: str
) -> None:
    with pytest.raises(InputError) as caught:
        signature().parse(value)
    assert caught.value.field == place
    assert wanted in caught.value.wanted
    assert got in caught.value.got


def test_whole_numbers_must_be_whole_and_fit() -> None:
    tokens = signature(TensorSpec("inputs", "uint8", (2,)))
    assert tokens.parse([0, 255])["inputs"].dtype == np.uint8
    with pytest.raises(InputError, match=r"1\.5"):
        tokens.parse([0, 1.5])
    with pytest.raises(InputError, match=r"inputs\[1\].*fits uint8"):
        tokens.parse([0, 256])
    with pytest.raises(InputError, match=r"inputs\[0\]"):
        tokens.parse([-1, 0])


def test_several_inputs_are_given_by_name() -> None:
    both = signature(TensorSpec("a", "float32", (1,)), TensorSpec("b", "int64", ()))
    assert both.parse({"a": [1], "b": 2})["b"] == 2
    for bad, place in (([1], "inputs"), ({"a": [1]}, "inputs.b"), ({"a": [1], "b": 2, "c": 3}, "inputs.c")):
        with pytest.raises(InputError) as caught:
            both.parse(bad)
        assert caught.value.field == place


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=12,
)


@given(json_values)
def test_whatever_comes_is_a_sample_or_an_input_error(value: object) -> None:
    try:
        sample = signature().parse(value)
    except InputError:
        return
    assert sample["inputs"].shape == (2, 3)
    assert np.isfinite(sample["inputs"]).all()


@pytest.mark.parametrize(
    ("dtype", "sent", "wanted"),
    [("bool", [1, True], "true or false"), ("int64", [1.5, 2], "a whole number"), ("float32", ["1", 2], "a number")],
)
def test_what_is_wanted_in_a_list_is_what_its_type_takes(dtype: str, sent: list[object], wanted: str) -> None:
    spec = TensorSpec("inputs", dtype, (2,))
    with pytest.raises(InputError, match=rf"wanted {wanted} \(the input is {dtype}"):
        Signature("model", "1", (spec,), (spec,), None).parse(sent)


@pytest.mark.parametrize(
    "sent",
    [
        [*np.array([1.0, 2.0])],
        [*np.array([1, 2], np.float32)],
        (np.int64(1), 2.0),
        torch.tensor([1, 2]),
        torch.tensor([1.0, 2.0], requires_grad=True, dtype=torch.bfloat16),
        np.array([1, 2], np.float16),
    ],
    ids=repr,
)
def test_callers_in_python_may_send_numbers_of_numpy_and_tensors(sent: object) -> None:
    pair, flags = TensorSpec("inputs", "float32", (2,)), TensorSpec("inputs", "bool", (2,))
    assert signature(pair).parse(sent)["inputs"].tolist() == [1, 2]
    if not isinstance(sent, torch.Tensor):
        rows = signature(TensorSpec("inputs", "float32", (2, 2))).parse([sent, sent])
        assert rows["inputs"].tolist() == [[1, 2], [1, 2]]
    with pytest.raises(InputError, match=r"inputs"):
        signature(flags).parse(sent)


@pytest.mark.parametrize(
    ("change", "is_read_alike"),
    [
        ({"version": "2", "example": None, "class_names": ("cat", "dog")}, True),
        ({"outputs": (TensorSpec("other", "float64", (7,)),)}, True),
        ({"inputs": (TensorSpec("inputs", "float32", (None, 4)),)}, False),
        ({"padding": Padding({"inputs": 0.0}, most=8)}, False),
        ({"padding": None}, False),
        ({"feature_names": {"b": 1, "a": 2}}, False),
        ({"own_forms": ("encode",)}, True),
        ({"own_forms": ("decode",)}, False),
    ],
    ids=repr,
)
def test_models_read_requests_alike_that_make_the_same_samples_of_them(
    change: dict[str, Any], is_read_alike: bool
) -> None:
    one = replace(
        signature(TensorSpec("inputs", "float32", (None, 3))),
        padding=Padding({"inputs": 0.0}),
        feature_names={"a": 2, "b": 1},
    )
    other = replace(one, **change)
    assert one.reads_like(other) == other.reads_like(one) == is_read_alike


@pytest.mark.parametrize("sent", [[], [[]], np.zeros((0, 3), np.float32), np.zeros((2, 0), np.float32)], ids=repr)
def test_a_sample_of_any_length_has_one_element_at_least(sent: object) -> None:
    any_length = signature(TensorSpec("inputs", "float32", (None, 3)))
    assert any_length.parse(np.zeros((1, 3), np.float32))["inputs"].shape == (1, 3)
    with pytest.raises(InputError, match=r"float32 of shape \[any, 3\]|a list of 3"):
        any_length.parse(sent)


def test_an_empty_list_of_a_fixed_shape_has_the_type_of_the_input() -> None:
    empty = signature(TensorSpec("inputs", "int64", (0,))).parse([])["inputs"]
    assert (empty.dtype, empty.shape) == (np.int64, (0,))
