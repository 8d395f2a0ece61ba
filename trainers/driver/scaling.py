"""What both drivers do for a run that is scaled: take the request up, have who is added ready, say what came of it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from orchestray.platform.errors import OrchestrayError
from orchestray.platform.run.scaling import RefusedError

if TYPE_CHECKING:
    import threading

    from orchestray.platform.gang.gang import Gang
    from orchestray.platform.run.scaling import Change
    from orchestray.trainers.driver.story import Book
    from orchestray.trainers.replica.settings import ReplicaSettings


class Scaling:
    """Of a gang of workers, for as long as it exists."""

    def __init__(self, book: Book, gang: Gang, host: str, stop: threading.Event) -> None:
        """
        Args:
            book: of the run.
            gang: of the workers.
            host: what its members build.
            stop: set when the run shall end.
        """
        self._book = book
        self._gang = gang
        self._host = host
        self._stop = stop

    def ready(self, settings: ReplicaSettings) -> Change | None:
        """The change to make now; None: none was asked for, or those who are added are not built yet. Never waits.

        Args:
            settings: of the run as it is.
        """
        desk = self._book.desk
        change = None if desk is None else desk.look()
        if change is None:
            return None
        if self._stop.is_set():
            self.refuse("The run is being stopped.")
            return None
        if not change.grows:
            return change
        gang = self._gang
        try:
            if gang.growth is None:
                num_members = (change.after - change.before) * settings.layout.model_size
                gang.begin_growth(num_members, self._host, scaled(settings, change))
            return change if gang.growth is not None and gang.growth.is_ready() else None
        except OrchestrayError as error:
            self.refuse(f"{error} The run goes on as it was.")
            return None

    def refuse(self, reason: str) -> None:
        """The change is not made."""
        if self._gang.growth is not None:
            self._gang.growth.cancel()
        if self._book.desk is not None:
            self._book.desk.refuse(RefusedError(reason))

    def done(self, step: int) -> None:
        """The change is made; `step` was the last before it."""
        assert self._book.desk is not None
        change = self._book.desk.done(step)
        told: dict[str, Any] = {"from": change.before, "to": change.after, "step": step}
        self._book.writer.event("scaled", **told)
        self._book.progress.event(f"scaled at step {step}: data: {change.before} -> {change.after}")

    def close(self) -> None:
        """The run has ended; who still waits for a change is told by the desk."""
        if self._gang.growth is not None:
            self._gang.growth.cancel()


def scaled(settings: ReplicaSettings, change: Change) -> ReplicaSettings:
    """What the replicas are told from then on."""
    return replace(settings, layout=replace(settings.layout, data=change.after))
