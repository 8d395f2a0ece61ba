"""The planner's record of its own errors: predicted and measured steps of real runs, kept on this machine."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from orchestray.platform.run.files import storage_errors
from orchestray.trainers.machine.kept import cache_directory
from orchestray.trainers.planning.correction import Correction, Corrections, Traits

_KEPT = 2000


@dataclass(frozen=True)
class Entry:
    """A run whose step was predicted.

    Args:
        family: family of schemes.
        name: name of the run.
        predicted_s: predicted seconds of a step, without correction.
        measured_s: measured seconds of a step.
        at: time of its end, in ISO format.
        machine: name of the machine.
        scheme: scheme without its numbers.
        task: name for the task and its arguments.
        processes: number of workers and servers; 0: unknown.
        start_s: seconds from the run's start to its first step; 0: unknown.
    """

    family: str
    name: str
    predicted_s: float
    measured_s: float
    at: str
    machine: str
    scheme: str = ""
    task: str = ""
    processes: int = 0
    start_s: float = 0.0

    @property
    def ratio(self) -> float:
        """Measured over predicted."""
        return self.measured_s / self.predicted_s

    @property
    def traits(self) -> Traits:
        """Traits that other runs may share."""
        return Traits(self.task or self.name, self.family, self.scheme or self.family)


class Record:
    """The entries of one machine."""

    def __init__(self, entries: Iterable[Entry] = ()) -> None:
        self.entries = list(entries)

    def correction(self, traits: Traits) -> Correction:
        """Return the correction of the prediction of a run with these traits."""
        return self._corrections.of(traits)

    def start_s(self, processes: int) -> float:
        """Return the usual seconds from a run's start to its first step; 0: no run has shown it.

        Args:
            processes: number of workers and servers; runs with as many count, or all if there is none.
        """
        known = [entry for entry in self.entries if entry.start_s > 0]
        alike = [entry for entry in known if entry.processes == processes] or known
        return float(median(entry.start_s for entry in alike)) if alike else 0.0

    def judged(self) -> list[tuple[Entry, float]]:
        """Return the last entries, each with the relative error of its prediction as it was before the run.

        A prediction is corrected by the runs before it.
        """
        factors = self._corrections.before_each()
        last = self.entries[-len(factors) :] if factors else []
        return [
            (entry, factor * entry.predicted_s / entry.measured_s - 1)
            for factor, entry in zip(factors, last, strict=True)
        ]

    def errors(self, family: str | None = None) -> list[float]:
        """Return the relative errors of the predictions as they were before the run; see `judged`.

        Args:
            family: family of schemes; None: all of them.
        """
        return [error for entry, error in self.judged() if family in (None, entry.family)]

    @cached_property
    def _corrections(self) -> Corrections:
        return Corrections([each.traits for each in self.entries], [each.ratio for each in self.entries])


def record_file() -> Path:
    """Return the file of this machine's record."""
    return cache_directory() / "predictions.jsonl"


def load_record(machine: str, file: Path | None = None) -> Record:
    """Read the record of a machine; lines of other machines, and broken ones, are left out.

    Args:
        machine: name of the machine.
        file: file of the record; default: this machine's.
    """
    try:
        lines = (file or record_file()).read_text(encoding="utf-8", errors="replace").splitlines()[-_KEPT:]
    except OSError:
        return Record()
    entries = []
    for line in lines:
        try:
            entry = Entry(**json.loads(line))
            is_usable = entry.machine == machine and min(entry.predicted_s, entry.measured_s) > 0 <= entry.start_s
        except (ValueError, TypeError):
            continue
        if is_usable:
            entries.append(entry)
    return Record(entries)


def append(entry: Entry, file: Path | None = None) -> None:
    """Add a line to the record.

    Raises:
        StorageError: the disk refuses it.
    """
    file = file or record_file()
    with storage_errors(f"write {file}"):
        file.parent.mkdir(parents=True, exist_ok=True)
        line = (json.dumps(asdict(entry)) + "\n").encode()
        handle = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(handle, line)  # at once: two runs may end together
        finally:
            os.close(handle)


def measured_step_s(
    lines: Iterable[Mapping[str, Any]], *, every: int | None = None, warm_up: int = 10, least: int = 20
) -> float | None:
    """Return the mean seconds of a step from the metric lines of a run; None: it made too few.

    Pauses between steps (a validation, a restart) do not count.

    Args:
        lines: metric lines, in order.
        every: steps between two exchanges, which count even where they are long and few; None: no steps are unlike.
        warm_up: number of first steps that do not count.
        least: least number of steps that count.
    """
    nothing: Mapping[str, Any] = {}
    known = [nothing, *(line for line in lines if "time_s" in line)]
    steps = [(line, "samples_per_s" in before) for before, line in pairwise(known) if "samples_per_s" in line]
    times = [float(line["time_s"]) for line, _ in steps[warm_up:]]
    gaps = [after - before for before, after in pairwise(times)]
    if len(gaps) < least:
        return None
    usual = median(gaps)
    # A step that follows a validation has that in its gap.
    exchanging = [follows and _is_seldom(line, every) for line, follows in steps[warm_up + 1 :]]
    counted = [gap for gap, is_one in zip(gaps, exchanging, strict=True) if gap <= _PAUSE * usual or is_one]
    # Regular steps, as those with an average over the replicas, count.
    if usual <= 0 or len(gaps) - len(counted) > _SELDOM * len(gaps):
        counted = gaps
    return sum(counted) / len(counted)


def _is_seldom(line: Mapping[str, Any], every: int | None) -> bool:
    """Return True if a step exchanges, of so few that they could be taken for pauses."""
    return every is not None and every * _SELDOM >= 1 and int(line["step"]) % every == 0


_PAUSE, _SELDOM = 5.0, 0.04


def measured_start_s(lines: Iterable[Mapping[str, Any]], step_s: float) -> float:
    """Return the seconds from the start of a run to its first step, by its metric lines; 0: that step is missing."""
    ends = (float(line["time_s"]) for line in lines if line.get("step") == 1 and "samples_per_s" in line)
    return max(0.0, next(ends, 0.0) - step_s)
