"""Groups of tests that run beside each other in several processes (`pytest -n 2`), and the Ray they share."""

from __future__ import annotations

import gc
import itertools
import os
import signal
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest

from support.lanes import Lanes

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

    from orchestray.platform.cluster.cluster import Cluster

_TESTS = Path(__file__).parent
_ENDPOINTS = itertools.count(1)
_unfrozen: list[bool] = []
"""Not empty if something has had all objects examined since they were last left out."""

# How long an example takes says how busy the machine is.
hypothesis.settings.register_profile(
    "unhurried", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("unhurried")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(FailuresAtOnce(config), "failures-at-once")
    config.pluginmanager.register(Lanes(), "lanes")
    setattr(gc, "unfreeze", _noting_unfreeze)  # noqa: B010 - mypy refuses an assignment
    # torch asks for the name of every address that it connects to; a name server that drops a question costs 5 s.
    os.environ.setdefault("RES_OPTIONS", "timeout:1")
    # A machine that was calibrated keeps a record of its runs, and those of tests are none of them.
    os.environ["XDG_CACHE_HOME"] = str(Path(tempfile.gettempdir()) / f"orchestray-tests-cache-{os.getuid()}")
    # A shell that runs the tests in the background has them ignore Ctrl-C, and so would every command they start.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect no garbage while tests are collected: it takes a third of the time, and all is still there at its end.

    What is there then stays. So later collections leave it out: each would take half a second to find nothing.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(autouse=True)
def _left_out_again() -> Iterator[None]:
    """Leave out again what is there, after an endpoint of a test: its end has all objects examined from then on."""
    yield
    if _unfrozen:
        if next(_ENDPOINTS) % 20 == 0:
            gc.collect()  # a second, for what the endpoints have left
        gc.freeze()
        _unfrozen.clear()


def _noting_unfreeze(unfreeze: Callable[[], None] = gc.unfreeze) -> None:
    """Take the place of `gc.unfreeze`: to ask how much is left out takes as long as to look through all of it."""
    unfreeze()
    _unfrozen.append(True)


@pytest.fixture(autouse=True)
def _ctrl_c_put_back() -> Iterator[None]:
    """Put the handler of Ctrl-C back: a Tuner of Ray Tune leaves its own in the process."""
    before = signal.getsignal(signal.SIGINT)
    yield
    if signal.getsignal(signal.SIGINT) is not before and before is not None:
        signal.signal(signal.SIGINT, before)


class FailuresAtOnce:
    """A plugin that prints at once what has failed, and why: a run that is killed would not have printed it."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        terminal = self._config.pluginmanager.get_plugin("terminalreporter")
        if report.failed and terminal is not None:
            terminal.write_line(f"\nFAILED {report.nodeid} ({report.when})\n{report.longreprtext}")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Have the tests run in the order of support/scheduling.py."""
    if config.getoption("dist") != "loadgroup":
        return None
    from support.scheduling import SharedRaysThenFiles

    config.option.loadscopereorder = False  # as collected
    return SharedRaysThenFiles(config, log)


@pytest.fixture(scope="module", autouse=True)
def _ray_has_its_cpus_back(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail if a file of the shared Ray leaves CPUs behind that nobody has: the files after it want them."""
    yield
    from support.scheduling import shared_by

    if shared_by(str(request.path.relative_to(_TESTS.parent))) == "the shared Ray":
        from support.cpus import lost_cpus

        assert not (lost := lost_cpus()), lost


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Yield one local Ray for every test that asks for it: processes of the run before serve the next."""
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
