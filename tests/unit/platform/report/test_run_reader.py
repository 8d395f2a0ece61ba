from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from orchestray.dashboard import listing
from orchestray.platform.report import run_reader
from orchestray.platform.run import directory
from orchestray.platform.run.directory import RunDirectory
from orchestray.search.results.run import SearchRun
from orchestray.trainers.saved import run as load
from orchestray.trainers.saved.run import Run, summarize

READERS: list[Callable[[Path], str]] = [
    lambda path: Run(path).status,
    lambda path: SearchRun(path).status,
    lambda path: summarize(path).status,
    listing.status_of,
]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunDirectory]:
    with RunDirectory.create(tmp_path, "a") as made:
        yield made


@pytest.mark.parametrize("read", READERS)
def test_a_status_follows_from_the_result_and_from_whether_somebody_writes(
    run: RunDirectory, read: Callable[[Path], str]
) -> None:
    assert read(run.path) == "running"
    run.write_result({"status": "failed"})
    assert read(run.path) == "failed"
    run.remove_result()
    run.close()
    assert read(run.path) == "died"


@pytest.mark.parametrize("read", READERS)
def test_a_run_that_ends_while_it_is_looked_at_has_not_died(
    run: RunDirectory, read: Callable[[Path], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The result was looked for before the lock: a run that ended between the two was one that had died.
    looks = []

    def ending_after_the_first(look: Callable[..., object]) -> Callable[..., object]:
        def looked(*arguments: object) -> object:
            found = look(*arguments)
            looks.append(look)
            if len(looks) == 1:
                run.write_result({"status": "succeeded"})
                run.close()
            return found

        return looked

    for name in ("is_live", "read_result"):
        wrapped = ending_after_the_first(getattr(directory, name))
        for module in (load, run_reader, listing):
            if name in vars(module):
                monkeypatch.setattr(module, name, wrapped)
    assert read(run.path) == "succeeded"
    assert len(looks) == 2
