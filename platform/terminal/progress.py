"""The display of a training while it runs: a live block on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Any

from orchestray.platform.terminal.display import Shown
from orchestray.platform.terminal.format import duration, metrics_text, number, result_rows, short_path

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult

_PLAIN_LINE_S = 5.0
_RATE_WINDOW_S = 20.0


class Progress(Shown):
    """The display of one run."""

    def __init__(
        self,
        *,
        name: str,
        directory: Path | None = None,
        total_steps: int | None = None,
        quiet: bool = False,
        console: Console | None = None,
    ) -> None:
        """Prepare the display.

        Args:
            name: name of the run.
            directory: directory of the run, shown at the end.
            total_steps: None if it is not known (yet).
            quiet: True to show nothing but warnings.
            console: default: stderr.
        """
        super().__init__(View(name, total_steps, directory), quiet=quiet, console=console)

    def set_total(self, total_steps: int | None) -> None:
        """Set the total number of steps."""
        self.send("total", total_steps)

    def set_restarts(self, restarts: int) -> None:
        """Set the number of restarts of the training."""
        self.send("restarts", restarts)

    def set_silence(self, text: str | None) -> None:
        """Set why there are no steps, for a live display; None: there are."""
        self.send("silence", text)

    def update(self, line: Mapping[str, Any]) -> None:
        """Show a metric line; one with `split` is shown as a validation."""
        self.send("line", line)


class View:
    """The state of the display, updated by the messages `line`, `total`, `restarts` and `silence`."""

    refresh_s = 0.125

    def __init__(self, name: str, total_steps: int | None, directory: Path | None = None) -> None:
        self.name = name
        self._directory = directory
        self.total_steps = total_steps
        self.restarts = 0
        self.silence: str | None = None
        self.line: Mapping[str, Any] = {}
        self.validation: Mapping[str, Any] = {}
        self._marks: deque[tuple[float, int]] = deque()
        self._speeds: deque[float] = deque(maxlen=50)
        self._display: Display | None = None

    @property
    def step(self) -> int:
        """Last step seen."""
        return int(self.line.get("step", 0))

    def update(self, line: Mapping[str, Any]) -> None:
        """Update the state with a metric line."""
        if "split" in line:
            self.validation = line
            return
        self.line = line
        if line.get("samples_per_s") is not None:
            self._speeds.append(float(line["samples_per_s"]))
        mark = (float(line.get("time_s", 0.0)), self.step)
        if self._marks and mark[1] <= self._marks[-1][1]:  # training went back to a checkpoint
            self._marks.clear()
        self._marks.append(mark)
        while mark[0] - self._marks[0][0] > _RATE_WINDOW_S and len(self._marks) > 2:
            self._marks.popleft()

    @property
    def samples_per_s(self) -> float | None:
        """Median speed of the last steps, so that one slow step does not change the display."""
        return sorted(self._speeds)[len(self._speeds) // 2] if self._speeds else None

    @property
    def left_s(self) -> float | None:
        """Seconds left at the speed of the last seconds; None while that is not known."""
        if self.total_steps is None or len(self._marks) < 2:
            return None
        (first_s, first), (last_s, last) = self._marks[0], self._marks[-1]
        return max(0, self.total_steps - last) * (last_s - first_s) / (last - first)

    def facts(self) -> list[str]:
        """Return the current numbers, the most important first."""
        facts = []
        if "epoch" in self.line:
            facts.append(f"epoch {self.line['epoch']}")
        facts += [f"{key} {number(self.line[key])}" for key in ("loss", "lr") if key in self.line]
        if self.samples_per_s is not None:
            facts.append(f"{number(self.samples_per_s)} samples/s")
        if self.restarts:
            facts.append(f"{self.restarts} restart{'s' if self.restarts > 1 else ''}")
        return facts

    def closing_rows(self, result: Mapping[str, Any]) -> list[tuple[str, str]]:
        """Return the rows at the end: the result, and the directory of the run."""
        where = [] if self._directory is None else [("run", short_path(self._directory))]
        return [*result_rows(result), *where]

    def take_in(self, kind: str, value: Any) -> str | None:
        if kind == "line":
            self.update(value)
        elif kind == "total":
            self.total_steps = value
        elif kind == "restarts":
            self.restarts = value
        elif kind == "silence":
            self.silence = value
        return None

    def news(self, kind: str, value: Any, since_s: float) -> str | None:
        """Return a line for a validation and, every few seconds, for a step."""
        if kind == "line" and "split" in value:
            loss = f"  (train loss {number(self.line['loss'])})" if "loss" in self.line else ""
            return f"step {self.progress_text()}  {value['split']}: {metrics_text(value)}{loss}"
        if kind == "line" and since_s > _PLAIN_LINE_S:
            left = "" if self.left_s is None else f"  {duration(self.left_s)} left"
            return f"step {self.progress_text()}  {'  '.join(self.facts())}{left}"
        return None

    def block(self) -> RenderableType:
        self._display = self._display or Display(self)
        return self._display

    def progress_text(self) -> str:
        """Return `230/460`, or `230` if the total is not known."""
        return f"{self.step:,}" + ("" if self.total_steps is None else f"/{self.total_steps:,}")


class Display:
    """The live block: a bar, the current numbers, and the last validation."""

    def __init__(self, view: View) -> None:
        from rich.progress_bar import ProgressBar

        self._view = view
        self._begin_s = time.monotonic()
        self._bar = ProgressBar(total=None, pulse=True)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.console import Group
        from rich.constrain import Constrain
        from rich.table import Table
        from rich.text import Text

        view = self._view
        self._bar.total = view.total_steps
        self._bar.pulse = view.total_steps is None or view.step == 0
        self._bar.completed = view.step
        top = Table.grid(padding=(0, 2), expand=True)
        top.add_column(no_wrap=True, max_width=24, overflow="ellipsis")
        top.add_column(ratio=1)
        top.add_column(no_wrap=True, justify="right")
        top.add_column(no_wrap=True, justify="right", min_width=9)
        if view.step:
            place, left = f"step {view.progress_text()}", "" if view.left_s is None else f"{duration(view.left_s)} left"
        else:
            place, left = "starting", f"{time.monotonic() - self._begin_s:.0f} s"
        top.add_row(Text(view.name, style="bold"), self._bar, place, Text(left, style="dim"))
        rows: list[RenderableType] = [top]
        if view.step:
            rows.append(Text("  " + "   ".join(view.facts()), overflow="ellipsis", no_wrap=True))
        if view.validation:
            at = f"   (step {view.validation['step']:,})"
            text = Text(f"  {view.validation['split']}: ", overflow="ellipsis", no_wrap=True)
            text.append(metrics_text(view.validation), style="cyan").append(at, style="dim")
            rows.append(text)
        if view.silence:
            rows.append(Text(f"  {view.silence}", style="yellow", overflow="ellipsis", no_wrap=True))
        # Room for the "^C" that a terminal echoes: a full line would wrap, and leave a copy of the display behind.
        yield Constrain(Group(*rows), options.max_width - 4)
