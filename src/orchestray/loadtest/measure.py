"""The measurement of an endpoint under load, sent from separate processes, and its results."""

from __future__ import annotations

import contextlib
import json
import math
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any

from orchestray.loadtest.errors import ENDINGS, EndpointError
from orchestray.loadtest.histogram import Histogram
from orchestray.loadtest.loads import ClosedLoop
from orchestray.loadtest.plan import Plan
from orchestray.loadtest.tally import Tally

QUANTILES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99, "p99_9": 0.999}
_START_S = 0.05
_END_S = 5.0
"""Seconds that a process has to end after its output has."""
_CORES_A_PROCESS = 4
_MOST_PROCESSES = 8
_BUSY_SHARE = 0.9
_LAG_S, _MEAN_LAG_S, _LAG_SHARE = 0.002, 0.0002, 0.1
_GRACE_S = 30.0


@dataclass(frozen=True)
class Progress:
    """The progress of a load, over all processes."""

    now_s: float
    num_offered: int
    num_answered: int
    num_pending: int
    num_failed: int


@dataclass(frozen=True)
class Measured:
    """The result of one load."""

    plan: Plan
    tally: Tally
    cpu_shares: tuple[float, ...]
    """Share of a core that each process of the load generator used."""
    num_retried: int = 0

    @property
    def offered_per_s(self) -> float:
        return self.tally.num_offered / self.plan.duration_s

    @property
    def answered_per_s(self) -> float:
        """Answers with 2xx per second that came in the measured time."""
        return self.tally.num_answered_within / self.plan.duration_s

    @property
    def goodput_per_s(self) -> float:
        """Requests per second that were answered with 2xx within the deadline, by the time they were due."""
        return self.tally.num_in_time / self.plan.duration_s

    @property
    def mean_in_flight(self) -> float:
        """Mean number of pending requests, of those answered with any status: rate x mean latency.

        By Little's law that is their mean number between the times they were due and their answers.
        """
        return (self.tally.latency.sum_s + self.tally.refused.sum_s) / self.plan.duration_s

    @property
    def num_failed(self) -> int:
        """Number of requests without a 2xx answer."""
        return self.tally.num_offered - self.tally.latency.num

    @property
    def limited(self) -> bool:
        """True if the load generator itself was too slow, so that these numbers are not the server's.

        For an open loop, its lateness is then more than a tenth of the mean latency, or of p99. A pause of the whole
        machine does not count, as the server had it too. Clients of a closed loop are never late: there the limit is
        that a process was busy nearly all the time.
        """
        lag, latency = self.tally.lag, self.tally.latency
        if isinstance(self.plan.load, ClosedLoop):
            return max(self.cpu_shares, default=0.0) > _BUSY_SHARE
        late_in_mean = lag.mean_s > max(_MEAN_LAG_S, _LAG_SHARE * latency.mean_s)
        return late_in_mean or lag.quantile_s(0.99) > max(_LAG_S, _LAG_SHARE * latency.quantile_s(0.99))

    def summary(self) -> dict[str, Any]:
        """Return all results as numbers for JSON; latencies are in ms, and missing values are null."""
        tally, plan = self.tally, self.plan
        return {
            "url": plan.target.url,
            "load": str(plan.load),
            "duration_s": plan.duration_s,
            "warm_up_s": plan.warm_up_s,
            "num_offered": tally.num_offered,
            "num_ok": tally.latency.num,
            "num_failed": self.num_failed,
            "offered_per_s": _rounded(self.offered_per_s),
            "answered_per_s": _rounded(self.answered_per_s),
            "mean_in_flight": _rounded(self.mean_in_flight),
            "deadline_ms": None if plan.deadline_s is None else plan.deadline_s * 1e3,
            "goodput_per_s": None if plan.deadline_s is None else _rounded(self.goodput_per_s),
            "latency_ms": in_ms(tally.latency),
            "refused_latency_ms": in_ms(tally.refused) if tally.refused.num else None,
            "statuses": {str(status): count for status, count in sorted(tally.statuses.items())},
            "errors": dict(sorted(tally.errors.items())),
            "client": {
                "cpu_percent": [_rounded(100 * share) for share in self.cpu_shares],
                "lag_ms": {"p50": _ms(tally.lag.quantile_s(0.5)), "p99": _ms(tally.lag.quantile_s(0.99))},
                "limited": self.limited,
                "num_retried": self.num_retried,
            },
            "seconds": [
                {
                    "second": number,
                    "num_ok": second.latency.num,
                    "num_failed": second.num_failed,
                    "p50_ms": _ms(second.latency.quantile_s(0.5)),
                    "p99_ms": _ms(second.latency.quantile_s(0.99)),
                }
                for number, second in tally.seconds.items()
            ],
        }


def in_ms(histogram: Histogram) -> dict[str, float | None]:
    """Return mean, minimum, percentiles and maximum."""
    found = {name: _ms(histogram.quantile_s(share)) for name, share in QUANTILES.items()}
    return {"mean": _ms(histogram.mean_s), "min": _ms(histogram.min_s), **found, "max": _ms(histogram.max_s)}


def _ms(seconds: float) -> float | None:
    return _rounded(seconds * 1e3) if math.isfinite(seconds) else None


def _rounded(value: float) -> float:
    return float(f"{value:.5g}")


def default_num_processes() -> int:
    """Return one process per four cores: the server may be on the same machine."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return max(1, min(_MOST_PROCESSES, cores // _CORES_A_PROCESS))


def measure(
    plan: Plan, *, num_processes: int | None = None, on_progress: Callable[[Progress], None] | None = None
) -> Measured:
    """Put a load on its target, and wait for the last answer.

    Args:
        plan: the load.
        num_processes: processes that share it; default: one for each four cores.
        on_progress: called every half second.

    Raises:
        EndpointError: a process of the load generator ended early.
    """
    num = num_processes or default_num_processes()
    with _workers(num) as workers:
        for rank, worker in enumerate(workers):
            settings = {"plan": plan.to_json(), "rank": rank, "num_processes": num, "tally_file": worker.file.fileno()}
            worker.send(json.dumps(settings))
        lines: queue.Queue[tuple[int, str | None]] = queue.Queue()
        for rank, worker in enumerate(workers):
            threading.Thread(target=_read, args=(rank, worker.process, lines), daemon=True).start()
        limit_s = plan.end_s + plan.timeout_s + _GRACE_S
        for _ in workers:
            if _next(lines, time.monotonic() + _GRACE_S, workers)[1] is None:
                raise EndpointError("A process of the load generator ended before it began.")
        begin_s = time.monotonic() + _START_S
        for worker in workers:
            worker.send(repr(begin_s))
        last: dict[int, dict[str, Any]] = {}
        num_ended = 0
        while num_ended < num:
            rank, line = _next(lines, begin_s + limit_s, workers)
            if line is None:
                num_ended += 1
                continue
            last[rank] = json.loads(line)
            if on_progress is not None and len(last) == num:
                on_progress(_progress(list(last.values())))
        ended = [worker.result() for worker in workers]
    tally = Tally(plan.warm_up_s, plan.end_s, plan.deadline_s)
    for value in ended:
        tally.add(Tally.from_json(value["tally"]))
    shares = tuple(float(value["cpu_share"]) for value in ended)
    return Measured(plan, tally, shares, sum(int(value["num_retried"]) for value in ended))


def _progress(reports: Sequence[dict[str, Any]]) -> Progress:
    names = ("num_offered", "num_answered", "num_pending", "num_failed")
    return Progress(max(value["now_s"] for value in reports), *(sum(int(v[name]) for v in reports) for name in names))


@dataclass(frozen=True)
class _Worker:
    """A process of the load generator, and the file in which it leaves its tally.

    A tally has some hundred kilobytes; a pipe for stdout holds only 64.
    """

    process: subprocess.Popen[str]
    file: IO[bytes]

    def send(self, line: str) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()
        except OSError as error:
            text = "A process of the load generator could not be started: its errors are above."
            raise EndpointError(text) from error

    def result(self) -> dict[str, Any]:
        self.file.seek(0)
        found: dict[str, Any] = json.load(self.file)
        return found


@contextlib.contextmanager
def _workers(num: int) -> Iterator[list[_Worker]]:
    """Start processes of the load generator; all are ended at the end of the block."""
    command = [sys.executable, "-m", "orchestray.loadtest.worker"]
    with contextlib.ExitStack() as stack:
        workers = []
        for _ in range(num):
            file = stack.enter_context(tempfile.TemporaryFile())
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, pass_fds=(file.fileno(),)
            )
            stack.callback(_end, process)
            workers.append(_Worker(process, file))
        yield workers


def _end(process: subprocess.Popen[str]) -> None:
    if process.stdin is not None:
        with contextlib.suppress(OSError):
            process.stdin.close()
    process.kill()
    process.wait()


def _read(rank: int, process: subprocess.Popen[str], lines: queue.Queue[tuple[int, str | None]]) -> None:
    """Queue all output lines of a process, and then None."""
    assert process.stdout is not None
    with contextlib.suppress(ValueError):  # stdout may be closed
        for line in process.stdout:
            if line.endswith("\n"):  # output may end in the middle of a line
                lines.put((rank, line))
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_END_S)  # its exit status tells how it ended
    lines.put((rank, None))


def _next(
    lines: queue.Queue[tuple[int, str | None]], until_s: float, workers: Sequence[_Worker]
) -> tuple[int, str | None]:
    """Return the next line of any process; None if it has ended without error."""
    try:
        rank, line = lines.get(timeout=max(0.0, until_s - time.monotonic()))
    except queue.Empty:
        raise EndpointError("A process of the load generator did not answer any more.") from None
    if line is None and (status := workers[rank].process.poll()) != 0:
        raise EndpointError(f"A process of the load generator ended early, with status {status}: {_why(status)}.")
    return rank, line


def _why(status: int | None) -> str:
    if status is None:
        return "it runs on, and its stdout has ended"
    return "a signal ended it" if status < 0 else ENDINGS.get(status, "its errors are above")
