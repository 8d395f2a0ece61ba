"""Huffman coding: exact, and as short as a code of whole bits can be."""

from __future__ import annotations

import heapq

import pytest
import torch

from orchestray.trainers.compression.huffman import huffman_decode, huffman_encode


def drawn(kind: str, num: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if kind == "even":
        return torch.randint(0, 256, (num,), dtype=torch.uint8, generator=generator)
    if kind == "normal":
        return (torch.randn(num, generator=generator) * 3 + 100).clamp(0, 255).to(torch.uint8)
    if kind == "skewed":
        return (torch.rand(num, generator=generator).pow(40) * 255).to(torch.uint8)
    return torch.full((num,), 7, dtype=torch.uint8)


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


@pytest.mark.parametrize("kind", ["normal", "skewed"])
def test_a_message_is_as_long_as_huffmans_code_and_the_lengths_of_its_codes(kind: str) -> None:
    for seed in range(5):
        symbols = drawn(kind, 200_000, seed)
        best_bytes = huffman_cost(torch.bincount(symbols, minlength=256).tolist()) / 8
        # A block of 16,384 bytes has codes of its own, whose lengths take up to 256 bytes.
        assert best_bytes * 0.99 <= huffman_encode(symbols).numel() <= best_bytes * 1.01 + 256 * (200_000 // 16_384 + 1)


def test_strings_that_repeat_are_no_shorter_than_their_bytes_alone_allow() -> None:
    symbols = drawn("normal", 1000).repeat(200)
    best_bytes = huffman_cost(torch.bincount(symbols, minlength=256).tolist()) / 8
    assert huffman_encode(symbols).numel() >= 0.99 * best_bytes


def test_bytes_that_no_code_makes_shorter_are_sent_as_they_are() -> None:
    assert huffman_encode(drawn("even", 4096)).numel() == 4096 + 8


@pytest.mark.parametrize("kind", ["normal", "even"])
def test_a_message_that_is_not_as_long_as_it_says_is_refused(kind: str) -> None:
    message = huffman_encode(drawn(kind, 4096))
    for wrong in (message[:0], message[:100], message[:-1], message[:-4], torch.cat([message, message[:4]])):
        with pytest.raises(ValueError, match="Huffman message"):
            huffman_decode(wrong)
