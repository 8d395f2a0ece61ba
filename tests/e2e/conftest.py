"""What tests of pages share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from support.browser import CHROMIUM, chromium

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("no chromium is installed: apt-get install chromium")
    with chromium() as started:
        yield started
