"""Loads from processes of their own: killed, orphaned and interrupted ones."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from dataclasses import replace
from multiprocessing import Pipe

import psutil
import pytest

from orchestray.loadtest.loads import ClosedLoop, Load, OpenLoop, Trace
from orchestray.loadtest.measure import measure
from orchestray.loadtest.plan import Plan, Target
from orchestray.loadtest.results import EndpointError, Progress
from support.patience import PATIENCE_S

NOBODY = Plan(Target("127.0.0.1", 1, "/x"), OpenLoop(10.0), duration_s=600.0, warm_up_s=0.0)
"""A load on a port on which nobody listens."""


def workers() -> list[psutil.Process]:
    """Return the processes of the load generator that this process has started."""
    return [child for child in psutil.Process().children() if "orchestray.loadtest.worker" in child.cmdline()]


def test_of_more_requests_than_a_pipe_has_room_for_none_is_lost() -> None:
    at_once = replace(NOBODY, load=Trace((0.0,) * 30_000), duration_s=0.1, timeout_s=0.5, max_connections=2)
    tally = measure(at_once, num_processes=2).tally
    assert tally.num_offered == tally.errors.total() == 30_000


def test_a_killed_process_of_the_load_generator_ends_the_load() -> None:
    def kill(_: Progress) -> None:
        workers()[0].kill()

    with pytest.raises(EndpointError, match="A process of the load generator ended early"):
        measure(NOBODY, num_processes=2, on_progress=kill)
    assert workers() == []


@pytest.mark.parametrize("is_told", [False, True])
def test_a_process_of_the_load_generator_ends_with_its_parent(is_told: bool) -> None:
    pipe, other_end = Pipe()
    number = other_end.fileno()
    with subprocess.Popen([sys.executable, "-m", "orchestray.loadtest.worker", str(number)], pass_fds=(number,)) as one:
        other_end.close()
        pipe.send((NOBODY, 0, 1))
        assert pipe.recv() is None
        if is_told:
            pipe.send(time.monotonic())
            assert isinstance(pipe.recv(), Progress)
        pipe.close()  # as when the parent is killed
        assert one.wait(PATIENCE_S) != 0


@pytest.mark.parametrize("load", [OpenLoop(20.0), ClosedLoop(3)])
def test_an_interrupted_load_is_what_was_measured_until_then(load: Load) -> None:
    seen_s: list[float] = []

    def interrupt(progress: Progress) -> None:
        if not seen_s:
            seen_s.append(progress.now_s)
            signal.raise_signal(signal.SIGINT)

    found = measure(replace(NOBODY, load=load), num_processes=2, on_progress=interrupt)
    assert found.is_interrupted
    assert seen_s[0] < found.plan.duration_s < 300.0
    assert found.tally.end_s == pytest.approx(found.plan.end_s)
    assert found.tally.num_offered == found.tally.errors["connection refused"] > 0


@pytest.mark.parametrize(("warm_up_s", "times"), [(0.0, 2), (600.0, 1)])
def test_a_load_that_is_interrupted_twice_or_before_anything_was_measured_is_not_measured(
    warm_up_s: float, times: int
) -> None:
    def interrupt(_: Progress) -> None:
        for _ in range(times):
            signal.raise_signal(signal.SIGINT)

    plan = replace(NOBODY, warm_up_s=warm_up_s)
    with pytest.raises(KeyboardInterrupt):
        measure(plan, num_processes=1, on_progress=interrupt)
    assert workers() == []
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
