"""The timeline of a pipeline's workers: the actions of each worker, read from a run, and written as a Chrome trace.

A run with a pipeline records its last steps in `timeline.json`: `{"steps": [{"step", "actions": [{"rank", "stage",
"kind", "micro_batch", "begin_s", "end_s"}, ...]}, ...]}`, times in seconds of one clock.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from orchestray.platform.errors import ConfigError, StorageError
from orchestray.platform.run.directory import RunPaths
from orchestray.platform.run.files import load_json, write_atomic


class Kind(NamedTuple):
    """A kind of action, with its name and its looks."""

    name: str
    colour: str
    """Colour on the terminal."""
    shade: str
    """Character that identifies the kind without colour."""
    trace_colour: str
    """Colour name that chrome://tracing knows."""
    is_pass: bool = True
    """True for a forward or backward pass; bubbles are counted from the first to the last of these."""


KINDS = {
    "F": Kind("forward", "blue", "░", "rail_response"),
    "B": Kind("backward", "yellow", "█", "thread_state_iowait"),
    "I": Kind("backward of the input", "green", "▓", "good"),
    "W": Kind("backward of the weights", "magenta", "▒", "rail_animation"),
    "U": Kind("update", "cyan", "═", "grey", is_pass=False),
}
"""Kinds that are drawn as work; any other kind (`wait`) is waiting."""


class Done(NamedTuple):
    """One action of one worker."""

    rank: int
    stage: int
    kind: str
    micro_batch: int
    begin_s: float
    end_s: float


class Row(NamedTuple):
    """A worker's part of a step."""

    rank: int
    stages: tuple[int, ...]
    actions: tuple[Done, ...]
    """Actions of the worker in order, without waiting."""
    busy_s: float
    """Seconds in forward and backward passes."""
    bubble: float
    """Idle fraction of the time from the first pass of any worker to the end of the last; 0 to 1."""


@dataclass(frozen=True)
class Step:
    """One step of all workers."""

    step: int
    actions: tuple[Done, ...]

    @cached_property
    def _work(self) -> list[Done]:
        return sorted((action for action in self.actions if action.kind in KINDS), key=lambda a: (a.rank, a.begin_s))

    @cached_property
    def begin_s(self) -> float:
        """Time at which the first of its actions began, on the clock of the record."""
        return min(action.begin_s for action in self._work)

    @cached_property
    def end_s(self) -> float:
        """Time at which the last of its actions ended."""
        return max(action.end_s for action in self._work)

    @cached_property
    def span_s(self) -> float:
        """Seconds from the first forward or backward pass to the end of the last, of any worker."""
        passes = self._passes(self._work)
        return max(a.end_s for a in passes) - min(a.begin_s for a in passes) if passes else 0.0

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """Rows of the workers, by rank."""
        return tuple(self._row(rank, tuple(own)) for rank, own in groupby(self._work, key=lambda a: a.rank))

    @property
    def bubble(self) -> float:
        """Bubble of the step, the mean over all workers."""
        return sum(row.bubble for row in self.rows) / len(self.rows)

    def _row(self, rank: int, actions: tuple[Done, ...]) -> Row:
        passes = self._passes(actions)
        busy_s = sum(action.end_s - action.begin_s for action in passes)
        stages = tuple(sorted({action.stage for action in passes}))
        return Row(rank, stages, actions, busy_s, 1 - busy_s / self.span_s if self.span_s else 0.0)

    @staticmethod
    def _passes(actions: Sequence[Done]) -> list[Done]:
        return [action for action in actions if KINDS[action.kind].is_pass]


def read_timeline(run_path: Path) -> list[Step]:
    """Return the recorded steps of the run in `run_path`, in order; steps without actions are left out.

    Raises:
        ConfigError: the run has no timeline; the message lists runs beside it that have one.
        StorageError: the record is damaged.
    """
    path = RunPaths(run_path).timeline
    if not path.is_file():
        raise ConfigError(_without(path))
    record = load_json(path)
    try:
        found = [
            Step(int(each["step"]), tuple(_done(action) for action in each["actions"])) for each in record["steps"]
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise StorageError(
            f"could not read {path}: it is no timeline ({type(error).__name__}: {error}); remove it, the next training "
            "with a pipeline writes another"
        ) from error
    steps = [step for step in found if any(action.kind in KINDS for action in step.actions)]
    if not steps:
        raise ConfigError(_without(path))
    return sorted(steps, key=lambda step: step.step)


def choose(steps: Sequence[Step], number: int | None) -> Step:
    """Return the step with this number; None: the last step.

    Raises:
        ConfigError: the step is not in the record.
    """
    if number is None:
        return steps[-1]
    for step in steps:
        if step.step == number:
            return step
    recorded = ", ".join(str(step.step) for step in steps)
    raise ConfigError(
        f"step {number} is not in the timeline, which keeps the last steps alone: choose one of {recorded}"
    )


def trace(steps: Sequence[Step], name: str) -> dict[str, Any]:
    """Return all steps for chrome://tracing and ui.perfetto.dev: one track per worker, times from the first action.

    Trace Event Format (Google, 2016), section "Complete Events"; times in microseconds.
    """
    origin_s = min(step.begin_s for step in steps)
    ranks = sorted({row.rank for step in steps for row in step.rows})
    events: list[dict[str, Any]] = [{"ph": "M", "pid": 0, "name": "process_name", "args": {"name": name}}]
    for rank in ranks:
        for key, args in (("thread_name", {"name": f"worker {rank}"}), ("thread_sort_index", {"sort_index": rank})):
            events.append({"ph": "M", "pid": 0, "tid": rank, "name": key, "args": args})
    for step in steps:
        for action in (action for row in step.rows for action in row.actions):
            kind = KINDS[action.kind]
            events.append(
                {
                    "ph": "X",
                    "pid": 0,
                    "tid": action.rank,
                    "name": f"{kind.name} {action.micro_batch}" if kind.is_pass else kind.name,
                    "cat": kind.name,
                    "cname": kind.trace_colour,
                    "ts": round((action.begin_s - origin_s) * 1e6, 3),
                    "dur": round((action.end_s - action.begin_s) * 1e6, 3),
                    "args": {"step": step.step, "stage": action.stage, "micro_batch": action.micro_batch},
                }
            )
    return {"displayTimeUnit": "ms", "traceEvents": events}


def write_trace(steps: Sequence[Step], name: str, path: Path) -> None:
    """Write `trace` to a file.

    Args:
        steps: steps to write.
        name: name of the process in the trace.
        path: file to write.

    Raises:
        StorageError: the file cannot be written.
    """
    write_atomic(path, json.dumps(trace(steps, name)).encode())


def time_text(seconds: float) -> str:
    """Return seconds as text with three digits: `830 µs`, `12.4 ms`, `1.25 s`."""
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        value = seconds * factor
        if value >= 0.9995 or unit == "µs":
            return f"{value:.{0 if value >= 99.95 else 1 if value >= 9.995 else 2}f} {unit}"
    raise AssertionError


def row_label(row: Row) -> str:
    """Return a row's name: `worker 0  stages 0,7`."""
    stages = ",".join(map(str, row.stages))
    return f"worker {row.rank}" + (f"  stage{'s' * (len(row.stages) > 1)} {stages}" if stages else "")


def _done(action: Mapping[str, Any]) -> Done:
    micro_batch, stage = action.get("micro_batch"), action.get("stage")
    done = Done(
        int(action["rank"]),
        -1 if stage is None else int(stage),
        str(action["kind"]),
        -1 if micro_batch is None else int(micro_batch),
        float(action["begin_s"]),
        float(action["end_s"]),
    )
    if not done.begin_s <= done.end_s:
        raise ValueError(f"an action ends before it begins: {dict(action)}")
    return done


def _without(path: Path) -> str:
    run_path, runs_dir = path.parent, path.parent.parent
    others = sorted(other.parent.name for other in runs_dir.glob(f"*/{path.name}") if other != path)
    some = ", ".join(others[:8]) + (", ..." if len(others) > 8 else "")
    have = f"in {runs_dir} these have: {some}" if others else f"in {runs_dir} none has"
    return f"the run '{run_path.name}' has no timeline: runs with strategy.network.pipeline > 1 record one; {have}"
