"""The measurement of an endpoint under load, sent from separate processes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, replace
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

from orchestray.loadtest.plan import Plan
from orchestray.loadtest.results import EndpointError, Measured, Progress
from orchestray.loadtest.tally import Tally

_START_S = 0.05
"""Seconds that all processes need to hear of a beginning or an end."""
_CORES_A_PROCESS = 4
_MOST_PROCESSES = 8
_GRACE_S = 30.0


def default_num_processes() -> int:
    """Return one process per four cores: the server may be on the same machine."""
    cores = len(os.sched_getaffinity(0))
    return max(1, min(_MOST_PROCESSES, cores // _CORES_A_PROCESS))


def measure(
    plan: Plan, *, num_processes: int | None = None, on_progress: Callable[[Progress], None] | None = None
) -> Measured:
    """Put a load on its target, and wait for the last answer.

    If it is interrupted by Ctrl-C after the warm-up, it sends no more requests, waits for their answers, and returns
    what was measured until then. A second Ctrl-C ends it.

    Args:
        plan: the load.
        num_processes: processes that share it; default: one for each four cores.
        on_progress: called every half second.

    Raises:
        EndpointError: a process of the load generator ended early.
        KeyboardInterrupt: it was interrupted before anything was measured, or twice.
    """
    is_interrupted = False
    with _workers(plan, num_processes or default_num_processes()) as pipes:
        for pipe in pipes:
            _receive(pipe, _GRACE_S)
        begin_s = time.monotonic() + _START_S

        def interrupt() -> None:
            nonlocal plan, is_interrupted
            end_s = min(plan.end_s, time.monotonic() + _START_S - begin_s)
            if is_interrupted or end_s <= plan.warm_up_s:
                raise KeyboardInterrupt
            is_interrupted = True
            plan = replace(plan, duration_s=end_s - plan.warm_up_s)
            for pipe in pipes:
                with contextlib.suppress(OSError):  # it has ended
                    pipe.send(end_s)

        for pipe in pipes:
            with _alive():
                pipe.send(begin_s)
        with _interrupted_by(interrupt):
            parts = _gather(pipes, begin_s + plan.end_s + plan.timeout_s + _GRACE_S, on_progress)
    tally = Tally(plan.warm_up_s, plan.end_s, plan.deadline_s)
    for part in parts:
        tally.add(part.tally)
    cpu_shares = tuple(share for part in parts for share in part.cpu_shares)
    return Measured(plan, tally, cpu_shares, sum(part.num_retried for part in parts), is_interrupted)


@contextlib.contextmanager
def _interrupted_by(call: Callable[[], None]) -> Iterator[None]:
    """Let Ctrl-C call a function; only the main thread can."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, lambda *_: call())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def _workers(plan: Plan, num: int) -> Iterator[list[Connection]]:
    """Start processes of the load generator, and yield a pipe to each; all are ended at the end of the block."""
    with contextlib.ExitStack() as stack:
        pipes = []
        for rank in range(num):
            pipe, other_end = Pipe()
            pipes.append(stack.enter_context(pipe))
            number = other_end.fileno()
            # Not of `multiprocessing`, whose processes would import the user's main module.
            command = [sys.executable, "-m", "orchestray.loadtest.worker", str(number)]
            process = subprocess.Popen(command, pass_fds=(number,))
            stack.callback(process.wait)
            stack.callback(process.kill)
            other_end.close()
            with _alive():
                pipe.send((plan, rank, num))
        yield pipes


def _gather(
    pipes: Sequence[Connection], until_s: float, on_progress: Callable[[Progress], None] | None
) -> list[Measured]:
    """Return what each process has measured, received before `until_s` on `time.monotonic`."""
    got: dict[Any, Progress | Measured] = {}
    while going := [pipe for pipe in pipes if not isinstance(got.get(pipe), Measured)]:
        for pipe in wait(going, max(0.0, until_s - time.monotonic())) or going:
            got[pipe] = _receive(pipe, 0.0)
        reports = [each for each in got.values() if isinstance(each, Progress)]
        if on_progress is not None and len(reports) == len(pipes):
            nows_s, *counts = zip(*map(astuple, reports), strict=True)
            on_progress(Progress(max(nows_s), *map(sum, counts)))
    return [each for each in got.values() if isinstance(each, Measured)]


def _receive(pipe: Any, limit_s: float) -> Any:
    """Return what a process sends next."""
    with _alive():
        if pipe.poll(limit_s):
            return pipe.recv()
    raise EndpointError("A process of the load generator did not answer any more.")


@contextlib.contextmanager
def _alive() -> Iterator[None]:
    try:
        yield
    except (EOFError, OSError) as error:
        raise EndpointError("A process of the load generator ended early; its errors, if any, are above.") from error
