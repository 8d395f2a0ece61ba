"""Which tests run beside each other where several processes share them (`pytest -n 2`), and the Ray they share."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from orchestray.platform.cluster.cluster import Cluster

_TESTS = Path(__file__).parent
_ONE_AFTER_THE_OTHER = ("tests/cluster/", "tests/e2e/test_readme.py", "tests/e2e/")
"""Tests that share a Ray, or start one each: what begins like one of these is one process's work. Other tests go file
by file, so that what a file sets up is set up once."""


# How long an example takes says how busy the machine is.
hypothesis.settings.register_profile(
    "unhurried", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("unhurried")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(FailuresAtOnce(config), "failures-at-once")
    # A shell that runs the tests in the background has them ignore Ctrl-C, and so would every command they start.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


class FailuresAtOnce:
    """Says at once what has failed, and why: a run that is ended before its end would not have said it."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        terminal = self._config.pluginmanager.get_plugin("terminalreporter")
        if report.failed and terminal is not None:
            terminal.write_line(f"\nFAILED {report.nodeid} ({report.when})\n{report.longreprtext}")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Hand out what shares a Ray first, then whole files.

    The marks of `--dist loadgroup` would do for the folders, but pytest-xdist 3.8 writes them into an attribute that
    pytest 9.2 no longer reads.
    """
    if config.getoption("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class SharedRaysThenFiles(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            shared = next((start for start in _ONE_AFTER_THE_OTHER if nodeid.startswith(start)), None)
            return shared or nodeid.partition("::")[0]

    config.option.loadscopereorder = False  # as collected: what shares a Ray is longest
    return SharedRaysThenFiles(config, log)


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """One local Ray for every test that asks for it: processes of the run before serve the next."""
    from orchestray.platform.cluster.cluster import connect

    # Workers inherit it: what a gang of a test hosts is under tests/support.
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(_TESTS), *filter(None, [before])])
    connected = connect()
    yield connected
    connected.close()
    if before is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = before
