"""Huffman coding: exact, and as short as a code of whole bits can be."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
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


def canonical(lengths: Sequence[int]) -> dict[str, int]:
    """Return the symbol of each code, by the lengths of the codes (RFC 1951, section 3.2.2); 0: the symbol has none."""
    code, found = 0, dict[str, int]()
    for length in range(1, 16):
        code <<= 1
        for symbol, own in enumerate(lengths):
            if own == length:
                found[format(code, f"0{length}b")] = symbol
                code += 1
    return found


def next_symbol(bits: Iterator[int], codes: dict[str, int]) -> int:
    text = ""
    while text not in codes:
        text += str(next(bits))
    return codes[text]


def codes_of_block(bits: Iterator[int]) -> dict[str, int]:
    """Return the symbol of each code of a block, as its beginning says (RFC 1951, section 3.2.7)."""

    def number(length: int) -> int:
        return sum(next(bits) << place for place in range(length))

    assert (number(1), number(2)) == (1, 2)  # the last block, with codes of its own
    num_symbols, num_distances, num_lengths = number(5) + 257, number(5) + 1, number(4) + 4
    of_lengths = [0] * 19
    for symbol in [16, 17, 18, 0, 8, 7, 9, 6, 10, 5, 11, 4, 12, 3, 13, 2, 14, 1, 15][:num_lengths]:
        of_lengths[symbol] = number(3)
    codes, lengths = canonical(of_lengths), list[int]()
    while len(lengths) < num_symbols + num_distances:
        symbol = next_symbol(bits, codes)
        if symbol < 16:
            lengths.append(symbol)
        elif symbol == 16:
            lengths += lengths[-1:] * (3 + number(2))
        else:
            lengths += [0] * (3 + number(3) if symbol == 17 else 11 + number(7))
    return canonical(lengths[:num_symbols])


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


@pytest.mark.parametrize("kind", ["normal", "skewed"])
def test_no_code_begins_another_and_their_average_length_is_the_least_within_a_bit_of_the_entropy(
    kind: str,
) -> None:
    symbols, end = drawn(kind, 5_000), 256
    bits = iter(np.unpackbits(huffman_encode(symbols)[8:].numpy(), bitorder="little").tolist())
    codes = codes_of_block(bits)
    assert not any(other.startswith(code) for code, other in pairwise(sorted(codes)))
    assert [next_symbol(bits, codes) for _ in range(5_001)] == [*symbols.tolist(), end]
    length_of = {symbol: len(code) for code, symbol in codes.items()}
    counts = torch.bincount(symbols, minlength=256).tolist()
    total = sum(count * length_of.get(symbol, 0) for symbol, count in enumerate(counts))
    assert total + length_of[end] == huffman_cost([*counts, 1])
    entropy = -sum(count / 5_000 * math.log2(count / 5_000) for count in counts if count)
    assert entropy <= total / 5_000 < entropy + 1


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
