"""What a training shows while it runs: a live display on a terminal, plain lines elsewhere."""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Self

from orchestray.platform.run.format import duration, metrics_text, number, result_rows, short_path

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult

_REFRESH_S = 0.125
_PLAIN_LINE_S = 5.0
_RATE_WINDOW_S = 20.0
_COLOURS = {"succeeded": "green", "failed": "red", "interrupted": "yellow"}


class Progress:
    """The display of one run; a context manager.

    Its calls only leave a message for the display's own thread: they never wait for a slow terminal, and may come from
    any thread or from a signal handler.
    """

    def __init__(
        self,
        *,
        name: str,
        directory: Path | None = None,
        total_steps: int | None = None,
        quiet: bool = False,
        console: Console | None = None,
    ) -> None:
        """
        Args:
            name: of the run.
            directory: of the run; named at the end.
            total_steps: None where not known (yet).
            quiet: show nothing.
            console: default: stderr.
        """
        self._messages: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._view = View(name, total_steps, directory)
        self._quiet = quiet
        self._console = console
        self._thread: threading.Thread | None = None

    def set_total(self, total_steps: int | None) -> None:
        """Say how many steps there are to do in all."""
        self._send("total", total_steps)

    def set_restarts(self, restarts: int) -> None:
        """Say how often training was restarted."""
        self._send("restarts", restarts)

    def update(self, line: Mapping[str, Any]) -> None:
        """Show a metric line; one with `split` is shown as a validation."""
        self._send("line", line)

    def event(self, text: str) -> None:
        """Show a sentence above the live display, to stay."""
        self._send("event", text)

    def finish(self, result: Mapping[str, Any]) -> None:
        """End the display with a table of what `result.json` says; returns when it is shown."""
        self._send("finish", result)
        self._stop()

    def __enter__(self) -> Self:
        if not self._quiet:
            self._thread = threading.Thread(target=self._work, name="progress", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def _send(self, kind: str, value: Any) -> None:
        if not self._quiet:
            self._messages.put((kind, value))

    def _stop(self) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            self._messages.put(("stop", None))
            thread.join()

    def _work(self) -> None:
        # rich is imported here: its modules cost a tenth of a second, which the start of a run need not wait for.
        from rich.console import Console

        console = self._console or Console(stderr=True, highlight=False)
        is_live = console.is_terminal and (self._console is not None or sys.stdout.isatty())
        try:
            (_show_live if is_live else _show_plain)(console, self._view, self._messages)
        except OSError:  # the terminal is gone; training goes on without a display
            while self._messages.get()[0] != "stop":
                pass


class View:
    """What the display knows; pure, fed with messages."""

    def __init__(self, name: str, total_steps: int | None, directory: Path | None = None) -> None:
        self.name = name
        self._directory = directory
        self.total_steps = total_steps
        self.restarts = 0
        self.line: Mapping[str, Any] = {}
        self.validation: Mapping[str, Any] = {}
        self._marks: deque[tuple[float, int]] = deque()
        self._speeds: deque[float] = deque(maxlen=50)

    @property
    def step(self) -> int:
        """The last step seen."""
        return int(self.line.get("step", 0))

    def update(self, line: Mapping[str, Any]) -> None:
        """Take in a metric line."""
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
        """The median of the last steps: one slow step is no news."""
        return sorted(self._speeds)[len(self._speeds) // 2] if self._speeds else None

    @property
    def left_s(self) -> float | None:
        """How long the rest will take at the pace of the last seconds; None while that is not known."""
        if self.total_steps is None or len(self._marks) < 2:
            return None
        (first_s, first), (last_s, last) = self._marks[0], self._marks[-1]
        return max(0, self.total_steps - last) * (last_s - first_s) / (last - first)

    def facts(self) -> list[str]:
        """The current numbers, the most wanted first."""
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
        """What is said at the end: the result, and where all of it is."""
        where = [] if self._directory is None else [("run", short_path(self._directory))]
        return [*result_rows(result), *where]

    def progress_text(self) -> str:
        """`230/460`, or `230` where the end is not known."""
        return f"{self.step:,}" + ("" if self.total_steps is None else f"/{self.total_steps:,}")


_Messages = queue.SimpleQueue[tuple[str, Any]]


def _take_in(view: View, kind: str, value: Any) -> None:
    if kind == "line":
        view.update(value)
    elif kind == "total":
        view.total_steps = value
    elif kind == "restarts":
        view.restarts = value


def _show_plain(console: Console, view: View, messages: _Messages) -> None:
    shown_s = time.monotonic()

    def say(text: str) -> None:
        console.print(f"{view.name}: {text}", markup=False, soft_wrap=True)

    while True:
        kind, value = messages.get()
        if kind == "stop":
            return
        _take_in(view, kind, value)
        if kind == "line" and "split" in value:
            loss = f"  (train loss {number(view.line['loss'])})" if "loss" in view.line else ""
            say(f"step {view.progress_text()}  {value['split']}: {metrics_text(value)}{loss}")
        elif kind == "line" and time.monotonic() - shown_s > _PLAIN_LINE_S:
            left = "" if view.left_s is None else f"  {duration(view.left_s)} left"
            say(f"step {view.progress_text()}  {'  '.join(view.facts())}{left}")
            shown_s = time.monotonic()
        elif kind == "event":
            say(value)
        elif kind == "finish":
            say(value["status"])
            for name, text in view.closing_rows(value):
                say(f"  {name:<10}  {text}")


def _show_live(console: Console, view: View, messages: _Messages) -> None:
    from rich.live import Live

    begin_s = time.monotonic()
    with Live(Display(view), console=console, auto_refresh=False, transient=True) as live:
        refresh_at_s = begin_s
        while True:
            if time.monotonic() >= refresh_at_s:  # before the next message: a fast run must not starve the display
                live.refresh()
                refresh_at_s = time.monotonic() + _REFRESH_S
            try:
                kind, value = messages.get(timeout=max(0.0, refresh_at_s - time.monotonic()))
            except queue.Empty:
                continue
            if kind in ("stop", "finish"):
                break
            _take_in(view, kind, value)
            if kind == "event":
                live.console.print(_event_line(time.monotonic() - begin_s, value))
    while kind != "stop":
        if kind == "finish":
            console.print(_closing_table(view, value))
        kind, value = messages.get()


def _event_line(at_s: float, text: str) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2))
    grid.add_column(justify="right", width=9)
    grid.add_column(overflow="fold")
    style = "yellow" if text.startswith("warning") or "lost" in text else ""
    grid.add_row(Text(duration(at_s), style="dim"), Text(text, style=style))
    return grid


class Display:
    """The live part: a bar, the current numbers, the last validation."""

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
        # Room for the "^C" that a terminal echoes: a full line would make it wrap, and the display leave a copy behind.
        yield Constrain(Group(*rows), options.max_width - 4)


def _closing_table(view: View, result: Mapping[str, Any]) -> RenderableType:
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    status = str(result["status"])
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, text in view.closing_rows(result):
        grid.add_row(name, Text(text))
    colour = _COLOURS.get(status, "")
    title = Text.assemble((view.name, "bold"), "  ", (status, colour))
    return Panel(grid, title=title, title_align="left", border_style=colour or "none", padding=(0, 2), expand=False)
