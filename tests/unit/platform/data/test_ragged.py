"""Lists of different lengths as one tensor: nothing is lost, nothing is invented."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from orchestray.platform.data.ragged import pad_lists
from orchestray.platform.errors import DataError

LISTS = st.lists(st.lists(st.integers(-100, 100), max_size=6), max_size=6)
KINDS = [pa.list_(pa.int16()), pa.large_list(pa.int64()), pa.list_(pa.float32())]


@given(lists=LISTS, kind=st.sampled_from(KINDS), start=st.integers(0, 3), length=st.none() | st.integers(0, 7))
def test_each_row_is_its_list_and_padding(lists: list[list[int]], kind: pa.DataType, start: int, length: Any) -> None:
    column = pa.chunked_array([pa.array(lists, kind).slice(start)])
    wanted = [each[:length] for each in lists[start:]]
    values, lengths = padded = pad_lists(column, value=-7, length=length)
    longest = max(map(len, wanted), default=0) if length is None else length
    assert values.shape == (len(wanted), longest)
    assert lengths.tolist() == list(map(len, wanted))
    assert [row[:size].tolist() for row, size in zip(values, lengths.tolist(), strict=True)] == wanted
    assert (values[~padded.mask] == -7).all()
    assert padded.mask.sum() == lengths.sum()
    assert str(values.dtype).removeprefix("torch.") == str(np.dtype(kind.value_type.to_pandas_dtype()))


@given(texts=st.lists(st.text(max_size=5), min_size=1), start=st.integers(0, 1), large=st.booleans())
def test_a_text_is_its_bytes(texts: list[str], start: int, large: bool) -> None:
    column = pa.array(texts, pa.large_string() if large else pa.string()).slice(start)
    values, lengths = pad_lists(column)
    assert values.dtype == torch.uint8
    rows = [bytes(row[:size].tolist()) for row, size in zip(values, lengths.tolist(), strict=True)]
    assert rows == [text.encode() for text in texts[start:]]


def test_vectors_in_lists_keep_their_dimension() -> None:
    column = pa.array([[[1, 2]], [[3, 4], [5, 6]]], pa.list_(pa.list_(pa.float32(), 2)))
    assert pad_lists(column).values.tolist() == [[[1, 2], [0, 0]], [[3, 4], [5, 6]]]


def test_the_length_is_rounded_up_to_a_multiple() -> None:
    assert pad_lists(pa.array([[1], [1, 2, 3]]), multiple_of=8).values.shape == (2, 8)
    assert pad_lists(pa.array([[]], pa.list_(pa.int8())), multiple_of=8).values.shape == (1, 0)


@pytest.mark.parametrize(
    ("column", "sentence"),
    [
        (pa.array([[1], None]), r"column 'words' has 1 null\(s\)"),
        (pa.array([[1], [2, None]]), r"column 'words' has 1 null\(s\)"),
        (pa.array([1, 2]), "column 'words' of type int64 holds no lists that could be padded"),
        (pa.array([[[1]], [[1, 2]]]), "column 'words' holds lists of 1 to 2 values"),
        (pa.array([["a"]]), "column 'words' of type string cannot become a tensor"),
    ],
)
def test_what_cannot_be_padded_is_refused_naming_the_column(column: pa.Array, sentence: str) -> None:
    with pytest.raises(DataError, match=sentence):
        pad_lists(column, name="words")
