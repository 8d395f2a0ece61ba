"""The driver's handling of a mailbox's messages: events, metric lines, `actors.json`, and the end of the run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from orchestray.platform.actors.member import Failure
from orchestray.platform.errors import TrainingError
from orchestray.trainers.driver.control import controller

if TYPE_CHECKING:
    from collections.abc import Callable

    from orchestray.trainers.driver.runlog.run_log import RunLog


class Listener:
    """A handler that records a mailbox's messages, and in the end returns the outcome of the run."""

    def __init__(
        self, run_log: RunLog, *, num_workers: int, batch_size: int, max_restarts: int, resuming: bool
    ) -> None:
        self._run_log = run_log
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
        """Causes of the deaths of this attempt's workers, by rank, once it is over."""
        self.failure: Failure | None = None

    @property
    def written_step(self) -> int:
        return self._run_log.run_progress.written_step

    @property
    def is_complete(self) -> bool:
        """True if there is nothing more to wait for."""
        if self.failure is None and len(self._answers) < self._num_workers:
            return False
        return len(self._silent) == self._num_workers

    def hear(self, messages: list[tuple[str, Any]]) -> None:
        """Handle messages of the mailbox, in order."""
        hears: dict[str, Callable[[Any], None]] = {
            "attempt": self._on_attempt,
            "entered": self._on_entered,
            "sizes": self._on_sizes,
            "lines": self._run_log.record,
            "answer": self._on_answer,
            "silent": self._silent.add,
            "lost": self._on_lost,
            "fault": self._on_fault,
        }
        for kind, value in messages:
            hears[kind](value)
        self._run_log.writer.raise_if_failed()

    def _on_attempt(self, _: None) -> None:
        self._attempts += 1
        self._answers.clear()
        self._silent.clear()
        if self._attempts == 1:
            return
        if self._lost is None:
            self._on_lost({})
        self._lost = None
        run_progress = self._run_log.run_progress
        run_progress.restarts += 1
        self._run_log.progress.set_restarts(run_progress.restarts)

    def _on_entered(self, actor: dict[str, Any]) -> None:
        self._actors[actor["rank"]] = actor
        self._write_actors()
        if self._announced:
            self._run_log.writer.event("worker_started", **actor)

    def _on_sizes(self, sizes: dict[str, int]) -> None:
        if self._announced:
            return
        self._run_log.announce(sizes, self._batch_size, resumed=self._resuming, workers=self._num_workers)
        self._announced = True
        for _, actor in sorted(self._actors.items()):
            self._run_log.writer.event("worker_started", **actor)

    def _on_answer(self, answer: tuple[int, Any]) -> None:
        rank, value = answer
        self._answers[rank] = value
        if isinstance(value, Failure) and self.failure is None:
            self.failure = value
            self._run_log.writer.event("worker_failed", role="worker", rank=rank, traceback=value.traceback)

    def _on_lost(self, causes: dict[int, str]) -> None:
        if self.is_complete:
            return  # the worker died after its work was done
        self._lost = {**(self._lost or {}), **causes}
        for rank, cause in sorted(causes.items()):
            self._run_log.writer.event("worker_lost", role="worker", rank=rank, cause=cause)
            self._run_log.progress.event(f"worker {rank} lost: {cause}")
        self._actors.clear()  # Ray Train ends the others too
        self._write_actors()
        run_progress = self._run_log.run_progress
        run_progress.lost_at_s = run_progress.lost_at_s or run_progress.now_s()
        self._give_up_after_too_many()

    def _on_fault(self, kill: dict[str, Any]) -> None:
        self._run_log.writer.event("fault", **kill)

    def _give_up_after_too_many(self) -> None:
        """Raise an error with our own text when Ray Train is about to give up; it counts by the same limit."""
        if self.failure is not None:
            return
        restarts = self._run_log.run_progress.restarts
        state = controller.State({}, self._num_workers, self._max_restarts, restarts)
        _, given_up = controller.counted(state, self._lost or {0: controller.LOST_TOUCH}, "worker")
        if given_up is not None:
            raise TrainingError(given_up.reason)

    def _write_actors(self) -> None:
        self._run_log.writer.actors([actor for _, actor in sorted(self._actors.items())])

    def judge(self, error: BaseException | None) -> Any:
        """Return the `Outcome` of a run that has ended.

        Args:
            error: exception that Ray Train raised, or None.

        Raises:
            OrchestrayError: the run failed; the text says why.
        """
        if self.failure is not None:
            raise self.failure.error
        if self.is_complete:
            return self._answers[0]
        raise TrainingError(f"Ray Train ended the run: {_reason(error)}") from error


def _reason(error: BaseException | None) -> str:
    """Return the first line of Ray Train's text that is not just a heading."""
    lines = [line.strip() for line in str(error or "the workers gave no answer.").splitlines() if line.strip()]
    return next((line for line in lines if not line.endswith(":")), lines[0])
