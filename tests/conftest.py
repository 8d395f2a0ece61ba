"""Which tests may run beside each other where several processes share them: `pytest -n 2 --dist loadgroup`."""

from __future__ import annotations

from pathlib import Path

import pytest

_ONE_AFTER_THE_OTHER = ("cluster", "e2e")
"""Folders whose tests share a Ray of theirs, or start one each."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        folder = item.path.relative_to(here).parts[0] if item.path.is_relative_to(here) else ""
        if folder in _ONE_AFTER_THE_OTHER:
            item.add_marker(pytest.mark.xdist_group(folder))
