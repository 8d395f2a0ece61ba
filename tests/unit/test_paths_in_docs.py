"""The pages that show four paths through the code: what they name is there, and is what is called."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LINE = re.compile(r"^ *(\S+) +(\S+\.py)$", re.MULTILINE)


def named_in(file: Path) -> set[str]:
    """Return the names of all functions and classes of a file."""
    return {getattr(node, "name", "") for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))}


@pytest.mark.parametrize("of", ["batch", "push", "trial", "request"])
def test_every_function_on_the_page_is_in_its_file(of: str) -> None:
    hops = LINE.findall((ROOT / "docs" / "explanation" / f"path-of-a-{of}.md").read_text(encoding="utf-8"))
    assert len(hops) > 40
    for function, file in hops:
        assert set(function.split(".")) <= named_in(ROOT / file), f"{file} has no {function}: write the page again"


def test_a_step_calls_what_the_page_says() -> None:
    command = [sys.executable, "benchmarks", "hops", "--path", "step"]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    functions, files = re.findall(r"(\d+) functions, (\d+) files", done.stdout)[0]
    text = " ".join((ROOT / "docs" / "explanation" / "path-of-a-batch.md").read_text(encoding="utf-8").split())
    assert f" of ours in {files} files" in text
    if sys.version_info < (3, 12):  # later ones make no call of a comprehension
        assert f"{functions} functions of ours" in text
