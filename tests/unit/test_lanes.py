"""Reports of `make test` on the tests it leaves out, and on those that take too long."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from support.lanes import LIMIT_VARIABLE, MAY_TAKE_LONG

TESTS = Path(__file__).parents[1]
CONFTEST = (
    "from support.lanes import Lanes\n\n\ndef pytest_configure(config):\n    config.pluginmanager.register(Lanes())\n"
)
SUITE = """
import time
import pytest

@pytest.mark.slow
def test_many_seeds(): time.sleep(0.4)

@pytest.mark.skipif(True, reason="no chromium is installed: apt-get install chromium")
def test_a_page(): pass

def test_two_pages(): pytest.skip("no chromium is installed: apt-get install chromium")

def test_long(): time.sleep(0.4)

def test_short(): pass
"""


def run(folder: Path, *arguments: str, limit_s: str) -> tuple[int, str]:
    """Return the exit status and the output of a run of `SUITE` by a process beside that which reports."""
    (folder / "conftest.py").write_text(CONFTEST, encoding="utf-8")
    (folder / "test_suite.py").write_text(SUITE, encoding="utf-8")
    (folder / "pytest.ini").write_text(f"[pytest]\npythonpath = {TESTS}\nmarkers = slow\n", encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "xdist", "-n", "1", "-p", "no:cacheprovider", *arguments],
        cwd=folder,
        env={LIMIT_VARIABLE: limit_s, "PYTHONDONTWRITEBYTECODE": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout


def test_the_fast_lane_says_what_it_left_out_and_what_was_over_its_limit(tmp_path: Path) -> None:
    status, output = run(tmp_path, "-m", "not slow", limit_s="0.2")
    assert status == 0
    assert "1 of the slow lane: make test-all" in output
    assert "2 because: no chromium is installed: apt-get install chromium" in output
    assert [line.split()[-1] for line in output.splitlines() if " s: " in line] == ["test_suite.py::test_long"]


def test_a_test_far_over_the_limit_fails_but_one_of_the_slow_lane_does_not(tmp_path: Path) -> None:
    status, output = run(tmp_path, limit_s="0.06")
    assert status == 1
    assert "1 failed, 2 passed, 2 skipped" in output
    assert "took 0.4 s, over 5 times the 0.06 s" in output
    assert "slow lane" not in output


def test_without_a_limit_nothing_is_too_long(tmp_path: Path) -> None:
    status, output = run(tmp_path, limit_s="")
    assert (status, "3 passed, 2 skipped" in output) == (0, True)
    assert "test_long" not in output


@pytest.mark.parametrize("nodeid", MAY_TAKE_LONG)
def test_a_test_that_may_take_long_is_there(nodeid: str) -> None:
    file, name = nodeid.split("::")
    assert f"def {name.partition('[')[0]}(" in (TESTS.parent / file).read_text(encoding="utf-8")
