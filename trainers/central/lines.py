"""What the lead server says of the run while it goes on, fetched by its driver. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError

from orchestray.trainers.fetching import write_down

if TYPE_CHECKING:
    from orchestray.trainers.central.primaries import Primaries
    from orchestray.trainers.story import Book

_INTERVAL_S = 0.1
_TIMEOUT_S = 0.3


class Lines:
    """Metric lines and events, from whichever server leads, to where they are written down."""

    def __init__(self, primaries: Primaries, book: Book) -> None:
        """
        Args:
            primaries: know the lead.
            book: what is fetched is written down here.
        """
        self._primaries, self._book = primaries, book

    def ask(self, timeout_s: float = _TIMEOUT_S) -> Any:
        """Ask the lead for what is new; it answers, to a `take`, when there is something or the time is over."""
        return self._primaries.ask_lead("drain", timeout_s, _INTERVAL_S, self._book.story.written_step)

    def take(self, reference: Any) -> bool:
        """Write down what was asked for; returns whether there was anything. Waits for it."""
        return write_down(reference, self._book)

    def copies(self, step: int) -> list[dict[str, Any]]:
        """The lines from a step on, again: what a lost lead may have told nobody."""
        try:
            lines = ray.get(self._primaries.ask_lead("lines_since", step - 1))
        except RayError:
            return []
        return list(lines) if isinstance(lines, list) else []
