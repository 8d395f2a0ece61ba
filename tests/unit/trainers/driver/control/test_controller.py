"""The controller: what becomes of a run when processes die, fail, fall silent or lose touch, in any order."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from orchestray.trainers.driver.control.controller import LOST_TOUCH, SILENT, STOPPING, State, step
from orchestray.trainers.driver.control.decisions import (
    Abort,
    AbortAll,
    Decision,
    Dismiss,
    Employ,
    Fail,
    Finish,
    GiveUp,
    Grow,
    Interrupt,
    Move,
    Record,
    Refuse,
    Replace,
    ReplaceServers,
    Resize,
    Restart,
)
from orchestray.trainers.driver.control.events import (
    Done,
    Event,
    Failed,
    Grown,
    Left,
    Lost,
    MoveWanted,
    NotGrown,
    ScaleWanted,
    ServersLost,
    Stalled,
    Stopped,
    StoppedEarly,
    StopWanted,
    TimeUp,
)


def working(num_workers: int, unit_size: int, max_restarts: int = 3, *, in_step: bool = False) -> State:
    """Return the state of a run in which all workers work."""
    state = State.of(num_workers, unit_size, max_restarts=max_restarts, in_step=in_step)
    for unit in state.units:
        state = state.employed(unit)
    return state


def told(state: State, *events: Event) -> tuple[State, list[Decision]]:
    """Return the state after some events, and all decisions."""
    decisions: list[Decision] = []
    for event in events:
        state, more = step(state, event)
        decisions += more
    return state, decisions


def test_a_run_is_finished_once_all_its_workers_are_done() -> None:
    state, decisions = told(working(4, 2), *map(Done, range(3)))
    assert decisions == []
    assert told(state, Done(3))[1] == [Finish()]


def test_workers_in_step_with_a_lost_one_stop_and_all_begin_again_with_another_in_its_place() -> None:
    state, decisions = told(working(3, 3), Lost(1, "killed"), StoppedEarly(0, explained=False))
    assert decisions == [Abort(0)]
    state, decisions = told(state, StoppedEarly(2, explained=False))
    assert decisions == [Record({1: "killed"}), Replace(1), Employ(0)]
    assert (state.restarts, state.units[0].working) == (1, {0, 1, 2})


def test_other_units_go_on_meanwhile() -> None:
    state, decisions = told(working(2, 1), Lost(1, "killed"))
    assert decisions == [Record({1: "killed"}), Replace(1), Employ(1)]
    assert state.units[0].working == {0}


def test_one_that_stays_silent_once_the_others_have_stopped_is_lost_too() -> None:
    _, decisions = told(working(3, 3), Lost(0, "killed"), StoppedEarly(2, explained=False), TimeUp(0))
    assert decisions == [Abort(0), Record({0: "killed", 1: SILENT}), Replace(0), Replace(1), Employ(0)]


def test_workers_that_lose_touch_without_a_loss_count_as_one() -> None:
    early = [StoppedEarly(rank, explained=False) for rank in range(2)]
    state, decisions = told(working(2, 2, max_restarts=1), *early)
    assert (decisions[-1], state.restarts) == (Employ(0), 1)
    (_, last) = told(state, *early)[1]
    assert isinstance(last, GiveUp)
    assert LOST_TOUCH in last.reason


def test_workers_that_wait_for_each_other_with_no_end_begin_again_and_count_as_one_loss() -> None:
    state, decisions = told(working(2, 2), Stalled(0), Stalled(0), StoppedEarly(1, explained=False))
    assert (decisions, state.restarts) == ([Abort(0)], 0)
    state, decisions = told(state, StoppedEarly(0, explained=False))
    assert (decisions, state.restarts) == ([Employ(0)], 1)


def test_workers_in_step_stop_for_a_move_and_begin_again_without_a_count() -> None:
    state, decisions = told(working(2, 2, in_step=True), MoveWanted(), MoveWanted())
    assert decisions == [Interrupt(), Interrupt()]
    state, decisions = told(state, *(Done(rank, interrupted=True) for rank in (0, 1)))
    assert (decisions, state.restarts) == ([Move(), Employ(0)], 0)
    assert told(state, *(Done(rank) for rank in (0, 1)))[1] == [Finish()]


def test_a_loss_on_the_way_to_a_move_leaves_it_wanted() -> None:
    state, _ = told(working(2, 2, in_step=True), MoveWanted(), Lost(1, "killed"))
    assert told(state, StoppedEarly(0, explained=False))[1][-2:] == [Employ(0), Interrupt()]


def test_under_servers_all_stop_for_a_move_and_begin_again_from_the_checkpoint_if_there_is_more_to_do() -> None:
    state, decisions = told(working(2, 1), MoveWanted(), Done(0), Done(1))
    assert decisions == [Interrupt()]
    moved, decisions = told(state, Stopped(interrupted=True))
    assert (decisions, moved.restarts, moved.is_idle) == ([Move(), Restart()], 0, False)
    assert told(moved, Done(0), Done(1))[1] == [Finish()]
    assert told(state, Stopped(interrupted=False))[1] == [Finish()]


def test_a_run_that_is_to_end_moves_no_more() -> None:
    state, _ = told(working(2, 1), MoveWanted(), StopWanted())
    assert told(state, Done(0), Done(1))[1] == [Finish()]


def test_a_server_lost_on_the_way_to_a_move_leaves_it_wanted() -> None:
    lost = ServersLost({0: "killed"}, "parameter_server", replaced=False)
    state, _ = told(working(1, 1), MoveWanted(), lost)
    assert told(state, StoppedEarly(0, explained=True))[1][-2:] == [Restart(), Interrupt()]


def test_one_that_lost_a_server_begins_again_without_a_count() -> None:
    state, decisions = told(working(2, 1), StoppedEarly(1, explained=True))
    assert (decisions, state.restarts) == ([Employ(1)], 0)


def test_one_loss_more_than_allowed_is_recorded_and_ends_the_run() -> None:
    state = working(2, 1, max_restarts=1)
    state, _ = told(state, Lost(0, "killed"))
    record, end = told(state, Lost(1, "killed by Ray"))[1]
    assert record == Record({1: "killed by Ray"})
    assert isinstance(end, GiveUp)
    assert end.reason.startswith("Worker 1 died (killed by Ray) after 1 recovery, and max_restarts is 1. Go on with")


def test_the_first_of_several_failures_is_what_a_run_ends_with_also_if_another_worker_died_of_it() -> None:
    _, decisions = told(working(3, 3), Failed(2), Failed(1), Lost(0, "killed"))
    assert decisions == [Abort(0), Fail(1)]


def test_copies_that_serve_in_place_of_lost_servers_leave_the_workers_alone() -> None:
    state, decisions = told(working(2, 1), ServersLost({0: "killed"}, "parameter_server", replaced=True))
    assert (decisions, state.restarts, state.is_idle) == ([ReplaceServers("parameter_server", (0,))], 1, False)


def test_without_a_copy_all_units_stop_and_begin_again_from_the_checkpoint() -> None:
    state, decisions = told(
        working(2, 1), ServersLost({0: "killed"}, "parameter_server", replaced=False), StoppedEarly(0, explained=True)
    )
    assert decisions == [AbortAll()]
    state, decisions = told(state, Lost(1, "killed, too"))
    assert decisions == [Record({1: "killed, too"}), Replace(1), ReplaceServers("parameter_server", (0,)), Restart()]
    assert [unit.working for unit in state.units.values()] == [{0}, {1}]


def test_workers_in_step_stop_for_those_that_are_added_once_these_are_there() -> None:
    state, decisions = told(working(2, 2, in_step=True), ScaleWanted(3))
    assert decisions == [Grow(3)]
    state, decisions = told(state, Grown(), *(Done(rank, interrupted=True) for rank in range(2)))
    assert decisions == [Interrupt(), Resize(3), Employ(0)]
    assert state.units[0].working == {0, 1, 2}


def test_workers_in_step_that_are_too_many_leave_once_all_have_stopped() -> None:
    state, decisions = told(working(3, 3, in_step=True), ScaleWanted(1), *(Done(rank, True) for rank in range(3)))
    assert decisions == [Interrupt(), Resize(1), Employ(0)]
    assert state.units[0].working == {0}


def test_workers_in_step_that_end_before_they_are_more_are_done() -> None:
    assert told(working(2, 2, in_step=True), ScaleWanted(3), Done(0), Done(1))[1] == [Grow(3), Finish()]


def test_workers_that_begin_again_after_a_loss_stop_for_the_change_that_waits() -> None:
    early = StoppedEarly(0, explained=False)
    _, decisions = told(working(2, 2, in_step=True), Lost(1, "killed"), ScaleWanted(1), early)
    assert decisions == [Abort(0), Record({1: "killed"}), Replace(1), Employ(0), Interrupt()]


def test_units_that_are_added_begin_while_the_others_go_on() -> None:
    state, decisions = told(working(2, 1), ScaleWanted(4), Grown())
    assert decisions == [Grow(4), Resize(4), Employ(2), Employ(3)]
    assert [unit.working for unit in state.units.values()] == [{0}, {1}, {2}, {3}]


def test_units_that_leave_are_gone_once_each_of_their_workers_is() -> None:
    state, decisions = told(working(6, 2), ScaleWanted(2), Left(2), Left(5), Left(4))
    assert (decisions, state.num_workers) == ([Dismiss(2)], 2)
    assert told(state, Left(3))[1] == [Resize(2)]


def test_the_end_of_the_run_and_of_its_servers_wait_for_nobody_who_leaves() -> None:
    state, _ = told(working(2, 1), ScaleWanted(1))
    assert told(state, Done(0))[1] == [Resize(1), Finish()]
    lost = ServersLost({0: "killed"}, "parameter_server", replaced=False)
    decisions = told(state, lost, StoppedEarly(0, explained=True))[1]
    assert decisions == [AbortAll(), Resize(1), ReplaceServers("parameter_server", (0,)), Restart()]


def test_units_are_added_once_the_servers_are_there_again() -> None:
    lost = ServersLost({0: "killed"}, "parameter_server", replaced=False)
    _, decisions = told(working(1, 1), ScaleWanted(2), lost, Grown(), StoppedEarly(0, explained=True))
    servers = ReplaceServers("parameter_server", (0,))
    assert decisions == [Grow(2), AbortAll(), servers, Resize(2), Restart()]


def test_a_run_that_is_to_stop_refuses_changes() -> None:
    state, decisions = told(working(2, 2, in_step=True), ScaleWanted(3), StopWanted(), Grown(), StopWanted())
    assert decisions == [Grow(3), Refuse(STOPPING), Interrupt()]
    assert told(state, ScaleWanted(1))[1] == [Refuse(STOPPING)]
    assert told(state, *(Done(rank, True) for rank in range(2)))[1] == [Finish()]


def test_workers_that_cannot_be_added_leave_the_run_as_it_was() -> None:
    state, decisions = told(working(2, 1), ScaleWanted(3), NotGrown("no room"))
    assert (decisions, state) == ([Grow(3), Refuse("no room")], working(2, 1))


def test_a_run_that_is_to_stop_when_it_begins_again_is_told_so_again() -> None:
    state, _ = told(working(2, 2, in_step=True), StopWanted(), Lost(0, "killed"))
    assert told(state, StoppedEarly(1, explained=False))[1][-2:] == [Employ(0), Interrupt()]
    lost = ServersLost({0: "killed"}, "parameter_server", replaced=False)
    assert told(working(1, 1), lost, StopWanted(), StoppedEarly(0, explained=True))[1][-2:] == [Restart(), Interrupt()]


# -- any order ---------------------------------------------------------------------------------------------------------


@dataclass
class World:
    """Workers and servers that die, fail and lose touch at random, are made more and fewer, and do what is decided.

    With `notices`, the collectives of a worker fail at once when another one of its unit is gone, as gloo's do.
    Without, a worker waits until it is aborted, as with NCCL. A frozen worker never answers.
    """

    random: random.Random
    num_units: int
    unit_size: int
    notices: bool
    has_servers: bool
    state: State = field(init=False)
    busy: set[int] = field(default_factory=set)
    dead: set[int] = field(default_factory=set)
    frozen: set[int] = field(default_factory=set)
    touched: dict[int, bool] = field(default_factory=dict)
    """Units of which a worker has stopped or died; True if they were aborted."""
    servers_dead: set[int] = field(default_factory=set)
    leaving: set[int] = field(default_factory=set)
    asked: bool = False
    """True while a change of the number of workers is neither made nor refused."""
    grows: bool = False
    stop_wanted: bool = False
    move_wanted: bool = False
    interrupted: bool = False
    agreed: bool | None = None
    """True if those in step have agreed to stop early; None until the first one is done."""
    ended: Decision | None = None

    def __post_init__(self) -> None:
        number, most = self.num_units * self.unit_size, self.random.randrange(4)
        self.state = working(number, self.unit_size, max_restarts=most, in_step=self.in_step)
        self.busy = set(range(number))

    @property
    def in_step(self) -> bool:
        return self.num_units == 1 and not self.has_servers

    def live(self, most_events: int) -> None:
        """Let events happen until the run ends."""
        for _ in range(most_events):
            if self.ended is not None:
                return
            self.tell(self.draw())
        pytest.fail(f"nothing ends this run: {self}")

    def draw(self) -> Event:
        """Return something that can happen now."""
        return self.wish() or self.fate()

    def wish(self) -> Event | None:
        """Return what a user wants now, or what comes of it; None: nothing."""
        chance = self.random.random()
        if self.leaving and chance < 0.3:
            rank = self.random.choice(sorted(self.leaving))
            self.leaving.discard(rank)
            return Left(rank)
        if self.grows and chance < 0.2:
            self.grows = False
            return Grown() if self.random.random() < 0.8 else NotGrown("no room")
        if chance < 0.03:
            self.stop_wanted = True
            return StopWanted()
        if chance < 0.05:
            self.move_wanted = True
            return MoveWanted()
        number = self.random.choice([1, 2, 3]) * (1 if self.in_step else self.unit_size)
        if chance < 0.1 and not self.asked and number != self.state.num_workers:
            self.asked = True
            return ScaleWanted(number)
        return None

    def fate(self) -> Event:
        """Return what befalls workers and servers."""
        chance = self.random.random()
        if self.has_servers and chance < 0.03 and not self.state.servers_lost:
            rank = self.random.randrange(2)
            replaced = self.random.random() < 0.5
            if not replaced:
                self.servers_dead.add(rank)
            return ServersLost({rank: "killed"}, "parameter_server", replaced)
        able = [rank for rank in sorted(self.busy - self.frozen) if not self.waits(rank)]
        late = sorted({self.unit_of(rank) for rank in self.busy & self.frozen if self.touched.get(self.unit_of(rank))})
        if late and (not able or chance > 0.9):
            return TimeUp(late[0])
        if not self.busy and not self.in_step and self.move_wanted:
            return Stopped(interrupted=chance < 0.7)
        if not able:  # all of a unit are frozen: a watchdog kills one
            whole = [rank for rank in sorted(self.busy & self.frozen) if self.unit_of(rank) not in self.touched]
            assert whole, f"all wait for ever: {self}"
            return self.dies(whole[0])
        rank = self.random.choice(able)
        if self.unit_of(rank) in self.touched:
            self.busy.discard(rank)
            return StoppedEarly(rank, explained=bool(self.state.servers_lost))
        if chance < 0.15:
            return self.dies(rank)
        if chance < 0.18:
            self.frozen.add(rank)
            return self.fate()
        if chance < 0.19:
            return Stalled(self.unit_of(rank))
        self.busy.discard(rank)
        if chance < 0.2:
            self.touched.setdefault(self.unit_of(rank), False)
            return Failed(rank)
        if self.agreed is None:
            self.agreed = self.interrupted
        return Done(rank, interrupted=self.agreed and self.in_step)

    def unit_of(self, rank: int) -> int:
        return rank // self.unit_size

    def waits(self, rank: int) -> bool:
        """Return True if a worker waits for one that is gone, and nothing has stopped it."""
        return self.touched.get(self.unit_of(rank)) is False and not self.notices

    def dies(self, rank: int) -> Event:
        self.busy.discard(rank)
        self.frozen.discard(rank)
        self.dead.add(rank)
        self.touched.setdefault(self.unit_of(rank), False)
        return Lost(rank, "killed")

    def tell(self, event: Event) -> None:
        """Tell the controller, and do what it decides."""
        if isinstance(event, TimeUp):
            late = {rank for rank in self.busy if self.unit_of(rank) == event.unit}
            self.busy -= late
            self.dead |= late
            self.frozen -= late
        before = self.state.restarts
        self.state, decisions = step(self.state, event)
        kinds = {type(decision) for decision in decisions}
        assert self.state.restarts - before in (0, 1)
        assert Record not in kinds or GiveUp in kinds or self.state.restarts > before, "every loss counts"
        assert self.state.restarts <= self.state.max_restarts
        assert GiveUp not in kinds or before == self.state.max_restarts
        for decision in decisions:
            self.act(decision)

    def act(self, decision: Decision) -> None:
        assert self.ended is None, "nothing is decided after the end"
        match decision:
            case Abort(unit):
                assert any(self.unit_of(rank) == unit for rank in self.busy), "nobody is there to be aborted"
                self.touched[unit] = True
            case AbortAll():
                self.touched.update(dict.fromkeys((self.unit_of(rank) for rank in self.busy), True))
            case Replace(rank):
                assert rank in self.dead, "only the dead are replaced"
                self.dead.discard(rank)
            case ReplaceServers(_, ranks):
                self.servers_dead -= set(ranks)
            case Interrupt():
                assert self.stop_wanted or self.asked or self.move_wanted
                self.interrupted = True
            case Grow() | Refuse() | Dismiss() | Resize() | Move():
                self.scale(decision)
            case Employ(unit):
                self.employ(unit)
            case Restart():
                for unit in self.state.units:
                    self.employ(unit)
            case Finish() | Fail() | GiveUp():
                self.ended = decision
                if isinstance(decision, Finish):
                    self.check_end()

    def scale(self, decision: Grow | Refuse | Dismiss | Resize | Move) -> None:
        assert self.asked or isinstance(decision, Move)
        match decision:
            case Move():
                assert self.move_wanted
                assert not self.busy, "nobody works while workers move"
                self.move_wanted = False
            case Grow(number):
                assert number > len(self.busy | self.dead)
                self.grows = True
            case Refuse():
                self.asked = self.grows = False
            case Dismiss(number):
                self.leaving = {rank for rank in self.busy if rank >= number}
                self.forget_from(number)
            case Resize(number):
                assert not (self.in_step and self.busy), "workers in step stop before they are more or fewer"
                assert not self.in_step or self.agreed
                self.asked = False
                self.leaving.clear()
                if self.in_step:
                    self.unit_size = number

    def check_end(self) -> None:
        assert not self.busy
        assert not self.dead
        assert not self.servers_dead, "a run that is finished has all its servers"
        assert not self.leaving, "nobody is left behind"
        assert self.stop_wanted or not (self.in_step and self.agreed), "it ends early only if that is wanted"

    def forget_from(self, number: int) -> None:
        """Forget the workers from this rank on, whatever has become of them."""
        self.busy = {rank for rank in self.busy if rank < number}
        self.dead = {rank for rank in self.dead if rank < number}
        self.frozen = {rank for rank in self.frozen if rank < number}
        self.touched = {unit: stops for unit, stops in self.touched.items() if unit * self.unit_size < number}

    def employ(self, unit: int) -> None:
        self.interrupted, self.agreed = False, None
        ranks = set(range(unit * self.unit_size, (unit + 1) * self.unit_size))
        assert not ranks & self.busy, "nobody gets two things to do"
        assert not ranks & self.dead, "the dead get nothing to do"
        assert not self.servers_dead, "workers need their servers"
        assert self.state.units[unit].working == ranks
        self.busy |= ranks
        self.touched.pop(unit, None)


def run_schedules(seeds: range) -> None:
    """Let runs with faults drawn from these seeds come to their ends."""
    for seed in seeds:
        draws = random.Random(seed)
        num_units, unit_size = draws.choice([1, 1, 2, 3]), draws.choice([1, 2, 4])
        notices, has_servers = draws.random() < 0.5, draws.random() < 0.5
        World(draws, num_units, unit_size, notices, has_servers).live(500)


def test_any_faults_in_any_order_end_in_a_finished_run_a_failure_or_too_many_losses() -> None:
    run_schedules(range(1000))


@pytest.mark.slow
def test_a_hundred_thousand_schedules_of_faults_break_nothing() -> None:
    run_schedules(range(1000, 100_000))
