"""Request bodies: the limit is the largest that is read, as it comes, as it says, and decompressed."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import Iterable
from typing import Any

import pytest

from orchestray.serving.http.body import Receive, check_length, inflated, long_number, read_body
from orchestray.serving.http.problems import HttpProblem

LIMIT = 1000


def coming(chunks: Iterable[bytes]) -> Receive:
    """Return a `receive` of a body in these chunks."""
    left = [*chunks]

    async def receive() -> Any:
        return {"type": "http.request", "body": left.pop(0), "more_body": bool(left)}

    return receive


def read(num_bytes: int, way: str) -> bytes:
    """Return a body of this size that comes in this way."""
    body = b"x" * num_bytes
    if way == "its length":
        check_length(str(num_bytes).encode(), LIMIT)
        return body
    if way == "compressed":
        return asyncio.run(read_body(inflated(coming([gzip.compress(body)]), LIMIT, b"gzip"), LIMIT))
    return asyncio.run(read_body(coming([body[:600], body[600:]] if way == "in pieces" else [body]), LIMIT))


@pytest.mark.parametrize("way", ["its length", "whole", "in pieces", "compressed"])
def test_a_body_of_the_limit_is_read_and_one_of_a_byte_more_is_refused(way: str) -> None:
    assert read(LIMIT, way) == b"x" * LIMIT
    with pytest.raises(HttpProblem, match="larger than 1000 bytes") as refused:
        read(LIMIT + 1, way)
    assert refused.value.status == 413


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (b'{"inputs": 18446744073709551616}', "18446744073709551616"),
        (b"[-9223372036854775809,1]", "-9223372036854775809"),
        (b'{"a": [1, ' + b"9" * 5000 + b"]}", "9" * 5000),
        (b"[18446744073709551615, -9223372036854775808]", None),
        (b'{"10000000000000000000000": "20000000000000000000000"}', None),
        (b"[10000000000000000000000.0, 1e22, 10000000000000000000000E1, 0.10000000000000000000001, 1E-3]", None),
    ],
)
def test_whole_numbers_of_more_than_64_bits_are_found_outside_of_texts(text: bytes, found: str | None) -> None:
    assert long_number(text) == found
