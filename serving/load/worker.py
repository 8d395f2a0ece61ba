"""A process of the load generator: `python -m orchestray.serving.load.worker`.

Reads `{"plan", "rank", "num_processes", "tally_file"}` as a line of JSON from stdin, says "ready", reads when to begin
(a time of the clock `time.monotonic`, which the processes of a machine share), then writes a line of JSON each half
second. What it has measured is in the file of the descriptor `tally_file` where it ends with status 0. The end of stdin
ends it, so that it never outlives who asked for it.
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

from orchestray.serving.load.alarm import make_alarm
from orchestray.serving.load.drive import Driver
from orchestray.serving.load.errors import NOT_TOLD, STDIN_ENDED, STDOUT_ENDED
from orchestray.serving.load.loads import ClosedLoop
from orchestray.serving.load.plan import Plan
from orchestray.serving.load.pool import Pool
from orchestray.serving.load.tally import Tally

_SAY_EVERY_S = 0.5


@dataclass(frozen=True)
class Share:
    """What one process measured."""

    tally: Tally
    cpu_share: float
    """Seconds on a core, of each second of the load."""
    num_retried: int


async def measure(
    plan: Plan, *, rank: int = 0, num_processes: int = 1, begin_s: float | None = None, tally: Tally | None = None
) -> Share:
    """Put one process's share of a load on the target, from this event loop.

    Args:
        plan: the whole load.
        rank, num_processes: which share; of an open loop every `num_processes`-th request.
        begin_s: when the load begins, on `time.monotonic`; default: now.
        tally: to count in; default: one of its own.
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
    """Run one share, as told on stdin."""
    # Ctrl-C is for the process that started this one, which then closes stdin.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    told = json.loads(sys.stdin.readline())
    plan = Plan.from_json(told["plan"])
    try:
        import uvloop
    except ImportError:
        factory = None
    else:
        factory = uvloop.new_event_loop
    gc.freeze()  # what stays is looked through no more: requests are sent in time
    print("ready", flush=True)  # noqa: T201 - its stdout is a protocol
    begin = sys.stdin.readline()
    if not begin:
        sys.exit(NOT_TOLD)
    try:
        with asyncio.Runner(loop_factory=factory) as runner:
            share = runner.run(_main(plan, told["rank"], told["num_processes"], float(begin)))
    except asyncio.CancelledError:
        os._exit(STDIN_ENDED)
    measured = {"tally": share.tally.to_json(), "cpu_share": share.cpu_share, "num_retried": share.num_retried}
    with os.fdopen(told["tally_file"], "w") as file:
        file.write(json.dumps(measured))


if __name__ == "__main__":
    main()
