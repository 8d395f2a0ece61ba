"""What the lead server says of the run while it goes on, fetched by its driver. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from orchestray.trainers.driver.fetching import Inquiry, copies_of

if TYPE_CHECKING:
    from orchestray.trainers.central.primaries import Primaries
    from orchestray.trainers.driver.story import Book

_INTERVAL_S = 0.25
"""Asking costs as much as some tens of lines, on a machine whose cores the workers share with it."""
_HASTY_S = 0.1
"""While somebody waits for a step."""
_TIMEOUT_S = 0.3


class Lines:
    """Metric lines and events, from whichever server leads, to where they are written down."""

    def __init__(self, primaries: Primaries, book: Book) -> None:
        """
        Args:
            primaries: know the lead.
            book: what is fetched is written down here.
        """
        self._primaries, self._story = primaries, book.story
        self._inquiry = Inquiry(book)

    def ask(self, timeout_s: float = _TIMEOUT_S, *, hasty: bool = False) -> Any:
        """Ask the lead for what is new; it answers, to a `take`, when there is something or the time is over.

        Args:
            timeout_s: the time.
            hasty: whether somebody waits for what it may say; else lines are fetched many at a time.
        """
        interval_s = _HASTY_S if hasty else _INTERVAL_S
        written = self._story.written_step
        return self._inquiry.ask(lambda: self._primaries.ask_lead("drain", timeout_s, interval_s, written))

    def take(self) -> bool:
        """As `Inquiry.take`."""
        return self._inquiry.take()

    def copies(self, step: int) -> list[dict[str, Any]]:
        """The lines from a step on, again: what a lost lead may have told nobody."""
        return copies_of([self._primaries.ask_lead("lines_since", step - 1)])
