"""Seeds of statistical tests: those of the fast lane, and those of the slow one."""

from __future__ import annotations

import pytest

FEW = 20


def a_few_and(*others: range, few: int = FEW) -> pytest.MarkDecorator:
    """Return the parameter `seeds` of a test: the first few, and the others in the slow lane."""
    slow = [pytest.param(seeds, marks=pytest.mark.slow) for seeds in others]
    return pytest.mark.parametrize("seeds", [range(few), *slow], ids=lambda seeds: f"{seeds[0]} to {seeds[-1]}")
