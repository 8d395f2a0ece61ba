"""Huffman coding: exact, prefix-free, and as short as a code of whole bits can be."""

from __future__ import annotations

import heapq
import itertools

import pytest
import torch

from orchestray.trainers.compression.huffman import (
    MAX_CODE_BITS,
    canonical_codes,
    code_lengths,
    huffman_decode,
    huffman_encode,
)


def drawn(kind: str, num: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if kind == "even":
        return torch.randint(0, 256, (num,), dtype=torch.uint8, generator=generator)
    if kind == "normal":
        return (torch.randn(num, generator=generator) * 3 + 100).clamp(0, 255).to(torch.uint8)
    if kind == "skewed":
        return (torch.rand(num, generator=generator).pow(40) * 255).to(torch.uint8)
    return torch.full((num,), 7, dtype=torch.uint8)


def entropy(counts: torch.Tensor) -> float:
    chances = counts[counts > 0].double() / counts.sum()
    return -float((chances * chances.log2()).sum())


def huffman_cost(counts: list[int]) -> int:
    """Return the bits of all symbols in Huffman's code: the sum of the weights of his tree's inner nodes."""
    heap = [count for count in counts if count]
    heapq.heapify(heap)
    cost = 0
    while len(heap) > 1:
        both = heapq.heappop(heap) + heapq.heappop(heap)
        cost += both
        heapq.heappush(heap, both)
    return cost


@pytest.mark.parametrize("num", [0, 1, 2, 255, 256, 257, 511, 513, 4096, 10_001])
@pytest.mark.parametrize("kind", ["even", "normal", "skewed", "one"])
def test_what_is_decoded_is_what_was_encoded(kind: str, num: int) -> None:
    symbols = drawn(kind, num)
    message = huffman_encode(symbols)
    assert torch.equal(huffman_decode(message), symbols)
    assert message.numel() <= num + 8


@pytest.mark.parametrize("kind", ["even", "normal", "skewed"])
def test_the_average_length_is_huffmans_and_less_than_a_bit_above_the_entropy(kind: str) -> None:
    for seed in range(5):
        counts = torch.bincount(drawn(kind, 20_000, seed), minlength=256)
        lengths = code_lengths(counts)
        assert 1.0 <= int((lengths * counts).sum()) / huffman_cost(counts.tolist()) < 1.001  # for the longest are cut
        average = float((lengths * counts).sum() / counts.sum())
        assert entropy(counts) <= average < entropy(counts) + 1


@pytest.mark.parametrize("kind", ["even", "normal", "skewed"])
def test_no_code_begins_another(kind: str) -> None:
    lengths = code_lengths(torch.bincount(drawn(kind, 20_000), minlength=256))
    codes = canonical_codes(lengths)
    used = lengths.nonzero().view(-1)
    texts = sorted(
        "".join(str(int(codes[symbol]) >> bit & 1) for bit in range(int(lengths[symbol]))) for symbol in used
    )
    assert all(not after.startswith(before) for before, after in itertools.pairwise(texts))
    assert sum(2.0 ** -int(length) for length in lengths[used]) == 1.0


def test_codes_of_counts_that_grow_like_fibonaccis_numbers_are_cut_to_what_a_table_holds() -> None:
    counts = [1, 1]
    while len(counts) < 40:
        counts.append(counts[-1] + counts[-2])
    lengths = code_lengths(torch.tensor(counts + [0] * 216))
    assert int(lengths.max()) == MAX_CODE_BITS
    assert sum(2.0 ** -int(length) for length in lengths[:40]) == 1.0
    assert float((lengths[:40] * torch.tensor(counts)).sum() / sum(counts)) < entropy(torch.tensor(counts)) + 1


def test_the_message_is_as_long_as_its_codes_and_the_places_where_decoding_begins() -> None:
    symbols = drawn("normal", 100_000)
    counts = torch.bincount(symbols, minlength=256)
    num_bits = int((code_lengths(counts) * counts).sum())
    num_chunks = -(-100_000 // 256)
    assert huffman_encode(symbols).numel() == 8 + 128 + 2 * num_chunks + 4 * -(-num_bits // 32)


def test_bytes_that_no_code_makes_shorter_are_sent_as_they_are() -> None:
    assert huffman_encode(drawn("even", 4096)).numel() == 4096 + 8


@pytest.mark.parametrize("kind", ["normal", "even"])
def test_a_message_that_is_not_as_long_as_it_says_is_refused(kind: str) -> None:
    message = huffman_encode(drawn(kind, 4096))
    for wrong in (message[:0], message[:100], message[:-1], message[:-4], torch.cat([message, message[:4]])):
        with pytest.raises(ValueError, match="Huffman message"):
            huffman_decode(wrong)
