"""Extra state comes back as it was, of the same types, or is refused."""

from __future__ import annotations

from collections import OrderedDict, deque, namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from orchestray.platform.errors import CheckpointError
from orchestray.platform.run.tensor_file import pack, unpack
from orchestray.trainers.core.extra_state import decode, encode, of_extra

Point = namedtuple("Point", "x y")  # noqa: PYI024

VALUES: list[Any] = [
    *(None, True, 0, -(2**80), 0.1, float("inf"), "text \u00fc", b"\x00\xff", bytearray(b"a"), 1 - 2j),
    *([], [1, [2]], (), (1, (2, "3")), {1, 2}, frozenset({"a"}), {}, {"a": 1, 2: {"b": (None,)}, (1, 2): 3}),
    *(OrderedDict([("z", 1), ("a", 2)]), deque([1, 2], maxlen=3), torch.Size([2, 3]), torch.float16),
    torch.device("cpu"),
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_a_value_comes_back_from_a_file_as_it_was(value: Any) -> None:
    data = np.frombuffer(bytearray(pack({**encode({"0._extra_state": value}), "other": torch.ones(1)})), np.uint8)
    found = decode(of_extra(unpack(data, "a file")))["0._extra_state"]
    assert found == value
    assert type(found) is type(value)


def test_tensors_and_arrays_come_back_with_their_bits_and_memory_of_their_own() -> None:
    tensors = [torch.arange(6.0).reshape(2, 3).t(), torch.tensor([1, 2], dtype=torch.int16), torch.tensor(True)]
    value = {"tensors": tensors, "array": np.arange(4, dtype=np.uint8), "scalar": np.float32(0.1)}
    encoded = encode({"a": value})
    tensors[0].zero_()
    found, again = decode(encoded)["a"], decode(encoded)["a"]
    assert found["tensors"][0].tolist() == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]
    assert [tensor.dtype for tensor in found["tensors"]] == [torch.float32, torch.int16, torch.bool]
    found["tensors"][1].zero_()
    assert again["tensors"][1].tolist() == [1, 2]
    assert found["array"].dtype == np.uint8
    assert found["array"].tolist() == [0, 1, 2, 3]
    assert type(found["scalar"]) is np.float32
    assert found["scalar"] == np.float32(0.1)


@pytest.mark.parametrize(
    "value", [Path("a"), Point(1, 2), object(), print, np.array(["a"]), np.array([object()]), torch.eye(2).to_sparse()]
)
def test_what_cannot_be_kept_is_refused_by_its_place(value: Any) -> None:
    with pytest.raises(CheckpointError, match=r"The model's state has a \w+ in x\['a'\]\['b'\], which no checkpoint"):
        encode({"x": {"a": {"b": [value]}}})


def test_no_values_are_no_tensors() -> None:
    assert encode({}) == {}
    assert decode({}) == {}


def test_a_damaged_state_is_named() -> None:
    encoded = encode({"a": [torch.ones(1)]})
    with pytest.raises(CheckpointError, match="damaged"):
        decode({name: tensor for name, tensor in encoded.items() if "/" not in name})
    with pytest.raises(CheckpointError, match="damaged"):
        decode({"extra_state": torch.zeros(4, dtype=torch.uint8)})
