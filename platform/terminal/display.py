"""Displays of progress: a live block on a terminal, plain lines elsewhere."""

from __future__ import annotations

import queue
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, Protocol, Self

from orchestray.platform.terminal.format import duration

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from rich.console import Console, RenderableType

STATUS_STYLES = {"succeeded": "green", "failed": "red", "interrupted": "yellow"}
"""Style of each status, by its name in rich; a status that is missing here is written plainly."""


class Face(Protocol):
    """The content of the display of a run or search. The display's thread makes all calls."""

    name: str
    refresh_s: float
    """Seconds between two refreshes of the block."""

    def take_in(self, kind: str, value: Any) -> str | None:
        """Update the content with a message; return a text to show if the message is a failure."""

    def news(self, kind: str, value: Any, since_s: float) -> str | None:
        """Return a plain line for a message, or None; `since_s` is the time in seconds since the last such line."""

    def block(self) -> RenderableType:
        """Return the current live block."""

    def closing_rows(self, result: Mapping[str, Any]) -> list[tuple[str, str]]:
        """Return the rows of the closing table."""


class Shown:
    """A display; a context manager.

    Its methods only leave a message for the display's own thread. They never wait for a slow terminal, and may be
    called from any thread or from a signal handler.
    """

    def __init__(self, face: Face, *, quiet: bool = False, console: Console | None = None) -> None:
        """Prepare the display.

        Args:
            face: content to show.
            quiet: True to show nothing but warnings.
            console: default: stderr.
        """
        self._messages: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._face, self._quiet, self._console = face, quiet, console
        self._thread: threading.Thread | None = None

    def send(self, kind: str, value: Any) -> None:
        """Send a message to the face."""
        if not self._quiet:
            self._messages.put((kind, value))

    def event(self, text: str) -> None:
        """Show a sentence permanently above the live block; of a quiet display only warnings are shown, on stderr."""
        if self._quiet and text.startswith("warning: "):
            print(f"{self._face.name}: {text}", file=sys.stderr, flush=True)  # noqa: T201 - this is the display
        self.send("event", text)

    def said(self, who: str, lines: list[str]) -> None:
        """Show lines that a process has printed permanently above the live block; `who` is its name."""
        self.send("said", (who, lines))

    def warn(self, text: str) -> None:
        """Show a warning permanently, on a quiet display too."""
        self.event(f"warning: {text}")

    def finish(self, result: Mapping[str, Any]) -> None:
        """End the display with a table of `result.json`; return when it is shown."""
        self.send("finish", result)
        self._stop()

    def __enter__(self) -> Self:
        if not self._quiet:
            self._thread = threading.Thread(target=self._work, name="display", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def _stop(self) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            self._messages.put(("stop", None))
            thread.join()

    def _work(self) -> None:
        # rich is imported here: its modules cost a tenth of a second, for which the start of a run need not wait.
        from rich.console import Console

        console = self._console or Console(stderr=True, highlight=False)
        is_live = console.is_terminal and (self._console is not None or sys.stdout.isatty())
        try:
            (self._show_live if is_live else self._show_plain)(console)
        except OSError:  # the terminal is gone; the work continues without a display
            while self._messages.get()[0] != "stop":
                pass

    def _show_plain(self, console: Console) -> None:
        face, get = self._face, self._messages.get
        shown_s = time.monotonic()

        def say(text: str) -> None:
            console.print(f"{face.name}: {text}", markup=False, soft_wrap=True)

        for kind, value in iter(get, ("stop", None)):
            if kind == "event":
                say(value)
            elif kind == "said":
                for line in _said(value):
                    say(line)
            elif kind == "finish":
                say(value["status"])
                for name, row in face.closing_rows(value):
                    say(f"  {name:<10}  {row}")
            else:
                if (failure := face.take_in(kind, value)) is not None:
                    say(failure)
                if (text := face.news(kind, value, time.monotonic() - shown_s)) is not None:
                    say(text)
                    shown_s = time.monotonic()

    def _show_live(self, console: Console) -> None:
        from rich.live import Live
        from rich.text import Text

        face, begin_s = self._face, time.monotonic()
        with Live(get_renderable=face.block, console=console, auto_refresh=False, transient=True) as live:
            for kind, value in self._refreshing(live.refresh):
                if kind in ("stop", "finish"):
                    break
                if kind == "event":
                    live.console.print(_event_line(time.monotonic() - begin_s, value))
                elif kind == "said":
                    live.console.print(Text("\n".join(_said(value)), style="dim"), soft_wrap=True)
                elif (failure := face.take_in(kind, value)) is not None:
                    live.console.print(Text(failure, style="red"))
        while kind != "stop":
            if kind == "finish":
                console.print(_closing_table(face, value))
            kind, value = self._messages.get()

    def _refreshing(self, refresh: Callable[[], None]) -> Iterator[tuple[str, Any]]:
        """Yield the messages, for ever, with a refresh between them when one is due."""
        refresh_at_s = time.monotonic()
        while True:
            if time.monotonic() >= refresh_at_s:  # before the next message: a fast run must not starve the display
                refresh()
                refresh_at_s = time.monotonic() + self._face.refresh_s
            try:
                yield self._messages.get(timeout=max(0.0, refresh_at_s - time.monotonic()))
            except queue.Empty:
                continue


def _said(value: tuple[str, list[str]]) -> list[str]:
    """Return lines of a process, each with its name in front."""
    who, lines = value
    return [f"{who}: {line}" if who else line for line in lines]


def _event_line(at_s: float, text: str) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2))
    grid.add_column(justify="right", width=9)
    grid.add_column(overflow="fold")
    style = "yellow" if text.startswith("warning") or "lost" in text else ""
    grid.add_row(Text(duration(at_s), style="dim"), Text(text, style=style))
    return grid


def _closing_table(face: Face, result: Mapping[str, Any]) -> RenderableType:
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    status = str(result["status"])
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, text in face.closing_rows(result):
        grid.add_row(name, Text(text))
    style = STATUS_STYLES.get(status, "")
    title = Text.assemble((face.name, "bold"), "  ", (status, style))
    return Panel(grid, title=title, title_align="left", border_style=style or "none", padding=(0, 2), expand=False)
