"""Tensors in containers of all kinds."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from orchestray.platform.data.nested import map_tensors, tensors_in


class Pair(NamedTuple):
    left: Tensor
    right: Any


class Words(UserDict[str, Any]):
    """A mapping that torch does not know."""


def test_tensors_are_replaced_and_all_else_stays_as_it_is() -> None:
    x, other = torch.ones(2), object()
    nested = {"a": (x, [x, "word"]), "b": Pair(x, other), "c": OrderedDict(d=x), "e": Words(f=x, g=None), "h": 3}
    found = map_tensors(lambda tensor: tensor + 1, nested)
    two = torch.full((2,), 2.0)
    assert type(found["b"]) is Pair
    assert found["b"].right is other
    assert type(found["c"]) is OrderedDict
    assert (found["a"][1][1], found["e"]["g"], found["h"]) == ("word", None, 3)
    assert all(torch.equal(tensor, two) for tensor in tensors_in(found))
    assert len(tensors_in(found)) == len(tensors_in(nested)) == 5


def test_a_packed_sequence_stays_one_with_its_sizes_where_torch_wants_them() -> None:
    packed = nn.utils.rnn.pack_sequence([torch.ones(2), torch.ones(3)], enforce_sorted=False)
    moved = map_tensors(lambda tensor: tensor.to("meta"), {"inputs": packed})["inputs"]
    assert isinstance(moved, nn.utils.rnn.PackedSequence)
    assert (moved.data.device.type, moved.batch_sizes.device.type) == ("meta", "cpu")
    assert moved.sorted_indices is not None
    assert moved.sorted_indices.device.type == "meta"
