"""Columns as tensors: the same memory where Arrow allows it, and a sentence where there is no way."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from orchestray.platform.data.tensors import ColumnError, stack_columns, to_tensor
from orchestray.platform.errors import DataError

NUMBERS = [
    pa.int8(),
    pa.uint8(),
    pa.int16(),
    pa.int32(),
    pa.int64(),
    pa.uint64(),
    pa.float16(),
    pa.float32(),
    pa.float64(),
]


def address_of(array: pa.Array) -> int:
    while array.type.num_fields or isinstance(array.type, pa.BaseExtensionType):
        array = array.storage if isinstance(array.type, pa.BaseExtensionType) else array.flatten()
    address: int = array.buffers()[1].address + array.offset * array.type.bit_width // 8
    return address


def vectors(rows: int, size: int, kind: pa.DataType | None = None) -> pa.FixedSizeListArray:
    return pa.FixedSizeListArray.from_arrays(pa.array(range(rows * size), kind or pa.float32()), size)


@pytest.mark.parametrize("kind", NUMBERS, ids=str)
def test_numbers_share_the_column_s_memory(kind: pa.DataType) -> None:
    column = pa.array(np.arange(10), kind) if kind != pa.float16() else pa.array(np.arange(10, dtype=np.float16))
    tensor = to_tensor(pa.chunked_array([column]))
    assert tensor.data_ptr() == address_of(column)
    assert tensor.tolist() == list(range(10))
    assert str(tensor.dtype).removeprefix("torch.") == str(column.to_numpy().dtype)


@pytest.mark.parametrize(
    ("column", "shape"),
    [
        (vectors(6, 4), (6, 4)),
        (pa.FixedSizeListArray.from_arrays(vectors(6, 4), 3), (2, 3, 4)),
        (pa.array([[1.0, 2.0], [3.0, 4.0]]), (2, 2)),
        (pa.array([[1, 2], [3, 4]], pa.large_list(pa.int16())), (2, 2)),
        (pa.FixedShapeTensorArray.from_numpy_ndarray(np.arange(24.0).reshape(2, 3, 4)), (2, 3, 4)),
        (vectors(0, 4), (0, 4)),
    ],
    ids=["vectors", "nested", "list", "large_list", "fixed_shape_tensor", "empty"],
)
def test_lists_of_one_length_become_dimensions_in_the_same_memory(column: pa.Array, shape: tuple[int, ...]) -> None:
    tensor = to_tensor(column)
    assert tensor.shape == shape
    assert len(column) == 0 or tensor.data_ptr() == address_of(column)
    flat = column.storage if isinstance(column.type, pa.BaseExtensionType) else column
    assert tensor.flatten().tolist() == np.array(flat.to_pylist()).flatten().tolist()


SLICED = [
    vectors(6, 4),
    pa.array(np.arange(6.0)),
    pa.array([[i, 2] for i in range(6)]),
    pa.FixedSizeListArray.from_arrays(vectors(18, 4), 3),
    pa.FixedShapeTensorArray.from_numpy_ndarray(np.arange(36.0).reshape(6, 2, 3)),
]


@pytest.mark.parametrize("column", SLICED, ids=["vectors", "numbers", "lists", "nested", "tensors"])
def test_a_slice_is_the_same_memory_further_on(column: pa.Array) -> None:
    whole, part = to_tensor(column), to_tensor(column.slice(2, 3))
    assert torch.equal(part, whole[2:5])
    assert part.data_ptr() == whole[2].data_ptr()


def test_a_permuted_tensor_column_is_seen_in_its_logical_order() -> None:
    values = np.arange(24.0).reshape(2, 3, 4).transpose(0, 2, 1)
    column = pa.FixedShapeTensorArray.from_numpy_ndarray(values)
    assert list(column.type.permutation) == [1, 0]
    assert np.array_equal(to_tensor(column).numpy(), values)
    assert to_tensor(column).data_ptr() == address_of(column)


def test_several_pieces_are_copied_into_one() -> None:
    column = pa.chunked_array([[1.0, 2.0], [], [3.0]])
    assert to_tensor(column).tolist() == [1.0, 2.0, 3.0]
    assert to_tensor(pa.chunked_array([], pa.float32())).shape == (0,)


def test_truth_values_are_a_byte_each() -> None:
    tensor = to_tensor(pa.array([True, False, True]).slice(1))
    assert (tensor.dtype, tensor.tolist()) == (torch.bool, [False, True])


def test_nan_passes() -> None:
    assert torch.isnan(to_tensor(pa.array([1.0, float("nan")]))).tolist() == [False, True]


@pytest.mark.parametrize(
    ("column", "sentence"),
    [
        (pa.array([1.0, None, None]), r"has 2 null\(s\), which no tensor can hold: fill or drop them"),
        (pa.array([[1.0, 2.0], None], pa.list_(pa.float64(), 2)), r"has 1 null\(s\)"),
        (pa.array([[1.0, None]], pa.list_(pa.float64(), 2)), r"has 1 null\(s\)"),
        (pa.array(["a"]), r"of type string cannot become a tensor: map its values to numbers.*index_in"),
        (pa.array(["a"]).dictionary_encode(), r"of type dictionary<.*: map its values"),
        (pa.array([1], pa.timestamp("s")), r"of type timestamp\[s\] cannot .* \.cast\(\"int64\"\)"),
        (pa.array([1], pa.decimal128(5, 2)), r"of type decimal128\(5, 2\) .* \.cast\(\"float64\"\)"),
        (pa.array([[1], [1, 2, 3]]), r"holds lists of 1 to 3 values: pad or cut them"),
        (pa.array([{"a": 1}]), r"of type struct<a: int64> cannot become a tensor: leave it out"),
    ],
    ids=["null", "null-list", "null-inside", "text", "categories", "time", "decimal", "ragged", "struct"],
)
def test_what_no_tensor_can_hold_is_refused_naming_the_column(column: pa.Array, sentence: str) -> None:
    with pytest.raises(DataError, match="column 'speed' " + sentence):
        to_tensor(column, "speed")
    with pytest.raises(DataError, match="a column " + sentence):
        to_tensor(column)


def test_an_error_without_a_name_finds_it_in_the_table_by_its_memory() -> None:
    table = pa.table({"same": ["a", "b"], "text": ["a", "b"], "number": [1, 2]})
    with pytest.raises(ColumnError) as caught:
        to_tensor(table["text"])
    assert str(caught.value.named_in(table)).startswith("column 'text' of type string")
    assert str(caught.value.named_in(table.select(["number"]))).startswith("a column of type string")


def test_an_error_travels_between_processes_without_the_data() -> None:
    with pytest.raises(DataError) as caught:
        to_tensor(pa.array(["x" * 100_000]), "text")
    packed = pickle.dumps(caught.value)
    assert len(packed) < 1000
    assert str(pickle.loads(packed)) == str(caught.value)  # noqa: S301 - packed a line above


@pytest.mark.parametrize("names", [["a", "v", "b"], ["v"], ["a"]])
def test_stacked_columns_are_one_matrix_in_the_order_named(names: list[str]) -> None:
    table = pa.table({"a": [1, 2], "b": [True, False], "v": vectors(2, 3)})
    numbers: dict[str, Any] = {"a": [[1], [2]], "b": [[1], [0]], "v": [[0, 1, 2], [3, 4, 5]]}
    wanted = np.concatenate([np.array(numbers[name], dtype=np.float32) for name in names], axis=1)
    stacked = stack_columns(table, names)
    assert stacked.dtype == torch.float32
    assert np.array_equal(stacked.numpy(), wanted)


def test_a_single_column_of_the_right_type_is_not_copied_by_stacking() -> None:
    column = vectors(5, 3)
    assert stack_columns(pa.table({"v": column}), ["v"]).data_ptr() == address_of(column)
    assert stack_columns(pa.table({"v": column}).slice(0, 0), ["v"]).shape == (0, 3)
