from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestray.search.methods.base import Method
from support.search_loop import Loop


@pytest.fixture
def loops(tmp_path: Path) -> Iterator[Any]:
    made: list[Loop] = []

    def make(method: Method, folder: str = "states", **arguments: Any) -> Loop:
        made.append(Loop(method, tmp_path / folder, **arguments))
        return made[-1]

    yield make
    for loop in made:
        loop.close()
