"""The notebooks of docs/, executed from top to bottom: support/notebooks.py says how."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestray.platform.actors.pool import make_room
from orchestray.platform.cluster.cluster import Cluster
from support.notebooks import execute
from support.reader import ROOT, Desk

NOTEBOOKS = sorted((ROOT / "docs").rglob("*.ipynb"))


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_shows_what_its_file_shows(notebook: Path, cluster: Cluster, tmp_path: Path) -> None:
    (home := tmp_path / "home").mkdir()
    (place := tmp_path / "place").mkdir()
    execute(notebook, place, Desk(home, ray=cluster).beside_others())
    make_room(cluster)
