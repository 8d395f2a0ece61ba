"""A disk that takes no more: the search ends with a sentence, and goes on as if nothing had been once there is room."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestray.platform.errors import OrchestrayError
from orchestray.platform.run.metrics import read_lines
from orchestray.search.methods.base import Method
from orchestray.search.registry.methods import make_method
from orchestray.search.results.writer import SearchRecords
from orchestray.search.spaces.dimensions import make_dimension
from support.search_loop import Loop

SPACE = {"train.optimizer.lr": make_dimension("choice", values=[0.01, 0.03, 0.1, 0.3])}


def grid() -> Method:
    return make_method("grid", space=SPACE, steps_per_trial=6)


def population() -> Method:
    common = {"population": 4, "trials": 4, "steps_per_trial": 12, "interval_steps": 3, "synchronous": True}
    return make_method("population_based_training", space=SPACE, seed=3, fraction=0.5, **common)


@contextlib.contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Let no file of this process grow beyond `size` bytes: a line that does not fit is cut in its midst."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextlib.contextmanager
def under_way(method: Method, place: Path, name: str) -> Iterator[Loop]:
    """Yield a search in its directory, which goes on if it is there."""
    make = SearchRecords.open_existing if (place / name).exists() else SearchRecords.create
    with make(place, name) as records:
        loop = Loop(method, place / name / "states", journal=records.journal, records=records)  # type: ignore[arg-type]
        try:
            yield loop
        finally:
            loop.close()


def came_to(place: Path, name: str) -> tuple[dict[int, Any], dict[tuple[int, int], Any], dict[int, Any]]:
    """Return what a search has left: trials, the last report of each trial at each step, and its lineage."""
    with SearchRecords.open_existing(place, name) as records:
        lines = {trial: {**line, "seconds": 0} for trial, line in records.lines.items()}
        reports = {(line["trial"], line["step"]): line["metrics"] for line in read_lines(records.paths.reports)}
        nodes = {(node["trial"], node["step"]): node for node in read_lines(records.paths.lineage_log)}
        return lines, reports, nodes


@pytest.mark.parametrize(
    ("make", "part"), [(grid, 0.12), (grid, 0.7), (population, 0.12), (population, 0.35), (population, 0.95)]
)
def test_a_search_that_ran_out_of_room_ends_with_a_sentence_and_later_as_if_it_had_not(
    tmp_path: Path, make: Any, part: float
) -> None:
    with under_way(make(), tmp_path, "whole") as whole:
        whole.run()
    longest = max(file.stat().st_size for file in (tmp_path / "whole").rglob("*.jsonl"))
    with largest_file(int(part * longest)), pytest.raises(OrchestrayError, match="File too large"):  # noqa: SIM117
        with under_way(make(), tmp_path, "cut") as cut:
            cut.run()
    with under_way(make(), tmp_path, "cut") as again:
        again.run()
    assert came_to(tmp_path, "cut") == came_to(tmp_path, "whole")
