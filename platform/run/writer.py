"""A background thread that writes a run's logs, so that the driver's loop never waits for a disk."""

from __future__ import annotations

import contextlib
import math
import queue
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from orchestray.platform.errors import OrchestrayError, StorageError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from orchestray.platform.run.directory import RunDirectory

_FLUSH_S = 0.5


@dataclass(frozen=True)
class _Job:
    action: Callable[[], None]
    done: threading.Event | None = None


class RunWriter:
    """A writer of a run's `metrics.jsonl`, `events.jsonl`, `actors.json` and TensorBoard log, in order of the calls.

    Every method but `flush`, `truncate_after` and `close` returns at once. A failure of the thread (a
    full disk) is raised by `raise_if_failed`, which every other method calls first.
    """

    def __init__(self, run: RunDirectory, clock: Callable[[], float] | None = None) -> None:
        """Start the thread; `clock` returns seconds since the start of the run (default: since now)."""
        begin_s = time.monotonic()
        self._clock = clock or (lambda: time.monotonic() - begin_s)
        self._run = run
        self._metrics = run.metrics_log()
        self._events = run.event_log(self._clock)
        # Not yet: a run that goes on moves its start back to when it was first started.
        self._tensorboard = run.tensorboard_log(lambda: time.time() - self._clock())
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._failure: BaseException | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="run-writer", daemon=True)
        self._thread.start()

    def metrics(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Record metric lines (contract: `step, epoch, time_s, loss, ...`); they must not be changed afterwards."""
        if lines:
            self._submit(lambda: self._write_metrics(lines))

    def event(self, event: str, *, role: str | None = None, rank: int | None = None, **more: Any) -> None:
        """Record an event that happens now."""
        line = self._events.line(event, role=role, rank=rank, **more)

        def write() -> None:
            self._events.append_lines([line])
            self._events.flush()

        self._submit(write)

    def actors(self, actors: Sequence[Mapping[str, Any]]) -> None:
        """Rewrite `actors.json`."""
        snapshot = [dict(actor) for actor in actors]
        self._submit(lambda: self._run.write_actors(snapshot))

    def stacks(self, role: str, rank: int, text: str) -> str:
        """Write the stacks of a process, and return the path of their file in the run directory."""
        name = f"{role}-{rank}-at-{self._clock():.1f}s.txt"
        self._submit(lambda: self._run.write_stacks(name, text))
        return f"stacks/{name}"

    def output(self, role: str, rank: int, text: str) -> None:
        """Append what a process has printed to its log."""
        self._submit(lambda: self._run.append_output(f"{role}-{rank}.log", text))

    def truncate_after(self, step: int) -> float | None:
        """Drop the metric lines of steps > `step`, including queued ones.

        Returns:
            The `time_s` of the last training line that is left, once all is done; None if none is left.
        """

        def truncate() -> None:
            self._metrics.truncate_after(step)
            self._tensorboard.purge_after(step)

        self._submit(truncate)
        self.flush()
        return self._metrics.last_time_s()

    def flush(self) -> None:
        """Return when all queued lines have reached the operating system."""
        done = threading.Event()
        self._submit(self._flush_logs, done)
        done.wait()
        self.raise_if_failed()

    def raise_if_failed(self) -> None:
        """Raise the error that stopped the thread, if there is one."""
        if self._failure is None:
            return
        if isinstance(self._failure, OrchestrayError):
            raise self._failure
        raise StorageError(f"could not write the logs of run '{self._run.name}': {self._failure}") from self._failure

    def close(self) -> None:
        """Write the rest, end the thread, and close the files; may be called again.

        Raises:
            StorageError: something could not be written.
        """
        if self._closed:
            return
        self._closed = True
        self._jobs.put(None)
        self._thread.join()
        for close in (self._metrics.close, self._events.close, self._tensorboard.close):
            try:
                close()
            except OrchestrayError as error:
                self._failure = self._failure or error
        self.raise_if_failed()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # An error of the logs must not hide another error that is being raised.
        with contextlib.suppress(OrchestrayError) if kind else contextlib.nullcontext():
            self.close()

    def _submit(self, action: Callable[[], None], done: threading.Event | None = None) -> None:
        self.raise_if_failed()
        if self._closed:
            raise StorageError(f"could not write the logs of run '{self._run.name}': they are closed")
        self._jobs.put(_Job(action, done))

    def _write_metrics(self, lines: Sequence[Mapping[str, Any]]) -> None:
        self._metrics.append(lines)
        self._tensorboard.append(lines)

    def _flush_logs(self) -> None:
        self._metrics.flush()
        self._events.flush()
        self._tensorboard.flush()

    def _work(self) -> None:
        """Run the jobs in order; flush at least every half second. After a failure nothing more is written."""
        flush_at_s = math.inf
        while (job := self._next_job(flush_at_s)) is not None:
            try:
                if self._failure is None:
                    job.action()
            except Exception as error:  # noqa: BLE001 - raise_if_failed raises it in the caller
                self._failure = error
            finally:
                if job.done is not None:
                    job.done.set()
            is_flushed = job.action == self._flush_logs
            flush_at_s = math.inf if is_flushed else min(flush_at_s, time.monotonic() + _FLUSH_S)

    def _next_job(self, flush_at_s: float) -> _Job | None:
        wait_s = flush_at_s - time.monotonic()
        if wait_s <= 0:
            return _Job(self._flush_logs)
        try:
            return self._jobs.get(timeout=None if math.isinf(wait_s) else wait_s)
        except queue.Empty:
            return _Job(self._flush_logs)
