"""The pages a user reads, run as they stand: support/reader.py says how."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestray.platform.actors.pool import make_room
from orchestray.platform.cluster.cluster import Cluster
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


def test_an_output_that_differs_in_more_than_its_numbers_is_noticed() -> None:
    printed = "\x1b[1mdigits\x1b[0m ━━━╸ step 12/460  3.8 s left\r\n  loss 0.2  accuracy 0.9\r\n"
    assert first_missing("digits ━╺━ step 3/9  1:02 min left\n loss 1.5e-07", printed) is None
    assert first_missing("loss 1\ndigits", printed) == "digits"
    assert first_missing("loss 1  error 2", printed) == "loss 1  error 2"
