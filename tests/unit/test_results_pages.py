"""`python benchmarks docs` writes what was measured between the markers of a page, and nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BEGIN, END = "<!-- results of the benchmarks: begin -->", "<!-- results of the benchmarks: end -->"
PAGES = tuple(f"benchmarks/{name}.md" for name in ("layouts", "exchanges", "search", "serving"))


def write(results: Path, docs: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "benchmarks", "docs", "--results-dir", str(results), "--docs-dir", str(docs)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def result_of(name: str, accuracy: str) -> dict[str, object]:
    return {
        "claim": f"What {name} says.",
        "machine": {"cores": 2},
        "tables": [{"header": ["exchange", "accuracy"], "rows": [[name, accuracy]]}],
        "notes": ["Measured once."],
        "goals": [
            {"name": f"{name} is small", "value": 0.123456, "limit": 0.2, "unit": "x", "met": True},
            {"name": f"{name} is quick", "value": 7.0, "limit": 5.0, "unit": "ms", "met": False},
        ],
    }


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    directory = tmp_path / "docs"
    directory.mkdir()
    for name in PAGES:
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_text((ROOT / "docs" / name).read_text(encoding="utf-8"), encoding="utf-8")
    return directory


def test_results_take_the_place_of_earlier_ones_and_the_rest_of_the_page_stays(tmp_path: Path, docs: Path) -> None:
    page = docs / "benchmarks" / "exchanges.md"
    before, after = page.read_text().partition(BEGIN)[0], page.read_text().partition(END)[2]
    for name in ("exchanges", "local_sgd"):
        (tmp_path / f"{name}.json").write_text(json.dumps(result_of(name, "95.1 %")))
    assert write(tmp_path, docs).stdout == "written: exchanges.md\n"
    first = page.read_text()
    assert "| exchanges | 95.1 % |" in " ".join(first.split())
    assert "| local_sgd | local_sgd is small | 0.123 x | 0.2 x | met |" in " ".join(first.split())
    (tmp_path / "exchanges.json").write_text(json.dumps(result_of("exchanges", "96.2 %")))
    write(tmp_path, docs)
    second = page.read_text()
    assert second == first.replace("95.1 %", "96.2 %") != first
    assert second.startswith(before + BEGIN)
    assert second.endswith(END + after)
    assert (docs / PAGES[0]).read_text() == (ROOT / "docs" / PAGES[0]).read_text()


def test_a_reader_sees_which_goals_are_missed_and_how_many(tmp_path: Path, docs: Path) -> None:
    for name in ("exchanges", "local_sgd"):
        (tmp_path / f"{name}.json").write_text(json.dumps(result_of(name, "95.1 %")))
    write(tmp_path, docs)
    shown = " ".join((docs / "benchmarks" / "exchanges.md").read_text().split())
    assert "| local_sgd | local_sgd is quick | 7 ms | 5 ms | MISSED |" in shown
    assert "Of 4 goals, 2 are missed:" in shown


def test_without_results_nothing_is_written_and_it_is_said(tmp_path: Path, docs: Path) -> None:
    done = write(tmp_path, docs)
    assert done.returncode == 1
    assert "run `python benchmarks run_all` first" in done.stderr
    assert all((docs / name).read_text() == (ROOT / "docs" / name).read_text() for name in PAGES)


def test_a_page_without_a_place_for_results_is_not_written(tmp_path: Path, docs: Path) -> None:
    (tmp_path / "exchanges.json").write_text(json.dumps(result_of("exchanges", "95.1 %")))
    (docs / "benchmarks" / "exchanges.md").write_text("# Nothing\n")
    done = write(tmp_path, docs)
    assert "exchanges.md has no place for results" in done.stderr
    assert (docs / "benchmarks" / "exchanges.md").read_text() == "# Nothing\n"
