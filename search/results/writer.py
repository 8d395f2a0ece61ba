"""The only writer of a search's directory.

Append-only logs reach the operating system line by line, so that a search can be killed at any time and finds them
again on resuming.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from orchestray.platform.errors import StorageError
from orchestray.platform.run.directory import RunDirectory
from orchestray.platform.run.files import dump_json, storage_errors, write_atomic
from orchestray.platform.run.metrics import JsonLinesLog, read_lines
from orchestray.search.results.paths import SearchPaths
from orchestray.search.results.tensorboard import TrialLogs

if TYPE_CHECKING:
    from orchestray.search.results.schema import TrialLine

_ELAPSED_S = 5.0
"""Seconds between two writes of `elapsed.json`: a kill loses at most that part of the time."""
_LINEAGE_S = 2.0
"""Seconds between two writes of `lineage.json`; a log of their own records its nodes at once."""


class Journal:
    """A log of the calls to a search method and their answers (`journal.jsonl`), from which to replay them."""

    def __init__(self, log: JsonLinesLog) -> None:
        self._log = log

    def append(self, call: str, **values: Any) -> None:
        """Record a call; once this returns, the line survives a kill of this process.

        Args:
            call: `ask`, `report`, `tell`, `allow`.
            values: arguments and answer of the call. JSON values.
        """
        self._log.append_lines([{"call": call, **values}])
        self._log.flush()

    def entries(self) -> list[dict[str, Any]]:
        """Return every call so far in order, including those of earlier attempts."""
        self._log.flush()
        return read_lines(self._log.path)

    def close(self) -> None:
        """Close the file; closing twice does nothing."""
        self._log.close()


class SearchRecords:
    """The records of a search, as a context manager that holds the directory's lock. Not thread-safe."""

    def __init__(self, directory: RunDirectory) -> None:
        self.directory = directory
        self.paths = SearchPaths(directory.path)
        self._trials = JsonLinesLog(self.paths.trials)
        self._reports = JsonLinesLog(self.paths.reports)
        self._lineage = JsonLinesLog(self.paths.lineage_log)
        self.journal = Journal(JsonLinesLog(self.paths.journal))
        self._tensorboard = TrialLogs(self.paths.tensorboard)
        self._lines = {int(line["trial"]): line for line in read_lines(self.paths.trials)}
        self._nodes = {_place(node): node for node in read_lines(self.paths.lineage_log)}
        self._last_metrics: dict[int, dict[str, float]] = {}
        self._before_s = self._seconds_before()
        self._begin_s = time.monotonic() - self._before_s
        self._limit_s = math.inf
        self._elapsed_due_s = 0.0
        """Monotonic time of the next write of `elapsed.json`; 0: the search is not under way."""
        self._lineage_due_s = 0.0
        self._is_lineage_written = False

    @classmethod
    def create(cls, runs_dir: str | os.PathLike[str], name: str) -> Self:
        """Create `<runs_dir>/<name>`.

        Raises:
            RunNameError: the name is in use.
            StorageError: the directory is not writable.
        """
        return cls(RunDirectory.create(runs_dir, name))

    @classmethod
    def open_existing(cls, runs_dir: str | os.PathLike[str], name: str) -> Self:
        """Open the records of an existing search; lines that a killed process left half-written are removed.

        Raises:
            RunNameError: no search has that name, or a process is still writing it.
        """
        return cls(RunDirectory.open_existing(runs_dir, name))

    @property
    def seconds(self) -> float:
        """Seconds since the search began, without the time between two attempts."""
        return time.monotonic() - self._begin_s

    @property
    def lines(self) -> Mapping[int, Mapping[str, Any]]:
        """Lines of the ended trials by trial number, in the order in which they ended; includes earlier attempts."""
        return self._lines

    def keep_time(self, limit_s: float | None = None) -> None:
        """Record from time to time how long the search has taken; to be called regularly.

        Args:
            limit_s: limit on that time; what it takes to end the trials after that does not count.

        Raises:
            StorageError: it cannot be written.
        """
        self._limit_s = math.inf if limit_s is None else limit_s
        if time.monotonic() >= self._elapsed_due_s:
            self._write_elapsed()

    def report(self, trial: int, step: int, metrics: Mapping[str, float], **more: Any) -> None:
        """Record the metrics of a trial at a step.

        Args:
            trial: its number.
            step: last completed step.
            metrics: metrics of its last validation by name, and `train_loss`.
            more: additional JSON values of the line, such as the `config` of a member of a population, which may
                change.
        """
        numbers = {name: float(value) for name, value in metrics.items()}
        line = {"trial": trial, "step": step, "time_s": round(self.seconds, 3), "metrics": numbers, **more}
        self._reports.append_lines([line])
        self._reports.flush()
        self._last_metrics[trial] = numbers
        self._tensorboard.scalars(trial, step, numbers)

    def finished(self, line: TrialLine) -> None:
        """Record the end of a trial, unless an earlier attempt recorded it already."""
        if line.trial in self._lines:
            return
        written = line.to_json()
        self._trials.append_lines([written])
        self._trials.flush()
        self._lines[line.trial] = written
        metrics = {**self._last_metrics.pop(line.trial, {}), "objective": line.objective}
        self._tensorboard.hyper_parameters(line.trial, line.config, metrics, line.steps)

    def reopen(self, trials: Collection[int]) -> None:
        """Remove the recorded ends of trials that continue after all."""
        gone = {trial for trial in trials if trial in self._lines}
        if gone:
            self._trials.keep_only(lambda line: line["trial"] not in gone)
            for trial in gone:
                del self._lines[trial]

    def lineage(self, trial: int, parent: int | None, step: int, change: str, **more: Any) -> None:
        """Record that a trial was made from another one, or took over its state.

        Args:
            trial: the trial that is made or changed.
            parent: the trial whose weights or genome it has; None: it has no parent.
            step: step at which this happened; 0 for a new trial.
            change: description of what was done.
            more: additional JSON values of the node, such as the `config` from here on.
        """
        node = {"trial": trial, "parent": parent, "step": step, "change": change, **more}
        if self._nodes.get(_place(node)) == node:
            return
        self._nodes[_place(node)] = node
        self._lineage.append_lines([node])
        self._lineage.flush()
        self._is_lineage_written = False
        if time.monotonic() >= self._lineage_due_s:
            self._write_lineage()

    def write_config(self, yaml_text: str) -> None:
        """Write `config.yaml`."""
        self.directory.write_config(yaml_text)

    def write_result(self, result: Mapping[str, Any]) -> None:
        """Write `result.json`."""
        self.directory.write_result(result)

    def write_pareto(self, front: Sequence[Mapping[str, Any]]) -> None:
        """Write `pareto.json`: the lines of the trials on the Pareto front."""
        write_atomic(self.paths.pareto, (dump_json(list(front), indent=1) + "\n").encode())

    def write_report(self, html: str) -> None:
        """Write `report.html`."""
        write_atomic(self.paths.report, html.encode())

    def remove_result(self) -> None:
        """Remove the result of a search that continues."""
        self.directory.remove_result()

    def flush(self) -> None:
        """Flush everything to the operating system."""
        self._tensorboard.flush()
        if not self._is_lineage_written:
            self._write_lineage()

    def close(self) -> None:
        """Write pending records and release the lock; closing twice does nothing."""
        try:
            self.flush()
            if self._elapsed_due_s:
                with contextlib.suppress(StorageError):  # it lacks some seconds
                    self._write_elapsed()
                self._elapsed_due_s = 0.0
            self._tensorboard.close()
            for log in (self._trials, self._reports, self._lineage, self.journal):
                log.close()
        finally:
            self.directory.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write_lineage(self) -> None:
        with storage_errors(f"write {self.paths.lineage}"):
            write_atomic(self.paths.lineage, (dump_json({"nodes": list(self._nodes.values())}) + "\n").encode())
        self._is_lineage_written = True
        self._lineage_due_s = time.monotonic() + _LINEAGE_S

    def _seconds_before(self) -> float:
        """Return the seconds that earlier attempts of this search took."""
        reported = max((float(line.get("time_s", 0.0)) for line in read_lines(self.paths.reports)), default=0.0)
        with contextlib.suppress(OSError, ValueError, KeyError):  # it is not there, or damaged
            return max(reported, float(json.loads(self.paths.elapsed.read_bytes())["seconds"]))
        return reported

    def _write_elapsed(self) -> None:
        with storage_errors(f"write {self.paths.elapsed}"):
            seconds = max(self._before_s, min(self.seconds, self._limit_s))
            write_atomic(self.paths.elapsed, (dump_json({"seconds": round(seconds, 3)}) + "\n").encode())
        self._elapsed_due_s = time.monotonic() + _ELAPSED_S


def _place(node: Mapping[str, Any]) -> tuple[int, int]:
    return int(node["trial"]), int(node["step"])
