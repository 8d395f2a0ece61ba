"""The example with which the language of spaces is explained does what it says."""

from __future__ import annotations

import doctest

from orchestray.search.spaces.architectures import choices


def test_the_example_of_the_language_is_true() -> None:
    found = doctest.testmod(choices)
    assert found.attempted >= 5
    assert found.failed == 0
