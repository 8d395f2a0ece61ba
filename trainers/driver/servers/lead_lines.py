"""The lead server's lines of the run, as its driver fetches them. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from orchestray.trainers.driver.runlog.line_fetcher import LineFetcher, copies_of

if TYPE_CHECKING:
    from orchestray.trainers.driver.runlog.run_log import RunLog
    from orchestray.trainers.driver.servers.server_group import ServerGroup

_INTERVAL_S = 0.25
"""Seconds between requests. A request costs as much as some tens of lines, on cores that the workers share."""
_HASTY_S = 0.1
"""Seconds between requests while the driver waits for a step."""
_TIMEOUT_S = 0.3


class Lines:
    """A fetcher of metric lines and events from the present lead to the log."""

    def __init__(self, primaries: ServerGroup, run_log: RunLog) -> None:
        """
        Args:
            primaries: group of servers, which knows the lead.
            run_log: log to which fetched lines are written.
        """
        self._primaries, self._run_progress = primaries, run_log.run_progress
        self._line_fetcher = LineFetcher(run_log)

    def ask(self, timeout_s: float = _TIMEOUT_S, *, hasty: bool = False) -> Any:
        """Request new lines from the lead; it answers, to a `take`, when there are any or the time is over.

        Args:
            timeout_s: longest wait of the lead in seconds.
            hasty: True if the driver waits for the lines; otherwise many lines are fetched at a time.
        """
        interval_s = _HASTY_S if hasty else _INTERVAL_S
        written = self._run_progress.written_step
        return self._line_fetcher.ask(lambda: self._primaries.ask_lead("drain", timeout_s, interval_s, written))

    def take(self) -> bool:
        """Wait for the answer to the open request, for a while, and record it; return True if there was anything."""
        return self._line_fetcher.take()

    def copies(self, step: int) -> list[dict[str, Any]]:
        """Return the lead's copies of the lines from a step on, which a lost lead may not have handed over."""
        return copies_of([self._primaries.ask_lead("lines_since", step - 1)])
