"""The pages a user reads, run as they stand: support/reader.py says how."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from builder.reference.metrics import LINE, RESULT
from builder.reference.run_directory import FILES
from orchestray.platform.actors.pool import make_room
from orchestray.platform.cluster.cluster import Cluster
from support.cli import read_lines
from support.pages import first_missing
from support.reader import Desk, Readers, parts


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory, cluster: Cluster) -> Iterator[Desk]:
    yield Desk(tmp_path_factory.mktemp("home"), ray=cluster)
    make_room(cluster)


@pytest.fixture(scope="module")
def readers(tmp_path_factory: pytest.TempPathFactory, desk: Desk) -> Iterator[Readers]:
    readers = Readers(tmp_path_factory.mktemp("pages"), desk)
    yield readers
    readers.close()


@pytest.mark.parametrize(("page", "heading"), parts(on_a_cluster=False))
def test_a_page_does_what_it_says_from_top_to_bottom(page: Path, heading: str, readers: Readers) -> None:
    readers.of(page).read(page, heading)


def test_each_name_in_the_records_of_these_runs_is_in_the_reference(readers: Readers) -> None:
    for run in {path.parent for path in readers.place.rglob("runs/*/result.json")}:
        result = json.loads((run / "result.json").read_text(encoding="utf-8"))
        if "parts" not in result or not (run / "metrics.jsonl").exists() or (run / "trials.jsonl").exists():
            continue  # of a search, or of an earlier version
        assert set(result) <= set(RESULT), run.name
        for line in read_lines(run / "metrics.jsonl"):
            if "split" not in line:
                assert set(line) <= set(LINE), run.name
        assert {path.name for path in run.iterdir() if not path.name.startswith(".")} <= set(FILES), run.name


def test_an_output_that_differs_in_more_than_its_numbers_is_noticed() -> None:
    printed = "\x1b[1mdigits\x1b[0m ━━━╸ step 12/460  3.8 s left\r\n  loss 0.2  accuracy 0.9\r\n"
    assert first_missing("digits ━╺━ step 3/9  1:02 min left\n loss 1.5e-07", printed) is None
    assert first_missing("loss 1\ndigits", printed) == "digits"
    assert first_missing("loss 1  error 2", printed) == "loss 1  error 2"
