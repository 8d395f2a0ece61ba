"""The planner's record of its own errors: predicted and measured steps of real runs, kept on this machine.

A prediction is corrected by the median of measured over predicted of its family of schemes. Its interval lies between
the quantiles of what is left, so it is as wide as the planner has been wrong.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from orchestray.platform.run.files import storage_errors
from orchestray.trainers.machine.kept import cache_directory

LEAST_RUNS = 5
"""Runs of a family from which on its own errors count; with fewer, those of all families do."""
COVERAGE = 0.8
_KEPT = 2000


@dataclass(frozen=True)
class Entry:
    """A run whose step was predicted.

    Args:
        family: kind of scheme (`predict.family_of`).
        name: name of the run.
        predicted_s: predicted seconds of a step, without correction.
        measured_s: measured seconds of a step.
        at: time of its end, in ISO format.
        machine: name of the machine.
    """

    family: str
    name: str
    predicted_s: float
    measured_s: float
    at: str
    machine: str

    @property
    def ratio(self) -> float:
        """Measured over predicted."""
        return self.measured_s / self.predicted_s


@dataclass(frozen=True)
class Correction:
    """The correction of a prediction by the record.

    Args:
        factor: median of measured over predicted; 1 without a record.
        interval: bounds of measured over corrected that hold for 80 % of the runs; None: too few runs.
        num_runs: runs that it is made from.
        of_family: True if all of them are of the prediction's own family.
    """

    factor: float
    interval: tuple[float, float] | None
    num_runs: int
    of_family: bool


class Record:
    """The entries of one machine."""

    def __init__(self, entries: Iterable[Entry] = ()) -> None:
        self.entries = list(entries)

    def correction(self, family: str) -> Correction:
        """Return the correction of a family's predictions."""
        own = [entry.ratio for entry in self.entries if entry.family == family]
        of_family = len(own) >= LEAST_RUNS
        ratios = own if of_family else [entry.ratio for entry in self.entries]
        if len(ratios) < LEAST_RUNS:
            return Correction(1.0, None, len(ratios), False)
        factor = median(ratios)
        left = [ratio / factor for ratio in ratios]
        tail = (1 - COVERAGE) / 2
        return Correction(factor, (_quantile(left, tail), _quantile(left, 1 - tail)), len(ratios), of_family)

    def errors(self, family: str | None = None) -> list[float]:
        """Return the relative errors of the predictions as they were before the run, each corrected by those before it.

        Args:
            family: kind of scheme; None: all of them.
        """
        found = []
        for number, entry in enumerate(self.entries):
            if family in (None, entry.family):
                factor = Record(self.entries[:number]).correction(entry.family).factor
                found.append(factor * entry.predicted_s / entry.measured_s - 1)
        return found


def _quantile(values: Sequence[float], level: float) -> float:
    """Return a quantile, which for few values lies at or beyond the outermost: position level x (n + 1)."""
    ordered = sorted(values)
    position = level * (len(ordered) + 1) - 1
    if position <= 0:
        return ordered[0]
    if position >= len(ordered) - 1:
        return ordered[-1]
    below = int(position)
    return ordered[below] + (position - below) * (ordered[below + 1] - ordered[below])


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
        lines = (file or record_file()).read_text(encoding="utf-8").splitlines()[-_KEPT:]
    except OSError:
        return Record()
    entries = []
    for line in lines:
        try:
            entry = Entry(**json.loads(line))
        except (ValueError, TypeError):
            continue
        if entry.machine == machine and entry.predicted_s > 0 and entry.measured_s > 0:
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


def measured_step_s(lines: Iterable[Mapping[str, Any]]) -> float | None:
    """Return the mean seconds of a step from the metric lines of a run; None: it made too few.

    The first steps, which warm up, and pauses between steps (a validation, a restart) do not count.
    """
    times = [float(line["time_s"]) for line in lines if "samples_per_s" in line and "time_s" in line]
    gaps = [after - before for before, after in zip(times[_WARM_UP:], times[_WARM_UP + 1 :], strict=False)]
    if len(gaps) < _LEAST_STEPS:
        return None
    usual = median(gaps)
    short = [gap for gap in gaps if gap <= _PAUSE * usual] if usual > 0 else gaps
    # Seldom but regular steps, as those with an average over the replicas, count.
    counted = short if len(gaps) - len(short) <= _SELDOM * len(gaps) else gaps
    return sum(counted) / len(counted)


_WARM_UP, _LEAST_STEPS = 10, 20
_PAUSE, _SELDOM = 5.0, 0.04
