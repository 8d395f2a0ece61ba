"""Fixtures that tests of pages share, and those of several machines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from support.browser import CHROMIUM, chromium
from support.machines import Machines

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("no chromium is installed: apt-get install chromium")
    with chromium() as started:
        yield started


@pytest.fixture(scope="session")
def machines_of_all(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    started = Machines(tmp_path_factory.mktemp("machines"))
    yield started
    started.stop()


@pytest.fixture
def machines(machines_of_all: Machines) -> Machines:
    """Return two machines, of which the test may kill the last."""
    machines_of_all.repair()
    return machines_of_all
