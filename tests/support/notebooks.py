"""Notebooks as a reader executes them: all cells from the top, by a kernel of Jupyter in a folder of their own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

from support.pages import first_missing
from support.patience import PATIENCE_S


def shown(outputs: Iterable[Mapping[str, Any]]) -> str:
    """Return what the outputs of a cell show as text: what it has printed, and its last value."""
    return "\n".join(
        str(output["text"] if output["output_type"] == "stream" else output["data"].get("text/plain", ""))
        for output in outputs
        if output["output_type"] != "error"
    )


def execute(path: Path, directory: Path, environment: Mapping[str, str]) -> None:
    """Execute a notebook; raise AssertionError if a cell raises, or shows something else than in the file.

    Args:
        path: The notebook, with the outputs that its cells are to show. Numbers in them may differ.
        directory: The folder in which it is executed.
        environment: The variables of the kernel's process.
    """
    notebook: Any = nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    expected = [shown(cell.outputs) for cell in cells]
    client = NotebookClient(
        notebook, timeout=PATIENCE_S, kernel_name="python3", resources={"metadata": {"path": str(directory)}}
    )
    client.execute(env=dict(environment))
    for number, (cell, wanted) in enumerate(zip(cells, expected, strict=True), start=1):
        printed = shown(cell.outputs)
        missing = first_missing(wanted, printed)
        assert missing is None, f"{path.name}, code cell {number}: not shown: {missing}\nshown was:\n{printed}"
