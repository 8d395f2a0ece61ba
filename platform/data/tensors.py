"""Arrow columns as tensors, without a copy where Arrow allows."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import torch

from orchestray.platform.errors import DataError


def to_tensor(column: pa.ChunkedArray | pa.Array, name: str = "") -> torch.Tensor:
    """A numeric column as a tensor of shape `[rows]`, or `[rows, size, ...]` for fixed-size lists and shaped tensors.

    One chunk without nulls shares Arrow's memory, which nobody must write to; anything else is copied once.

    Raises:
        DataError: it holds nulls, or values that are no numbers.
    """
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) and column.num_chunks != 1 else column
    if isinstance(array, pa.ChunkedArray):
        array = array.chunk(0)
    shown = f"The column {name!r}" if name else "A column"
    if array.null_count:
        raise DataError(f"{shown} holds {array.null_count} null(s): fill or drop them before training.")
    shape = [len(array)]
    if isinstance(array.type, pa.BaseExtensionType):
        shape += list(getattr(array.type, "shape", []))
        array = array.storage
        size = array.type.list_size
        array = array.values[array.offset * size : (array.offset + len(array)) * size]
    while pa.types.is_fixed_size_list(array.type):
        size = array.type.list_size
        if len(shape) == 1 or np.prod(shape) != len(array) * size:
            shape.append(size)
        array = array.values.slice(array.offset * size, len(array) * size)
        if array.null_count:
            raise DataError(f"{shown} holds {array.null_count} null(s): fill or drop them before training.")
    if pa.types.is_boolean(array.type):
        return torch.from_numpy(array.to_numpy(zero_copy_only=False)).reshape(shape)
    if not (pa.types.is_integer(array.type) or pa.types.is_floating(array.type)):
        raise DataError(f"{shown} has the type {array.type}, which is no number: turn it into numbers in to_batch().")
    return torch.from_dlpack(array).reshape(shape)
