"""The driver's handling of a mailbox's messages: events, metric lines, `actors.json`, and the end of the run."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

from orchestray.platform.actors.member import Failure, Identity
from orchestray.platform.actors.stacks import stacks_of
from orchestray.platform.errors import Interrupted, TrainingError
from orchestray.trainers.driver.control import controller, decisions, events
from orchestray.trainers.driver.runlog.kill_schedule import KillSchedule
from orchestray.trainers.driver.runlog.losses import Losses

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from orchestray.trainers.driver.control.evacuation import DrainWatch
    from orchestray.trainers.driver.engines.heartbeats import Beat, Heartbeats
    from orchestray.trainers.driver.runlog.run_log import RunLog

_ROLE = "worker"


class Listener:
    """A handler that records a mailbox's messages, and in the end returns the outcome of the run.

    Of what the controller decides, Ray Train itself stops workers, replaces them and has them begin again.
    """

    def __init__(
        self,
        run_log: RunLog,
        heartbeats: Heartbeats,
        drain_watch: DrainWatch,
        *,
        batch_size: int,
        max_restarts: int,
        resuming: bool,
    ) -> None:
        """
        Args:
            run_log: log of the run.
            heartbeats: workers of the run as their heartbeats show them.
            drain_watch: watch for the drained nodes of the cluster.
            batch_size: samples of a batch.
            max_restarts: number of recoveries after which the run is given up.
            resuming: True if the run goes on from a checkpoint of an earlier command.
        """
        self._run_log, self._heartbeats, self._drain_watch = run_log, heartbeats, drain_watch
        num_workers = heartbeats.shape.size
        self._losses = Losses(run_log, KillSchedule((), _ROLE), _ROLE)  # the mailbox knows the kills on purpose
        self._num_workers = num_workers
        self._batch_size = batch_size
        self._resuming = resuming
        self._announced = False
        self._actors: dict[int, dict[str, Any]] = {}
        self._workers: dict[int, Identity] = {}
        self._answers: dict[int, Any] = {}
        self._nodes: dict[int, str] = {}
        """Ids of the nodes of this attempt's workers, by rank."""
        self._wanted: list[str] = []
        """Methods of the mailbox that are to be called."""
        self._interrupted_at: int | None = None
        """Step at which an attempt ended for a move; None once the next has begun."""
        self._killed: dict[int, str] = {}
        """Reasons for which workers of this attempt were killed, by rank."""
        self._state = controller.State.of(
            num_workers, num_workers, max_restarts=max_restarts, restarts=run_log.run_progress.restarts, in_step=True
        ).employed(0)
        self._is_between = True
        """True until the workers of the next attempt have begun."""
        self.failure: Failure | None = None
        self.is_complete = False
        """True if there is nothing more to wait for."""

    @property
    def written_step(self) -> int:
        return self._run_log.run_progress.written_step

    def hear(self, messages: list[tuple[str, Any]]) -> None:
        """Handle messages of the mailbox, in order."""
        hears: dict[str, Callable[[Any], None]] = {
            "attempt": self._on_attempt,
            "entered": self._on_entered,
            "sizes": self._on_sizes,
            "lines": self._run_log.record,
            "answer": self._on_answer,
            "moved": self._on_moved,
            "silent": self._on_silent,
            "lost": self._on_lost,
            "fault": lambda kill: self._run_log.writer.event("fault", **kill),
        }
        for kind, value in messages:
            hears[kind](value)
        self._run_log.writer.raise_if_failed()

    def look_at(self, beats: Mapping[int, Beat]) -> list[str]:
        """Kill the workers that are silent or stuck for too long, with their stacks saved; Ray Train replaces them.

        Look for drained nodes as well, which the workers are to leave.

        Args:
            beats: newest heartbeat of each worker that has sent one.

        Returns:
            Names of the methods of the mailbox that are to be called.
        """
        self._heartbeats.hear(beats)
        if not self._is_between:
            self._look_for_drains()
            self._look_for_troubles()
        wanted, self._wanted = self._wanted, []
        return wanted

    def _look_for_drains(self) -> None:
        if len(self._nodes) < self._num_workers:  # it is not known yet which of them it concerns
            return
        for node in self._drain_watch.look() or ():
            if ranks := sorted(rank for rank, at in self._nodes.items() if at == node):
                self._drain_watch.announce(self._run_log, node, {_ROLE: ranks})
                self._tell(events.MoveWanted())

    def _look_for_troubles(self) -> None:
        if troubles := self._heartbeats.troubles():
            self._losses.begin()
            self._killed |= troubles
            self._save_stacks(list(troubles), kill=True)
        for rank in troubles:
            self._heartbeats.leave(rank)
        # Those that wait for a killed one are not to blame.
        if not self._killed and self._heartbeats.is_newly_deadlocked():
            self._save_stacks(sorted(self._workers), kill=False)
            self._losses.stalled(_ROLE)
            self._wanted.append("abort")

    def _save_stacks(self, ranks: list[int], *, kill: bool) -> None:
        texts = stacks_of([self._workers[rank] for rank in ranks], kill=kill)
        for rank, text in zip(ranks, texts, strict=True):
            self._losses.keep_stacks(_ROLE, rank, text)

    # -- what the controller decides -----------------------------------------------------------------------------------

    def _tell(self, *happened: events.Event) -> None:
        """Tell the controller what has happened, and do what it decides."""
        for event in happened:
            self._state, decided = controller.step(self._state, event)
            for decision in decided:
                self._act(decision)

    def _act(self, decision: decisions.Decision) -> None:
        match decision:
            case decisions.Record(causes):
                self._record(causes)
            case decisions.Interrupt():
                self._wanted.append("move")
            case decisions.Move():
                self._wanted.append("moved")
                self._interrupted_at = self._answers[0].step
            case decisions.Employ():
                self._begin_again()
            case decisions.GiveUp(reason):
                raise TrainingError(reason)
            case decisions.Fail() | decisions.Finish():
                self.is_complete = True

    def _record(self, causes: Mapping[int, str]) -> None:
        self.take_output()  # before it is said that they are lost: it may say why
        self._losses.record(_ROLE, {rank: self._killed.get(rank, cause) for rank, cause in causes.items()})

    def _begin_again(self) -> None:
        self._losses.begin()
        self._losses.show(self._state.restarts)
        self._is_between = True
        self._answers.clear()
        self._actors.clear()  # Ray Train ends the others too
        self._write_actors()

    # -- what happens --------------------------------------------------------------------------------------------------

    def _on_attempt(self, _: None) -> None:
        if not self._is_between:  # the attempt before ended without a word
            self._on_lost({})
        self._is_between = False
        self._interrupted_at = None
        self._killed.clear()
        self._nodes.clear()
        self._heartbeats.begin()

    def take_output(self) -> None:
        """Take in what the workers have printed."""
        self._run_log.output.take([(_ROLE, rank, identity) for rank, identity in sorted(self._workers.items())])

    def _on_entered(self, entered: tuple[int, Identity, str]) -> None:
        rank, identity, self._nodes[entered[0]] = entered
        actor: dict[str, Any] = {"role": "worker", "rank": rank, "pid": identity.pid, "node": identity.node}
        self._workers[rank], self._actors[rank] = identity, actor
        self._heartbeats.enter(rank)
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
        if not isinstance(value, Failure):
            if not self._is_between:
                self._answers[rank] = value
                self._tell(events.Done(rank))
            return
        if self.failure is None:
            self.failure = value
            self._run_log.writer.event("worker_failed", role="worker", rank=rank, traceback=value.traceback)
        self._tell(events.Failed(rank))

    def _on_moved(self, answer: tuple[int, Any]) -> None:
        rank = answer[0]
        self._answers[rank] = answer[1]
        self._tell(events.Done(rank, interrupted=True))

    def _on_silent(self, rank: int) -> None:
        self._heartbeats.leave(rank)
        # One that has lost touch; others have answered. Between two attempts it is of the one that is over.
        if not self._is_between and rank in self._state.units[0].working:
            self._tell(events.StoppedEarly(rank, explained=False))

    def _on_lost(self, causes: dict[int, str]) -> None:
        if self.is_complete:
            return  # the worker died after its work was done
        if self._is_between:  # of the attempt that is over already, as all others had fallen silent
            self._record(causes)
            return
        lost = [events.Lost(rank, cause) for rank, cause in sorted(causes.items())]
        others = sorted(self._state.units[0].working - set(causes))
        self._tell(*lost, *(events.StoppedEarly(rank, explained=False) for rank in others))

    def _write_actors(self) -> None:
        self._run_log.writer.actors([actor for _, actor in sorted(self._actors.items())])

    def judge(self, error: BaseException | None) -> Any:
        """Return the `Outcome` of a run that has ended.

        Args:
            error: exception that Ray Train raised, or None.

        Raises:
            OrchestrayError: the run failed; the text says why.
            Interrupted: it ended with a checkpoint, for a move to nowhere.
        """
        if self.failure is not None:
            raise self.failure.error
        if self.is_complete:
            return self._answers[0]
        if self._interrupted_at is not None:
            raise Interrupted(
                f"Interrupted at step {self._interrupted_at}, with a checkpoint saved: a machine leaves the cluster, "
                "and no other place was found in time. Go on with --resume.",
                signal.SIGTERM,
            )
        raise TrainingError(f"Ray Train ended the run: {_reason(error)}") from error


def _reason(error: BaseException | None) -> str:
    """Return the first line of Ray Train's text that is not just a heading."""
    lines = [line.strip() for line in str(error or "the workers gave no answer.").splitlines() if line.strip()]
    return next((line for line in lines if not line.endswith(":")), lines[0])
