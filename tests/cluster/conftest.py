"""One local Ray for every test here."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from orchestray.platform.cluster import Cluster, connect

if TYPE_CHECKING:
    from collections.abc import Iterator

_TESTS = Path(__file__).parents[1]


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    # Workers inherit it: what a gang of a test hosts is under tests/support.
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(_TESTS), *filter(None, [before])])
    connected = connect()
    yield connected
    connected.close()
    if before is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = before
