"""The summary of the benchmarks says what their results say, and the pages what the results say."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"


def rows(text: str) -> list[str]:
    return [re.sub(r"\s+", " ", line) for line in text.splitlines() if line.startswith("| ") and "---" not in line]


def test_the_summary_is_of_the_results_that_lie_beside_it(tmp_path: Path) -> None:
    results = tmp_path / "results"
    shutil.copytree(RESULTS, results)
    command = [sys.executable, "benchmarks/run_all.py", "--results-dir", str(results), "--only"]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    assert rows((results / "summary.md").read_text()) == rows((RESULTS / "summary.md").read_text())


def test_the_pages_show_the_results_that_are_there(tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    shutil.copytree(ROOT / "docs", docs)
    command = [sys.executable, "benchmarks/docs.py", "--docs-dir", str(docs)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    for page in sorted(docs.glob("*.md")):
        assert page.read_text() == (ROOT / "docs" / page.name).read_text(), page.name
