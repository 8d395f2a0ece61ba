"""A process of the load generator: `python -m orchestray.loadtest.worker`.

It reads `{"plan", "rank", "num_processes", "tally_file"}` as a line of JSON from stdin, and prints "ready". Then it
reads the time to begin (on the clock `time.monotonic`, which the processes of a machine share). It prints a line of
JSON every half second. If it ends with status 0, the file with the descriptor `tally_file` has the results. It ends
when its stdin closes, so that it never outlives its parent.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import os
import resource
import signal
import sys
import time
from dataclasses import dataclass
from typing import Any

from orchestray.loadtest.alarm import make_alarm
from orchestray.loadtest.drive import Driver
from orchestray.loadtest.errors import NOT_STARTED, STDIN_ENDED, STDOUT_ENDED
from orchestray.loadtest.loads import ClosedLoop
from orchestray.loadtest.plan import Plan
from orchestray.loadtest.pool import Pool
from orchestray.loadtest.tally import Tally

_SAY_EVERY_S = 0.5


@dataclass(frozen=True)
class Share:
    """The results of one process."""

    tally: Tally
    cpu_share: float
    """Seconds on a core per second of the load."""
    num_retried: int


async def measure(
    plan: Plan, *, rank: int = 0, num_processes: int = 1, begin_s: float | None = None, tally: Tally | None = None
) -> Share:
    """Put one process's share of a load on the target, from this event loop.

    Args:
        plan: the whole load.
        rank: number of this process, from 0.
        num_processes: number of processes; each sends every `num_processes`-th request of an open loop.
        begin_s: beginning of the load, on `time.monotonic`; default: now.
        tally: tally to count in; default: a new one.
    """
    begin_s = time.monotonic() if begin_s is None else begin_s
    tally = tally or Tally(plan.warm_up_s, plan.end_s, plan.deadline_s)
    load, target = plan.load, plan.target
    closed = load.share(rank, num_processes) if isinstance(load, ClosedLoop) else None
    pool = Pool(
        target.host,
        target.port,
        target.requests(),
        clock=time.monotonic,
        timeout_s=plan.timeout_s,
        max_connections=max(1, closed.num_clients if closed else plan.max_connections // num_processes),
        tls=target.context(),
    )
    driver = Driver(pool, tally, time.monotonic, begin_s)
    cpu_s, wall_s = _cpu_s(), time.monotonic()
    try:
        if closed is not None:
            await driver.closed_loop(closed.num_clients, closed.think_s)
        else:
            assert not isinstance(load, ClosedLoop)
            alarm = make_alarm()
            try:
                await driver.open_loop(itertools.islice(load.times_s(plan.seed), rank, None, num_processes), alarm)
            finally:
                alarm.close()
    finally:
        await pool.close()
    cpu_share = (_cpu_s() - cpu_s) / max(1e-9, time.monotonic() - wall_s)
    return Share(tally, cpu_share, pool.num_retried)


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _write(value: dict[str, Any]) -> None:
    try:
        sys.stdout.write(json.dumps(value) + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        os._exit(STDOUT_ENDED)


async def _main(plan: Plan, rank: int, num_processes: int, begin_s: float) -> Share:
    loop = asyncio.get_running_loop()
    tally = Tally(plan.warm_up_s, plan.end_s, plan.deadline_s)
    task = asyncio.current_task()
    assert task is not None
    loop.add_reader(sys.stdin.fileno(), task.cancel)

    def say() -> None:
        num_failed = tally.refused.num + tally.errors.total()
        _write(
            {
                "now_s": time.monotonic() - begin_s,
                "num_offered": tally.num_offered,
                "num_answered": tally.latency.num,
                "num_pending": tally.num_offered - tally.latency.num - num_failed,
                "num_failed": num_failed,
            }
        )
        loop.call_later(_SAY_EVERY_S, say)

    loop.call_later(max(0.0, begin_s - time.monotonic()) + _SAY_EVERY_S, say)
    return await measure(plan, rank=rank, num_processes=num_processes, begin_s=begin_s, tally=tally)


def main() -> None:
    """Run the share that stdin describes."""
    # Ctrl-C is for the parent process, which then closes stdin.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    settings = json.loads(sys.stdin.readline())
    plan = Plan.from_json(settings["plan"])
    try:
        import uvloop
    except ImportError:
        factory = None
    else:
        factory = uvloop.new_event_loop
    gc.freeze()  # permanent objects are not collected any more, so that requests are sent in time
    print("ready", flush=True)  # noqa: T201 - its stdout is a protocol
    begin = sys.stdin.readline()
    if not begin:
        sys.exit(NOT_STARTED)
    try:
        with asyncio.Runner(loop_factory=factory) as runner:
            share = runner.run(_main(plan, settings["rank"], settings["num_processes"], float(begin)))
    except asyncio.CancelledError:
        os._exit(STDIN_ENDED)
    measured = {"tally": share.tally.to_json(), "cpu_share": share.cpu_share, "num_retried": share.num_retried}
    with os.fdopen(settings["tally_file"], "w") as file:
        file.write(json.dumps(measured))


if __name__ == "__main__":
    main()
