"""The output of a run's processes: each one's log in `logs/`, and the terminal, which is kept readable."""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from orchestray.platform.process.output import Lines, is_of_the_task, size_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from orchestray.platform.actors.member import Identity
    from orchestray.platform.run.writer import RunWriter

MOST_BYTES = 64 * 2**20
"""Largest size of the log of one process, in bytes."""
_BURST = 200
"""Number of lines that are shown at once."""
_LINES_PER_S = 20.0
_LONGEST_LINE = 2000
_REMEMBERED = 500
"""Number of shown lines for which it is known who printed them."""
_SAY_AGAIN_S = 10.0
"""Least number of seconds between two sentences about lines that are not shown."""


class Shower:
    """A choice of the lines that a terminal shows: not too many, and what several processes print once."""

    def __init__(self, show: Callable[[str, list[str]], None], clock: Callable[[], float] = time.monotonic) -> None:
        """
        Args:
            show: shows lines of one process, by its name.
            clock: returns seconds.
        """
        self._show, self._clock = show, clock
        self._room, self._at_s = float(_BURST), clock()
        self._printed_by: OrderedDict[str, str] = OrderedDict()
        """Process that printed each of the last lines first."""
        self._num_hidden, self._said_s = 0, -_SAY_AGAIN_S

    def lines(self, who: str, lines: list[str]) -> None:
        """Show lines that a process has printed."""
        now_s = self._clock()
        self._room, self._at_s = min(_BURST, self._room + (now_s - self._at_s) * _LINES_PER_S), now_s
        shown = []
        for line in lines:
            if not is_of_the_task(line) or self._is_known(who, line):
                continue
            if self._room < 1:
                self._num_hidden += 1
                continue
            self._room -= 1
            shown.append(line if len(line) <= _LONGEST_LINE else f"{line[:_LONGEST_LINE]}...")
        if shown:
            self._show(who, shown)
        if self._num_hidden and now_s - self._said_s >= _SAY_AGAIN_S:
            self.say_hidden()

    def say_hidden(self) -> None:
        """Say how many lines were not shown, if there are any."""
        if self._num_hidden:
            self._show("", [f"... {self._num_hidden:,} more lines were printed: they are in logs/ of the run"])
            self._num_hidden, self._said_s = 0, self._clock()

    def _is_known(self, who: str, line: str) -> bool:
        """Return True if another process has printed this line a short while ago."""
        first = self._printed_by.setdefault(line, who)
        if len(self._printed_by) > _REMEMBERED:
            self._printed_by.popitem(last=False)
        return first != who


class OutputLog:
    """A log of what each process of a run prints."""

    def __init__(self, writer: RunWriter, show: Callable[[str, list[str]], None], *, shows_all: bool = False) -> None:
        """
        Args:
            writer: writer of the run's directory.
            show: shows lines of a process, by its name.
            shows_all: True to leave out no lines, because it is not a terminal that shows them.
        """
        self._writer = writer
        self._show = show if shows_all else None
        self._shower = Shower(show)
        self._reader: Any = None
        self._lines: dict[tuple[str, str], Lines] = {}
        """Incomplete lines of each process, by node and path of its output."""
        self._names: dict[tuple[str, str], tuple[str, int]] = {}
        """Role and rank that each process had last."""
        self._sizes: dict[tuple[str, int], int] = {}
        self._pids: dict[tuple[str, int], int] = {}

    def skip(self, processes: Sequence[tuple[str, int, Identity]]) -> None:
        """Leave out what these processes have printed until now: they did so in an earlier run."""
        self._follow(processes, from_end=True)

    def take(self, processes: Sequence[tuple[str, int, Identity]]) -> None:
        """Record what all processes have printed since the last call.

        Args:
            processes: role, rank and identity of each process of the run. Earlier ones are read to their end.
        """
        self._follow(processes, from_end=False)
        if self._reader is not None:
            self._record(self._reader.read())

    def close(self) -> None:
        """Record the rest."""
        if self._reader is None:
            return
        self._record(self._reader.read_last())
        for key, lines in self._lines.items():
            self._keep(key, lines.end())
        self._shower.say_hidden()
        self._reader.close()
        self._reader = None

    def _follow(self, processes: Sequence[tuple[str, int, Identity]], *, from_end: bool) -> None:
        for role, rank, identity in processes:
            key = identity.node, identity.output
            if self._names.get(key) == (role, rank) or not identity.output:
                continue
            if self._reader is None:
                from orchestray.platform.actors.output_reader import OutputReader

                self._reader = OutputReader()
            self._reader.follow(*key, size_of(identity.output) if from_end else 0)
            self._lines.setdefault(key, Lines())
            self._names[key] = role, rank
            if self._pids.setdefault((role, rank), identity.pid) != identity.pid:
                self._pids[role, rank] = identity.pid
                self._write(role, rank, [f"--- from here on process {identity.pid} of node {identity.node} ---"])

    def _record(self, found: dict[tuple[str, str], bytes]) -> None:
        for key in sorted(found, key=lambda each: self._names[each]):
            self._keep(key, self._lines[key].feed(found[key]))

    def _keep(self, key: tuple[str, str], lines: list[str]) -> None:
        if lines:
            role, rank = self._names[key]
            self._write(role, rank, lines)
            show = self._show or self._shower.lines
            show(f"{role.replace('_', ' ')} {rank}", lines)

    def _write(self, role: str, rank: int, lines: list[str]) -> None:
        """Append lines to a process's log, up to the largest size."""
        before = self._sizes.get((role, rank), 0)
        if before > MOST_BYTES:
            return
        text = "\n".join(lines) + "\n"
        self._sizes[role, rank] = before + len(text)
        if self._sizes[role, rank] > MOST_BYTES:
            text += f"--- no more than {MOST_BYTES // 2**20} MB are kept of what one process prints ---\n"
        self._writer.output(role, rank, text)
