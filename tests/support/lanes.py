"""The fast lane and the slow one: what a run of the tests has left out, and what takes too long for its lane.

The fast lane is `make test`, both are `make test-all`. `slow` marks statistics over many seeds or runs, and the further
ones of many tests alike. It also marks most of what happens on machines that come and go, and the pages of the docs
that are read after the tutorials.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from typing import Any

import pytest

LIMIT_VARIABLE = "ORCHESTRAY_TEST_LIMIT_S"
"""Variable with the longest time of a test of the fast lane. Unset, there is no limit: a busy machine fails no run."""
FAILS_OVER = 5.0
"""Multiple of the limit from which a test fails; one over the limit that takes less is listed at the end."""
MAY_TAKE_LONG = {
    "tests/cluster/test_ray_train.py::"
    "test_a_worker_that_is_killed_is_killed_once_and_all_go_on_from_the_checkpoint_to_the_same_bits": (
        "Ray Train starts a controller, three helpers and two workers, and most of them once more after the kill"
    ),
    "tests/e2e/test_readme.py::test_a_page_does_what_it_says_from_top_to_bottom"
    "[README.md: Ten minutes, from nothing to an endpoint]": (
        "each of its commands starts a Ray of its own, as a user's do"
    ),
    "tests/e2e/test_readme_jobs.py::"
    "test_a_part_does_what_it_says_with_the_files_of_its_page[tutorials/cluster.md: 3. Submit it]": (
        "a head with its dashboard starts, and a job on it"
    ),
    "tests/e2e/test_submit.py::"
    "test_what_a_job_did_is_followed_and_listed_and_its_runs_are_in_the_home_directory_there": (
        "Ray starts a job, which is followed, listed and read"
    ),
    "tests/e2e/test_train.py::test_a_worker_that_ray_kills_because_memory_runs_out_is_replaced_and_the_cause_is_told": (
        "a Ray with little memory starts, fills it, and looks at it at intervals of its own"
    ),
}
"""Tests of the fast lane to which the limit does not apply, with the reason."""
_LEFT_OUT = "slow_left_out"


class Lanes:
    """A pytest plugin that enforces the limit, and lists at the end what was left out and what took too long.

    Args:
        environment: Where the limit is looked for.
    """

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        self._limit_s = float(environment.get(LIMIT_VARIABLE) or "inf")
        self._too_long: list[tuple[float, str]] = []
        self._num_left_out = 0

    def pytest_deselected(self, items: Sequence[pytest.Item]) -> None:
        self._num_left_out += sum(item.get_closest_marker("slow") is not None for item in items)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        # Under pytest-xdist only the workers see what is deselected, each of them all of it.
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput[_LEFT_OUT] = self._num_left_out

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self._num_left_out = max(self._num_left_out, getattr(node, "workeroutput", {}).get(_LEFT_OUT, 0))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if report.passed and self._takes_over(report, FAILS_OVER * self._limit_s):
            report.outcome = "failed"
            report.longrepr = (
                f"took {report.duration:.1f} s, over {FAILS_OVER:g} times the {self._limit_s:g} s of a test of the fast"
                " lane. Make it shorter, or list it with its reason in tests/support/lanes.py."
            )
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if self._takes_over(report, self._limit_s):
            self._too_long.append((report.duration, report.nodeid))

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        lines = [f"{duration_s:.1f} s: {nodeid}" for duration_s, nodeid in sorted(self._too_long, reverse=True)]
        if lines:
            terminalreporter.section(f"over {self._limit_s:g} s, and not listed in tests/support/lanes.py")
        skipped = Counter(_reason(report) for report in terminalreporter.stats.get("skipped", []))
        left_out = [f"{count} because: {reason}" for reason, count in skipped.most_common()]
        if self._num_left_out:
            left_out.append(f"{self._num_left_out} of the slow lane: make test-all runs them as well")
        for line in lines:
            terminalreporter.write_line(line)
        if left_out:
            terminalreporter.section("tests left out")
        for line in left_out:
            terminalreporter.write_line(line)

    @staticmethod
    def _takes_over(report: pytest.TestReport, limit_s: float) -> bool:
        listed = report.nodeid in MAY_TAKE_LONG or "slow" in report.keywords
        return report.when == "call" and report.duration > limit_s and not listed


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Return why a test was skipped; a skip that is not pytest's own has no place and no reason."""
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return reason.removeprefix("Skipped: ")
