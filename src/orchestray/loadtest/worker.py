"""A process of the load generator.

By a pipe it receives the plan, its rank, and the number of processes. It sends None when it is ready, and receives the
time to begin (on the clock `time.monotonic`, which the processes of a machine share). It sends `Progress` every half
second, and in the end `Measured`. What it receives meanwhile is an earlier end of the load. It ends when the pipe does,
so that it never outlives its parent.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import signal
import sys
import time
from multiprocessing.connection import Connection

import uvloop

from orchestray.loadtest.client import Client
from orchestray.loadtest.drive import Driver
from orchestray.loadtest.loads import ClosedLoop
from orchestray.loadtest.plan import Plan
from orchestray.loadtest.results import Measured, Progress
from orchestray.loadtest.tally import Tally

_REPORT_EVERY_S = 0.5


async def put(
    plan: Plan, *, rank: int = 0, num_processes: int = 1, begin_s: float | None = None, pipe: Connection | None = None
) -> Measured:
    """Put one process's share of a load on the target, from this event loop.

    Args:
        plan: the whole load.
        rank: number of this process, from 0.
        num_processes: number of processes; each sends every `num_processes`-th request of an open loop.
        begin_s: beginning of the load, on `time.monotonic`; default: now.
        pipe: pipe for progress, and for an earlier end.
    """
    begin_s = time.monotonic() if begin_s is None else begin_s
    closed = plan.load.share(rank, num_processes) if isinstance(plan.load, ClosedLoop) else None
    num_connections = closed.num_clients if closed else plan.max_connections // num_processes
    tally = Tally(plan.warm_up_s, plan.end_s, plan.deadline_s)
    client = Client(plan.target, timeout_s=plan.timeout_s, max_connections=max(1, num_connections))
    driver = Driver(client.send, tally, time.monotonic, begin_s)
    reports = asyncio.create_task(_report(pipe, driver, tally, begin_s)) if pipe else None
    used_s, began_s = time.process_time(), time.monotonic()
    try:
        if closed is not None:
            await driver.closed_loop(closed.num_clients, closed.think_s)
        else:
            assert not isinstance(plan.load, ClosedLoop)
            await driver.open_loop(itertools.islice(plan.load.times_s(plan.seed), rank, None, num_processes))
    finally:
        if reports is not None:
            reports.cancel()
        await client.close()
    cpu_share = (time.process_time() - used_s) / max(1e-9, time.monotonic() - began_s)
    return Measured(plan, tally, (cpu_share,), client.num_retried)


async def _report(pipe: Connection, driver: Driver, tally: Tally, begin_s: float) -> None:
    def receive() -> None:
        try:
            driver.end_at(pipe.recv())
        except EOFError:
            os._exit(1)

    asyncio.get_running_loop().add_reader(pipe.fileno(), receive)
    await asyncio.sleep(begin_s - time.monotonic())
    while True:
        await asyncio.sleep(_REPORT_EVERY_S)
        num_answered = sum(count for status, count in tally.statuses.items() if 200 <= status < 300)
        num_failed = tally.statuses.total() + tally.errors.total() - num_answered
        pipe.send(Progress(time.monotonic() - begin_s, num_answered, num_failed, driver.num_pending))


def main() -> None:
    """Put the share of one process on the target, by the pipe whose descriptor is the argument."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent process
    pipe = Connection(int(sys.argv[1]))
    try:
        plan, rank, num_processes = pipe.recv()
        gc.freeze()  # permanent objects are not collected any more, so that requests are sent in time
        pipe.send(None)
        begin_s = pipe.recv()
    except EOFError:
        sys.exit(1)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        measured = runner.run(put(plan, rank=rank, num_processes=num_processes, begin_s=begin_s, pipe=pipe))
    os.set_blocking(pipe.fileno(), True)  # the loop that read it has set it not to
    pipe.send(measured)


if __name__ == "__main__":
    main()
