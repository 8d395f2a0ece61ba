"""What the driver makes of a mailbox's messages: events, metric lines, `actors.json`, and the end of the run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from orchestray.platform import policies
from orchestray.platform.errors import TrainingError
from orchestray.platform.gang.member import Failure

if TYPE_CHECKING:
    from collections.abc import Callable

    from orchestray.trainers.driver.story import Book


class Listener:
    """Writes down what a mailbox holds, and says in the end what came of the run."""

    def __init__(self, book: Book, *, num_workers: int, batch_size: int, max_restarts: int, resuming: bool) -> None:
        self._book = book
        self._num_workers = num_workers
        self._batch_size = batch_size
        self._max_restarts = max_restarts
        self._resuming = resuming
        self._announced = False
        self._attempts = 0
        self._actors: dict[int, dict[str, Any]] = {}
        self._answers: dict[int, Any] = {}
        self._silent: set[int] = set()
        """Ranks of this attempt that do nothing more."""
        self._lost: dict[int, str] | None = None
        """Why workers of this attempt are dead, by rank, once it is over."""
        self.failure: Failure | None = None

    @property
    def written_step(self) -> int:
        return self._book.story.written_step

    @property
    def is_complete(self) -> bool:
        """Whether there is nothing more to wait for."""
        if self.failure is None and len(self._answers) < self._num_workers:
            return False
        return len(self._silent) == self._num_workers

    def hear(self, messages: list[tuple[str, Any]]) -> None:
        """Take in messages of the mailbox, in order."""
        hears: dict[str, Callable[[Any], None]] = {
            "attempt": self._on_attempt,
            "entered": self._on_entered,
            "sizes": self._on_sizes,
            "lines": self._book.record,
            "answer": self._on_answer,
            "silent": self._silent.add,
            "lost": self._on_lost,
            "fault": self._on_fault,
        }
        for kind, value in messages:
            hears[kind](value)
        self._book.writer.raise_if_failed()

    def _on_attempt(self, _: None) -> None:
        self._attempts += 1
        self._answers.clear()
        self._silent.clear()
        if self._attempts == 1:
            return
        if self._lost is None:
            self._on_lost({})
        self._lost = None
        story = self._book.story
        story.restarts += 1
        self._book.progress.set_restarts(story.restarts)

    def _on_entered(self, actor: dict[str, Any]) -> None:
        self._actors[actor["rank"]] = actor
        self._write_actors()
        if self._announced:
            self._book.writer.event("worker_started", **actor)

    def _on_sizes(self, sizes: dict[str, int]) -> None:
        if self._announced:
            return
        book = self._book
        book.story.total_steps = sizes["total_steps"]
        book.progress.set_total(sizes["total_steps"])
        if sizes["samples"] < self._batch_size:
            book.progress.event(
                f"warning: the data has {sizes['samples']} samples, fewer than one batch of "
                f"{self._batch_size}: each step uses all of them."
            )
        facts: dict[str, Any] = {**sizes, "workers": self._num_workers}
        book.writer.event("resumed" if self._resuming else "started", **facts)
        self._announced = True
        for _, actor in sorted(self._actors.items()):
            book.writer.event("worker_started", **actor)

    def _on_answer(self, answer: tuple[int, Any]) -> None:
        rank, value = answer
        self._answers[rank] = value
        if isinstance(value, Failure) and self.failure is None:
            self.failure = value
            self._book.writer.event("worker_failed", role="worker", rank=rank, traceback=value.traceback)

    def _on_lost(self, causes: dict[int, str]) -> None:
        if self.is_complete:
            return  # it died with its work done
        self._lost = {**(self._lost or {}), **causes}
        for rank, cause in sorted(causes.items()):
            self._book.writer.event("worker_lost", role="worker", rank=rank, cause=cause)
            self._book.progress.event(f"worker {rank} lost: {cause}")
        self._actors.clear()  # Ray Train ends the others too
        self._write_actors()
        story = self._book.story
        story.lost_at_s = story.lost_at_s or story.now_s()
        self._give_up_after_too_many()

    def _on_fault(self, kill: dict[str, Any]) -> None:
        self._book.writer.event("fault", **kill)

    def _give_up_after_too_many(self) -> None:
        """Raise what Ray Train is about to, which counts by the same limit, in words of ours."""
        if self.failure is not None:
            return
        causes = self._lost or {0: "the workers lost touch with each other"}
        decision = policies.after_loss(causes, restarts=self._book.story.restarts, max_restarts=self._max_restarts)
        if isinstance(decision, policies.GiveUp):
            raise TrainingError(decision.reason)

    def _write_actors(self) -> None:
        self._book.writer.actors([actor for _, actor in sorted(self._actors.items())])

    def judge(self, error: BaseException | None) -> Any:
        """The `Outcome` of a run that has ended.

        Args:
            error: what Ray Train raised.

        Raises:
            OrchestrayError: the run failed, as this says.
        """
        if self.failure is not None:
            raise self.failure.error
        if self.is_complete:
            return self._answers[0]
        raise TrainingError(f"Ray Train ended the run: {_reason(error)}") from error


def _reason(error: BaseException | None) -> str:
    """The first line of Ray Train's text that says something."""
    lines = [line.strip() for line in str(error or "the workers gave no answer.").splitlines() if line.strip()]
    return next((line for line in lines if not line.endswith(":")), lines[0])
