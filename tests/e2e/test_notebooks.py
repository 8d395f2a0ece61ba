"""The notebooks of docs/, executed from top to bottom: support/notebooks.py says how."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest

from orchestray.platform.actors.pool import make_room
from orchestray.platform.cluster.cluster import Cluster
from support.cli import outside
from support.notebooks import execute
from support.reader import ROOT, Desk

NOTEBOOKS = sorted((ROOT / "docs").rglob("*.ipynb"))


@pytest.mark.slow
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_shows_what_its_file_shows(notebook: Path, cluster: Cluster, tmp_path: Path) -> None:
    (home := tmp_path / "home").mkdir()
    (place := tmp_path / "place").mkdir()
    execute(notebook, place, Desk(home, ray=cluster).beside_others())
    make_room(cluster)


def test_a_cell_that_shows_something_else_than_in_the_file_is_found(tmp_path: Path) -> None:
    def written(name: str, shown: str) -> Path:
        output = nbformat.v4.new_output("stream", name="stdout", text=shown)
        notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("print('loss', 0.25)", outputs=[output])])
        nbformat.write(notebook, tmp_path / name)
        return tmp_path / name

    environment = {**outside(), "HOME": str(tmp_path)}
    execute(written("true.ipynb", "loss 0.5\n"), tmp_path, environment)  # numbers may differ
    with pytest.raises(AssertionError, match=r"false\.ipynb, code cell 1: not shown: accuracy 0\.5"):
        execute(written("false.ipynb", "accuracy 0.5\n"), tmp_path, environment)
