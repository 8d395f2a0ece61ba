"""The file of a compressed model: the same bits come back, whatever the tensors, and few values take few bytes."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from orchestray.platform.errors import CheckpointError
from orchestray.platform.run.huffman_file import pack_huffman, unpack_huffman

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.complex64),
    *(torch.complex128, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
]


def same(left: Tensor, right: Tensor) -> bool:
    pairs = [each.contiguous().reshape(-1).view(torch.uint8) for each in (left, right)]
    return left.dtype == right.dtype and left.shape == right.shape and torch.equal(*pairs)


def there_and_back(tensors: dict[str, Tensor]) -> bool:
    found = unpack_huffman(pack_huffman(tensors), "file")
    return list(found) == list(tensors) and all(same(found[name], each) for name, each in tensors.items())


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 9), min_size=0, max_size=3),
    st.integers(1, 300),
    st.floats(0, 1),
    st.integers(0, 1000),
)
def test_any_tensor_comes_back_with_the_same_bits(
    dtype: torch.dtype, shape: list[int], num_values: int, zeros: float, seed: int
) -> None:
    draws = torch.Generator().manual_seed(seed)
    table = torch.randint(0, 256, (num_values, dtype.itemsize), generator=draws, dtype=torch.uint8)
    table = table % 2 if dtype == torch.bool else table
    chosen = table[torch.randint(0, num_values, (math.prod(shape),), generator=draws)]
    chosen[torch.rand(len(chosen), generator=draws) < zeros] = 0
    assert there_and_back({"a": chosen.reshape(-1).view(dtype).reshape(shape), "b": torch.arange(3)})


def test_gaps_of_any_length_between_weights_come_back() -> None:
    for gap in (0, 1, 253, 254, 255, 256, 509, 510, 511, 3000):
        weights = torch.zeros(2 * gap + 2001)
        weights[gap], weights[2 * gap + 1] = 0.1, -0.3
        assert there_and_back({"w": weights})


def test_negative_zeros_and_what_is_not_a_number_come_back() -> None:
    odd = torch.tensor([0.0, -0.0, math.nan, math.inf, 1e-45, 65504.0, 65520.0]).repeat(40)
    assert there_and_back(
        {"w": odd, "half": torch.tensor([1.5, -0.0]), "none": torch.zeros(0, 4), "zero": torch.zeros(9)}
    )


def test_a_sparse_tensor_of_few_values_is_as_long_as_its_entropy_and_its_tables() -> None:
    draws = torch.Generator().manual_seed(0)
    codes = torch.distributions.Geometric(0.3).sample((40_000,)).clamp(max=15).long()
    weights = (torch.arange(1, 17).float() / 8)[codes] * (torch.rand(40_000, generator=draws) < 0.1)
    kept = weights[weights != 0]
    gaps = torch.diff(torch.nonzero(weights).flatten(), prepend=torch.tensor([-1])) - 1

    def entropy_bits(symbols: Tensor) -> float:
        chances = torch.unique(symbols, return_counts=True)[1].double() / len(symbols)
        return -float((chances * chances.log2()).sum()) * len(symbols)

    least = (entropy_bits(kept) + entropy_bits(gaps)) / 8
    found = len(pack_huffman({"w": weights}))
    assert least < found < 1.03 * least + 200  # the codes' lengths, 16 values and the header
    assert found < weights.numel() * 4 / 30


def test_a_tensor_of_many_values_is_not_longer_than_it_was() -> None:
    weights = torch.randn(300, 300, generator=torch.Generator().manual_seed(0))
    assert len(pack_huffman({"w": weights})) < weights.numel() * 4 + 100


def test_damage_is_told_and_never_read() -> None:
    whole = pack_huffman({"w": torch.tensor([0.0, 0.5, 0.0, 1.0] * 99), "b": torch.arange(5.0)})
    for broken in (
        b"",
        whole[:10],
        whole[:-3],
        b"XXXX" + whole[4:],
        whole + b"1",
        whole[:16] + b"\xff" * (len(whole) - 16),
    ):
        with pytest.raises(CheckpointError, match=r"model\.huffman is damaged"):
            unpack_huffman(broken, "model.huffman")
