"""Tensors in flat ones, and back."""

from __future__ import annotations

import torch

from orchestray.platform.comm.flat_tensors import FlatTensors, flatten, unflatten


def test_tensors_come_back_from_a_flat_one_as_views() -> None:
    tensors = [torch.arange(6.0).view(2, 3), torch.tensor(6.0), torch.empty(0, 2), torch.arange(7.0, 11.0).view(2, 2).T]
    flat = flatten(tensors)
    assert flat.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 9, 8, 10]
    again = unflatten(flat, tensors)
    assert all(torch.equal(a, b) for a, b in zip(again, tensors, strict=True))
    flat.zero_()
    assert not any(part.any() for part in again)


def test_tensors_of_two_types_are_two_flat_ones_and_keep_their_order() -> None:
    tensors = [torch.ones(2), torch.arange(3), torch.full((1, 2), 2.0)]
    flat = FlatTensors(tensors)
    packed = flat.pack()
    assert [each.tolist() for each in packed] == [[1, 1, 2, 2], [0, 1, 2]]
    assert [view.tolist() for view in flat.views(packed)] == [[1, 1], [0, 1, 2], [[2, 2]]]
    flat.unpack([each + 1 for each in packed])
    assert [tensor.tolist() for tensor in tensors] == [[2, 2], [1, 2, 3], [[3, 3]]]
