"""Commands that become jobs: what of them is known before they are sent."""

from __future__ import annotations

import pytest

from orchestray.cli.submit import _parse


@pytest.mark.parametrize("command", [["runs", "list"], ["train", "mine.yaml"]])
def test_a_job_finds_and_leaves_its_runs_in_the_directory_of_the_cluster(command: list[str]) -> None:
    assert _parse(command).runs_dir == "orchestray-runs"
    assert _parse([*command, "--runs-dir", "others"]).runs_dir == "others"


def test_a_job_that_has_no_runs_is_given_no_directory() -> None:
    assert _parse(["validate", "mine.yaml"]).runs_dir is None
