"""The parts of pages whose commands become jobs of a cluster, run as they stand: support/reader.py says how."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.machines import Machines
from support.reader import Desk, Reader, parts


@pytest.mark.parametrize(("page", "heading"), parts(on_a_cluster=True))
def test_a_part_does_what_it_says_with_the_files_of_its_page(
    page: Path, heading: str, machines: Machines, tmp_path: Path
) -> None:
    (home := tmp_path / "home").mkdir()
    reader = Reader(tmp_path, Desk(home, cluster_address=machines.http_address), starts_ray=False)
    reader.prepare(page, heading)
    reader.read(page, heading)
