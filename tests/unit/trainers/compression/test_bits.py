"""Codes of a few bits in bytes, and ascending places as gaps."""

from __future__ import annotations

import pytest
import torch

from orchestray.trainers.compression.bits import as_bytes, from_bytes, pack_bits, packed_bytes, unpack_bits
from orchestray.trainers.compression.delta import decode_gaps, encode_gaps, gap_bytes

SIZES = [0, 1, 2, 3, 4, 7, 8, 9, 63, 1001]


def codes_of(num_bits: int, num_codes: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(num_codes)
    codes = torch.randint(0, 1 << num_bits, (num_codes,), dtype=torch.uint8, generator=generator)
    codes[: num_codes // 2] = (1 << num_bits) - 1  # every bit set somewhere
    return codes


@pytest.mark.parametrize("num_bits", range(1, 9))
def test_packed_codes_are_the_digits_of_one_number(num_bits: int) -> None:
    for num_codes in SIZES:
        codes = codes_of(num_bits, num_codes)
        number = sum(int(code) << (num_bits * place) for place, code in enumerate(codes))
        num_bytes = -(-num_codes * num_bits // 8)
        assert packed_bytes(num_codes, num_bits) == num_bytes
        assert bytes(pack_bits(codes, num_bits).tolist()) == number.to_bytes(num_bytes, "little")


@pytest.mark.parametrize("num_bits", range(1, 9))
def test_codes_come_back_as_they_were_packed(num_bits: int) -> None:
    for num_codes in SIZES:
        codes = codes_of(num_bits, num_codes)
        assert torch.equal(unpack_bits(pack_bits(codes, num_bits), num_bits, num_codes), codes)


def test_packing_changes_nothing_it_was_given_wherever_it_begins_in_memory() -> None:
    whole = codes_of(4, 1001)
    before = whole.clone()
    for start in range(4):
        part = whole[start:]
        assert torch.equal(unpack_bits(pack_bits(part, 4), 4, part.numel()), before[start:])
        part = whole[start : start + 64]  # nothing to fill up
        for num_bits in (4, 5):
            assert torch.equal(unpack_bits(pack_bits(part, num_bits), num_bits, 64), before[start : start + 64])
    assert torch.equal(whole, before)


def test_codes_of_another_number_of_bytes_are_refused() -> None:
    with pytest.raises(ValueError, match="9 codes of 3 bits are not 3 bytes long"):
        unpack_bits(torch.zeros(3, dtype=torch.uint8), 3, 9)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64, torch.int64])
def test_values_come_back_from_bytes_that_begin_anywhere(dtype: torch.dtype) -> None:
    values = torch.arange(5).to(dtype)
    message = torch.cat([torch.zeros(3, dtype=torch.uint8), as_bytes(values)])
    assert torch.equal(from_bytes(message[3:], dtype), values)


@pytest.mark.parametrize("largest", [40, 300, 20_000, 3_000_000, 400_000_000, 10**13])
def test_places_come_back_from_their_gaps(largest: int) -> None:
    generator = torch.Generator().manual_seed(largest)
    indices = torch.unique(torch.randint(0, largest, (400,), generator=generator))
    encoded = encode_gaps(indices)
    assert torch.equal(decode_gaps(encoded), indices)
    assert encoded.numel() == gap_bytes(indices)


@pytest.mark.parametrize(
    ("indices", "encoded"),
    [
        ([], []),
        ([0], [0]),
        ([0, 1, 2], [0, 0, 0]),
        ([127], [127]),
        ([128], [0x80, 1]),
        ([5, 5 + 1 + 300], [5, 300 & 127 | 128, 300 >> 7]),
        ([2**14 - 1], [0xFF, 127]),
        ([2**14, 2**14 + 1], [0x80, 0x80, 1, 0]),
    ],
)
def test_a_gap_is_seven_bits_a_byte_the_lowest_first(indices: list[int], encoded: list[int]) -> None:
    found = encode_gaps(torch.tensor(indices, dtype=torch.int64))
    assert found.tolist() == encoded
    assert decode_gaps(found).tolist() == indices
