"""The driver of a run under parameter servers: the events in the gangs of servers and workers, and the reactions to
them.

It imports no torch. Unlike under a lock-step scheme, a lost worker is replaced while the others go on.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import ray

from orchestray.platform.actors.gang import Gang, MemberLostError
from orchestray.platform.actors.placement import Shape
from orchestray.platform.actors.pool import acquire_all, release
from orchestray.platform.errors import TrainingError
from orchestray.trainers.driver.control import controller, decisions, events
from orchestray.trainers.driver.control.evacuation import Evacuation
from orchestray.trainers.driver.control.scaling import Scaling
from orchestray.trainers.driver.runlog.actors_file import ActorsFile
from orchestray.trainers.driver.runlog.hang_report import HangReport
from orchestray.trainers.driver.runlog.kill_schedule import KillSchedule
from orchestray.trainers.driver.runlog.losses import Losses
from orchestray.trainers.driver.servers.answers import Answers
from orchestray.trainers.driver.servers.beginning import Beginnings
from orchestray.trainers.driver.servers.lead_lines import Lines
from orchestray.trainers.driver.servers.leaf_group import LEAF_HOST, Leaves
from orchestray.trainers.driver.servers.resizing import Resizing
from orchestray.trainers.driver.servers.server_group import ServerGroup
from orchestray.trainers.driver.servers.server_kills import ServerKills
from orchestray.trainers.driver.servers.usage import add_usage, usage_of, usage_of_the_living
from orchestray.trainers.driver.servers.worker_group import STAGE_HOST, WORKER_HOST, WorkerGroup

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from orchestray.trainers.driver.control.attempt import Attempt

_SERVER_HOST = "orchestray.trainers.ps.hosts.server_host:ServerHost"
_LISTEN_S = 0.5


class CentralDriver:
    """A driver of one training run with servers and workers."""

    def __init__(self, attempt: Attempt, shapes: Sequence[Shape]) -> None:
        """
        Args:
            attempt: attempt at the run.
            shapes: shapes of the gangs of servers, of workers and, if there are leaf servers, of leaf servers.
        """
        self._attempt, self._settings, self._shapes = attempt, attempt.settings, shapes
        self._run_log = run_log = attempt.run_log
        self._writer, self._progress, self.run_progress = run_log.writer, run_log.progress, run_log.run_progress
        self._lead_is_new = False
        """True if a copy took over from the lead, and has not been asked yet how the run ended."""
        self._kills_of_workers = KillSchedule(attempt.settings.faults, shapes[1].role, is_alone=True)
        self._losses = Losses(run_log, self._kills_of_workers, shapes[1].role)
        self._events: deque[events.Event] = deque()

    def run(self) -> Any:
        """Train to the end; return the `Outcome`.

        Raises:
            OrchestrayError: the run failed; its text says what the user can do.
        """
        self._gangs = acquire_all(self._attempt.cluster, self._shapes, self._progress.event)
        end: Callable[[Gang], None] = Gang.close
        try:
            outcome = self._run()
            end = release
        finally:
            for gang in self._gangs:
                end(gang)
            self._writer.actors([])
        return outcome

    def _run(self) -> Any:
        self._servers, self._workers = self._gangs[:2]
        self._actors_file = ActorsFile(self._run_log, [self._workers, self._servers, *self._gangs[2:]])
        self._hang_report = HangReport(self._run_log, [self._workers, self._servers], self._attempt.patience.report_s)
        self._leaves = Leaves(self._gangs[2], self._lose, self._replaced) if len(self._gangs) > 2 else None
        size = self._settings.layout.model_size
        worker_host = WORKER_HOST if size == 1 else STAGE_HOST
        self._primaries = ServerGroup(self._servers, int(self._settings.exchange["shards"]))
        self._worker_group = WorkerGroup(
            self._workers, size, self._primaries, self._leaves, attempt=self._kills_of_workers.num_over
        )
        self._kills = ServerKills(self._settings.faults, [self._servers, *self._gangs[2:]], self._run_log)
        self._lines = Lines(self._primaries, self._run_log)
        self._run_log.fetch_copies = self._lines.copies
        self._scaling = Scaling(self._run_log, self._workers, worker_host, self._settings)
        self._state = controller.State.of(
            len(self._workers.slots), size, max_restarts=self._attempt.max_restarts, restarts=self.run_progress.restarts
        )
        hands_over = self._settings.has_residual and self._leaves is None
        self._resizing = Resizing(
            self._workers,
            self._scaling,
            self.run_progress,
            cut=lambda replicas: self._primaries.ask_lead("resize", replicas),
            expel=lambda replica: self._primaries.ask_lead("expel", replica),
            dismiss=(lambda replica: self._primaries.ask_lead("dismiss", replica)) if hands_over else None,
            size=size,
        )
        self._answers = Answers(self._worker_group, self._losses, self._run_log)
        self._beginnings = Beginnings(
            self._settings,
            self._run_log,
            self._attempt.checkpoint,
            actors_file=self._actors_file,
            workers=self._worker_group,
            leaves=self._leaves,
            resizing=self._resizing,
        )
        self._hosts = list(zip(self._gangs, (_SERVER_HOST, worker_host, LEAF_HOST), strict=False))
        is_together = self._settings.exchange["transport"] == "shared_memory"
        self._evacuation = Evacuation(self._hosts, self._run_log, self._losses, stay_together=is_together)
        for gang in self._gangs:
            gang.while_waiting = self._look
            gang.patience, gang.keep_stacks = self._attempt.patience, self._losses.keep_stacks
        try:
            return self._train_until_done()
        finally:
            self._scaling.close()

    def _train_until_done(self) -> Any:
        building = [(gang, gang.begin_host(host, self._settings)) for gang, host in self._hosts]
        for gang, references in building:
            self._gather(gang, references)
        if self._worker_group.size > 1:
            self._worker_group.plan = self._plan()
        self._restart()
        outcome = None
        while outcome is None:
            self._handle()
            if self._worker_group.working:
                self._work()
            else:
                outcome = self._finish()
        return outcome

    def _gather(self, gang: Gang, references: list[Any]) -> list[Any]:
        """Wait for answers like `Gang.gather`; replace a member that dies while it is built."""
        while True:
            try:
                return gang.gather(references)
            except MemberLostError as loss:
                for rank, cause in sorted(loss.lost.items()):
                    self._lose(gang, rank, cause)
                    gang.replace(rank)
                references = [gang.control_one(rank, "usage") for rank in range(len(gang.slots))]

    def _plan(self) -> Any:
        """Return a worker's plan of the network's cut, which holds for the whole run, as servers hold the parts."""
        while True:
            try:
                return self._workers.gather_one(self._workers.call_one(0, "plan"), 0)
            except MemberLostError as loss:
                self._lose(self._workers, 0, loss.lost[0])
                self._put_another(0)

    # -- what the controller decides -----------------------------------------------------------------------------------

    def _handle(self) -> None:
        """Tell the controller what has happened, and do what it decides."""
        while self._events:
            event = self._events.popleft()
            self._state, decided = controller.step(self._state, event)
            self._losses.show(self._state.restarts)
            for decision in decided:
                self._act(decision)

    def _act(self, decision: decisions.Decision) -> None:
        match decision:
            case decisions.Abort() | decisions.AbortAll():
                self._abort(decision)
            case decisions.Record(causes):
                self._losses.record(self._workers.shape.role, causes)
            case decisions.Replace(rank):
                self._put_another(rank)
            case decisions.ReplaceServers(role, ranks):
                gang = next(gang for gang in self._gangs if gang.shape.role == role)
                for rank in ranks:
                    gang.replace(rank)
                    self._replaced(gang, rank)
                if gang is self._servers:
                    self._primaries.build_copies(list(ranks))
            case decisions.Employ(unit):
                self._employ(unit)
            case decisions.Restart():
                self._restart()
            case decisions.Interrupt():
                self._primaries.ask_lead("request_stop")
            case decisions.Grow() | decisions.Refuse() | decisions.Dismiss() | decisions.Resize() | decisions.Move():
                self._change(decision)
            case decisions.Fail() | decisions.GiveUp():
                raise self._error_of(decision)

    def _error_of(self, decision: decisions.Fail | decisions.GiveUp) -> Exception:
        if isinstance(decision, decisions.Fail):
            return self._answers.failures[decision.rank].error
        return TrainingError(decision.reason)

    def _change(self, decision: decisions.Scale | decisions.Move) -> None:
        """Change the number or the places of the processes."""
        match decision:
            case decisions.Move():
                self._evacuation.move()
                self._primaries.ends.clear()  # those that have moved end on purpose
                self._actors_file.write()
            case decisions.Grow():
                self._events += self._scaling.grow()
            case decisions.Refuse(reason):
                self._scaling.refuse(reason)
            case decisions.Dismiss(num_workers):
                self._resizing.dismiss(num_workers)
            case decisions.Resize(num_workers):
                self._resizing.resize(num_workers)
                self._worker_group.forget_from(num_workers)

    def _abort(self, decision: decisions.Abort | decisions.AbortAll) -> None:
        """Have workers stop what they wait for; they have some time to answer."""
        group = self._worker_group
        if isinstance(decision, decisions.Abort):
            group.call_off(decision.unit)
        elif group.working:
            group.abort(self._state.units)
            for gang in (*self._gangs[2:], self._servers):
                gang.control("abort")

    def _employ(self, replica: int) -> None:
        """Set a replica to work."""
        self._state = self._state.employed(replica)
        try:
            self._worker_group.employ(replica)
        except MemberLostError as loss:  # what only the leaf server had is lost with it
            self._note_servers(self._gangs[2], loss.lost)
            self._events += self._stopped_early(replica)

    def _stopped_early(self, replica: int) -> list[events.Event]:
        """Return that the workers of a replica could not begin."""
        return [events.StoppedEarly(rank, explained=True) for rank in sorted(self._state.units[replica].working)]

    def _restart(self) -> None:
        """Have the servers serve from the newest checkpoint there is, and all workers work."""
        self._worker_group.forget()
        while True:
            try:
                self._beginnings.begin()
                break
            except MemberLostError as loss:
                self._note_servers(self._servers, loss.lost)
                for replica in self._state.units:
                    self._events += self._stopped_early(replica)
                return
            except (ConnectionError, TimeoutError):  # of a leaf's channels: the next attempt finds which server died
                continue
        self._primaries.watch()
        for replica in self._state.units:
            if self._events:  # a leaf server is lost: nobody else begins
                self._events += self._stopped_early(replica)
            else:
                self._employ(replica)

    # -- what happens --------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        """Wait for answers, losses and lines, for a while."""
        group, primaries = self._worker_group, self._primaries
        # Not while servers are missing: a dead lead fails at once, again and again.
        asked = [] if self._state.servers_lost else [self._lines.ask(hasty=bool(self._kills))]
        watched = [*group.working, *primaries.ends.values(), *primaries.building, *asked]
        ready, _ = ray.wait(watched, num_returns=1, timeout=_LISTEN_S)
        self._writer.raise_if_failed()
        for reference in ready:
            if reference in asked:
                self._take()
            elif reference in primaries.building:
                primaries.go_on_building(reference)
            elif reference in group.working:
                self._hear(group.working.pop(reference), reference)
        for reference, cause in self._workers.unheard(group.working).items():
            self._losses.begin()
            self._events.append(events.Lost(group.working.pop(reference), cause))
        if lost := primaries.lost():
            self._on_servers_lost(lost)
        self._handle()
        self._events += map(events.TimeUp, group.overdue())
        for gang in self._gangs:
            gang.check_places()
        self._look()
        if self.run_progress.lost_at_s is None:
            self._workers.refill_spares()
        self._look_at_requests()

    def _look(self) -> None:
        """Look at the processes: which there are, what they print, and if they make steps."""
        self._actors_file.write()
        self._hang_report.look()

    def _hear(self, rank: int, reference: Any) -> None:
        """Handle the answer or the loss of a worker."""
        if rank in self._state.leaving:
            self._resizing.depart(rank)
            self._events.append(events.Left(rank))
            return
        self._events.append(self._answers.read(rank, reference, self._state))

    def _look_at_requests(self) -> None:
        """Take note of what users want, and of workers that should have left by now."""
        if self._attempt.stop.is_set():
            self._events.append(events.StopWanted())
        self._events += [*self._scaling.news(), *self._evacuation.news(self._settings)]
        if self._state.leaving and self._resizing.is_late:
            self._events += map(events.Left, sorted(self._state.leaving))

    def _on_servers_lost(self, lost: dict[int, str]) -> None:
        """Have copies take over; if a shard has none, all continue from the last checkpoint."""
        self._losses.begin()
        self._losses.record(self._servers.shape.role, lost)
        for rank in lost:
            self._primaries.ends.pop(rank, None)
        taken_over = [self._take_over(rank, lost) for rank in sorted(lost) if self._primaries.serves(rank)]
        if any(taken_over) and all(taken_over):  # lines of the lost lead that were not fetched; its copy has them too
            self._take()  # what the lost lead has answered comes before
            self._run_log.record(self._lines.copies(self.run_progress.last_step))
        role = self._servers.shape.role
        # Before the answers of workers that have noticed: they must not be set to work for a dead server.
        self._events.appendleft(events.ServersLost(lost, role, replaced=all(taken_over)))
        self._handle()
        if all(taken_over):
            self._primaries.watch()

    def _take_over(self, rank: int, lost: dict[int, str]) -> bool:
        """Have a copy serve instead of a lost server; return True if there is a copy."""
        copy = self._primaries.take_over(rank, lost, self._worker_group.reroute)
        if copy is None:
            return False
        self._lead_is_new |= copy == self._primaries.lead
        self._resizing.tell_lead()
        self._writer.event(
            "server_taken_over", role="parameter_server", rank=copy, shard=rank % self._primaries.num_shards
        )
        return True

    def _put_another(self, rank: int) -> None:
        """Replace the process of a worker."""
        self._replaced(self._workers, rank, spare=self._workers.replace(rank))

    def _replaced(self, gang: Gang, rank: int, *, spare: bool = False) -> None:
        """Record that another process has replaced a lost one."""
        self._losses.replaced(gang.shape.role, rank, spare=spare)
        self._actors_file.write()

    def _note(self, gang: Gang, rank: int, cause: str) -> None:
        """Record a loss."""
        self._losses.record(gang.shape.role, {rank: cause})

    def _note_servers(self, gang: Gang, lost: dict[int, str]) -> None:
        """Record the loss of servers, or of leaf servers, in whose place nobody serves; the controller learns of it."""
        self._losses.record(gang.shape.role, lost)
        self._events.append(events.ServersLost(lost, gang.shape.role, replaced=False))

    def _lose(self, gang: Gang, rank: int, cause: str) -> None:
        """Record and count a loss outside the workers' work, and raise if the run may not go on after it."""
        self._note(gang, rank, cause)
        self._state, given_up = controller.counted(self._state, {rank: cause}, gang.shape.role)
        self._losses.show(self._state.restarts)
        if given_up is not None:
            raise TrainingError(given_up.reason)

    # -- the end -----------------------------------------------------------------------------------------------------

    def _finish(self) -> Any:
        """Return the outcome of the run; None if something is left to do."""
        more = True
        while more:
            self._lines.ask(timeout_s=0.0)
            more = self._take()
        lead = self._primaries.lead
        try:
            outcome = self._servers.gather_one(self._servers.call_one(lead, "outcome"), lead)
            of_servers = usage_of(self._servers)
        except MemberLostError as loss:
            self._on_servers_lost(loss.lost)
            return None
        if outcome.ended == "interrupted" and self._lead_is_new and not self._attempt.stop.is_set():
            self._lead_is_new = False  # it does not know that the work is done: the workers ask it what is left
            for replica in self._state.units:
                self._employ(replica)
            return None
        if self._state.moves:
            self._events.append(events.Stopped(interrupted=outcome.ended == "interrupted"))
            self._handle()
            if self._worker_group.working or self._events:  # they go on elsewhere
                return None
        try:
            of_workers = usage_of(self._workers)
            if outcome.ended != "interrupted":
                self._worker_group.save_model(outcome.step)
        except MemberLostError as loss:  # its replacement learns from the servers that all is done
            self._events += [events.Lost(rank, cause) for rank, cause in sorted(loss.lost.items())]
            return None
        present = [{**one, **self._worker_group.place_of(one["rank"])} for one in of_workers]
        workers = [*present, *self._resizing.departed]
        of_leaves = [one for gang in self._gangs[2:] for one in usage_of_the_living(gang, self._note)]
        add_usage(outcome, workers, [*of_servers, *of_leaves], bytes_reported=self._beginnings.bytes_reported)
        return outcome

    # -- reports of the lead -----------------------------------------------------------------------------------------

    def _take(self) -> bool:
        """Record the lead's answer (`Lines.take`), and do a kill that is due; return True if there was anything."""
        found = self._lines.take()
        self._kills.do_next()
        return found
