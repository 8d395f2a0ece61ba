"""Pieces of tensors: what is cut comes together again, however often it is cut."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from orchestray.platform.data.even_split import split_evenly
from orchestray.trainers.layout.tensor_slice import TensorSlice

SHAPES = st.lists(st.integers(0, 5), min_size=1, max_size=3)


def numbered(shape: list[int]) -> Tensor:
    return torch.arange(torch.Size(shape).numel()).reshape(shape)


@given(shape=SHAPES, cuts=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 4)), max_size=3))
def test_the_parts_of_repeated_cuts_cover_the_tensor_once(shape: list[int], cuts: list[tuple[int, int]]) -> None:
    plain = numbered(shape)
    pieces = [TensorSlice.whole("w", shape)]
    for dim, count in cuts:
        pieces = [piece.chunk(dim % len(shape), index, count) for piece in pieces for index in range(count)]
    again = torch.full(shape, -1)
    for piece in pieces:
        held = piece.take(plain)
        assert tuple(held.shape) == piece.local_shape
        assert held.numel() == piece.numel
        piece.put(again, held)
    assert torch.equal(again, plain)
    assert sum(piece.numel for piece in pieces) == plain.numel()


def test_a_cut_of_a_cut_counts_in_what_is_held() -> None:
    plain = numbered([8, 2])
    halves = TensorSlice.whole("w", (8, 2)).narrow(0, (0, 2), (4, 6))
    assert halves.take(plain)[:, 0].tolist() == [0, 2, 8, 10]
    assert halves.narrow(0, (1, 3)).take(plain)[:, 0].tolist() == [2, 8]
    assert halves.narrow(0, (1, 3)).ranges[0] == ((1, 2), (4, 5))


def test_what_is_taken_is_memory_of_its_own() -> None:
    plain = numbered([4, 3])
    for piece in (TensorSlice.whole("w", (4, 3)), TensorSlice.whole("w", (4, 3)).narrow(0, (0, 2))):
        piece.take(plain).zero_()
    assert torch.equal(plain, numbered([4, 3]))


def test_a_number_is_whole() -> None:
    piece = TensorSlice.whole("step", ())
    assert piece.take(torch.tensor(3.0)) == 3.0
    target = torch.tensor(0.0)
    piece.put(target, torch.tensor(5.0))
    assert target == 5.0


@given(size=st.integers(0, 50), count=st.integers(1, 9))
def test_even_splits_differ_by_at_most_one(size: int, count: int) -> None:
    ranges = split_evenly(size, count)
    sizes = [stop - start for start, stop in ranges]
    assert sum(sizes) == size
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1
    assert ranges[0][0] == 0
    assert all(before[1] == after[0] for before, after in pairwise(ranges))
