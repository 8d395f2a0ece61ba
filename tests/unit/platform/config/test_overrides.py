"""Overrides of the command line are YAML, but for what YAML would misread."""

from __future__ import annotations

import pytest

from orchestray.platform.config.overrides import parse


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("::", "::"),
        ("::1", "::1"),
        ("fe80::", "fe80::"),
        ("{a: null}", {"a": None}),
        ("a: null", {"a": None}),
        ("{a: 1}", {"a": 1}),
        ("3", 3),
    ],
)
def test_an_address_that_ends_in_colons_is_text(text: str, value: object) -> None:
    pairs, problems = parse([f"http.host={text}"])
    assert (pairs, problems) == ([(("http", "host"), value)], [])
