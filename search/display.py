"""The display of a running search: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from orchestray.platform.terminal.display import STATUS_STYLES, Shown
from orchestray.platform.terminal.format import duration, number, short_path
from orchestray.search.results.schema import ended_text

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console, RenderableType

    from orchestray.search.results.figures import Goal
    from orchestray.search.results.schema import TrialChange

_PLAIN_LINE_S = 5.0
_MAX_ROWS = 8
_MAX_FAILURES_SAID = 3
_MAX_NETWORK = 160
"""Maximum number of characters shown of a network."""
_STYLES = {**STATUS_STYLES, "running": "cyan", "waiting": "dim"}
_LIVE = ("running", "waiting")


class SearchView:
    """The state of the display, updated by changes of trials; independent of the terminal."""

    def __init__(self, name: str, goal: Goal, total_trials: int | None) -> None:
        self.name, self.goal, self.total_trials = name, goal, total_trials
        self.ended: dict[int, str] = {}
        """Status of each trial that has ended."""
        self.live: dict[int, TrialChange] = {}
        """Last change of each trial that is running or waiting."""
        self.best: TrialChange | None = None

    @property
    def num_ended(self) -> int:
        """Number of trials that have ended."""
        return len(self.ended)

    def begin_with(self, lines: Mapping[int, Mapping[str, Any]]) -> None:
        """Take in the trials of earlier attempts by their lines."""
        from orchestray.search.results.schema import TrialChange

        for line in lines.values():
            config = line.get("config") or {}
            change = TrialChange(
                line["trial"],
                line["status"],
                line["steps"],
                line["objective"],
                config,
                violation=line.get("violation", 0.0),
            )
            self.update(change)

    def update(self, change: TrialChange) -> None:
        """Take in the status of a trial."""
        if change.status in _LIVE:
            self.live[change.trial] = change
            self.ended.pop(change.trial, None)  # it continues after all
        else:
            self.live.pop(change.trial, None)
            self.ended[change.trial] = change.status
        if change.objective is None or change.status == "failed":
            return
        if self.best is None or self._merit(change) > self._merit(self.best):
            self.best = change

    def _merit(self, change: TrialChange) -> tuple[float, float]:
        return -change.violation, self.goal.sign * (change.objective or 0.0)

    def counts_text(self) -> str:
        """Return for example `7/32 trials: 5 succeeded, 2 stopped; 2 running`."""
        ended = ", ".join(f"{count} {status}" for status, count in Counter(self.ended.values()).items())
        running: Counter[str] = Counter(change.status for change in self.live.values())
        live = ", ".join(f"{running[status]} {status}" for status in _LIVE if running[status])
        of = "" if self.total_trials is None else f"/{self.total_trials:,}"
        return f"{self.num_ended:,}{of} trials" + (f": {ended}" if ended else "") + (f"; {live}" if live else "")

    def best_text(self) -> str:
        """Return for example `best accuracy 0.9611 (trial 3): lr=0.1`; empty if no trial has an objective yet."""
        if self.best is None:
            return ""
        made_of = values_text(self.best.config, self.best.genome)
        which = f"trial {self.best.trial}" + (", infeasible" if self.best.violation else "")
        text = f"best {self.goal.metric} {number(self.best.objective)} ({which})"
        return f"{text}: {made_of}" if made_of else text


def values_text(config: Mapping[str, Any], genome: str | None = None) -> str:
    """Return for example `lr=0.1  batch_size=64`, and the network; keys are shortened to their last part if unique."""
    ends = Counter(key.rpartition(".")[2] for key in config)
    values = [
        f"{end if ends[end := key.rpartition('.')[2]] == 1 else key}={_value(value)}" for key, value in config.items()
    ]
    return "  ".join([*values, *([genome] if genome else [])])


def _value(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


class SearchFace:
    """The face of a running search, updated by `change` messages."""

    refresh_s = 0.25

    def __init__(self, view: SearchView, directory: Path) -> None:
        self.name = view.name
        self._view, self._directory = view, directory
        self._begin_s = time.monotonic()
        self._num_failures = 0
        self._shown_best = view.best and view.best.objective
        """Best objective shown in a line so far."""

    def take_in(self, kind: str, value: Any) -> str | None:
        """Take in a change; return a line on a failed trial, for the first few."""
        if kind != "change":
            return None
        self._view.update(value)
        self._num_failures += value.status == "failed"
        is_told = value.status == "failed" and self._num_failures <= _MAX_FAILURES_SAID
        return f"trial {value.trial} failed: {value.error}" if is_told else None

    def news(self, kind: str, value: Any, since_s: float) -> str | None:
        """Return a line if a trial has ended as the new best, or if none was shown for a while."""
        if kind != "change":
            return None
        best = self._view.best
        is_better = value.status not in _LIVE and best is not None and best.objective != self._shown_best
        if not is_better and since_s <= _PLAIN_LINE_S:
            return None
        self._shown_best = best and best.objective
        return f"{self._view.counts_text()}  {self._view.best_text()}".rstrip()

    def block(self) -> RenderableType:
        """Return the live table."""
        return live_table(self._view, time.monotonic() - self._begin_s)

    def closing_rows(self, result: Mapping[str, Any]) -> list[tuple[str, str]]:
        """Return the rows of the closing summary."""
        return closing_rows(result, self._view.goal, self._directory)


class SearchProgress(Shown):
    """The display of one search."""

    def __init__(
        self, view: SearchView, *, directory: Path, quiet: bool = False, console: Console | None = None
    ) -> None:
        """
        Args:
            view: state of the display.
            directory: directory of the search, shown at the end.
            quiet: True to show nothing.
            console: console to write to; default: stderr.
        """
        super().__init__(SearchFace(view, directory), quiet=quiet, console=console)

    def change(self, change: TrialChange) -> None:
        """Show the current status of a trial."""
        self.send("change", change)


def live_table(view: SearchView, elapsed_s: float) -> RenderableType:
    """Return the live part: the counts, the best so far, and a row per running or waiting trial."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    top = Table.grid(padding=(0, 2), expand=True)
    top.add_column(no_wrap=True, max_width=24, overflow="ellipsis")
    top.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
    top.add_column(no_wrap=True, justify="right")
    top.add_row(Text(view.name, style="bold"), view.counts_text(), Text(duration(elapsed_s), style="dim"))
    rows: list[RenderableType] = [top]
    if view.best is not None:
        rows.append(Text(f"  {view.best_text()}", style="cyan", overflow="ellipsis", no_wrap=True))
    table = Table.grid(padding=(0, 2), expand=True)
    table.add_column(justify="right", min_width=7)
    for _ in range(3):
        table.add_column(no_wrap=True)
    table.add_column(ratio=1, no_wrap=True, overflow="ellipsis", style="dim")  # what is left of the line
    shown = sorted(view.live.values(), key=lambda change: (change.status != "running", change.trial))
    for change in shown[:_MAX_ROWS]:
        objective = "" if change.objective is None else f"{view.goal.metric} {number(change.objective)}"
        status = Text(change.status, style=_STYLES.get(change.status, ""))
        table.add_row(
            str(change.trial), status, f"step {change.step:,}", objective, values_text(change.config, change.genome)
        )
    if len(shown) > _MAX_ROWS:
        table.add_row("", Text(f"and {len(shown) - _MAX_ROWS} more", style="dim"), "", "", "")
    return Group(*rows, table) if shown else Group(*rows)


def _shortened(text: str) -> str:
    return text if len(text) <= _MAX_NETWORK else f"{text[:_MAX_NETWORK]}… (all of it is in result.json)"


def closing_rows(result: Mapping[str, Any], goal: Goal, directory: Path) -> list[tuple[str, str]]:
    """Return the rows of the closing summary: the best trial, and where the results are."""
    best, ended = result.get("best"), ended_text(result)
    rows = [("trials", f"{number(result.get('trials'))}" + (f"  ({ended})" if ended else ""))]
    if best:
        rows.append(("best", f"{goal.metric} {number(best.get('objective'))}  (trial {best['trial']})"))
        rows += [(key, _value(value)) for key, value in (best.get("config") or {}).items()]
        rows += [(name, number(value)) for name, value in (best.get("constraints") or {}).items()]
        if best.get("network"):
            rows.append(("network", _shortened(best["network"])))
    rows.append(("time", duration(result.get("seconds"))))
    if result.get("infeasible"):
        rows.append(("infeasible", str(result["infeasible"])))
    if result.get("cut_off"):
        rows.append(("cut off", str(result["cut_off"])))
    if result.get("error"):
        rows.append(("error", str(result["error"])))
    if best:
        rows.append(("best run", short_path(directory / "best")))
    return [*rows, ("report", short_path(directory / "report.html"))]
