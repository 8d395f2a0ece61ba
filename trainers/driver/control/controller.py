"""The decisions of a run's driver, as a pure function of what happened: `step(state, event) -> state, decisions`.

Workers that train in step with each other are a unit: what ends one of them ends the work of all, and they begin
again together. Under a lock-step scheme all workers are one unit. Under parameter servers each replica is one, and
the others go on meanwhile. The driver turns what Ray reports and users want into events, and carries the decisions
out in order.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

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
    OfUnit,
    ScaleWanted,
    ServersLost,
    Stalled,
    Stopped,
    StoppedEarly,
    StopWanted,
    TimeUp,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

SILENT = "it did not answer after another worker was lost"
"""Cause of a loss of a worker that stays silent."""
LOST_TOUCH = "the workers lost touch with each other"
STOPPING = "The run is being stopped."
"""Reason for which a change of the number of workers is refused."""

# -- state -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Unit:
    """The workers of a unit: which still work, and what became of the others."""

    working: frozenset[int] = frozenset()
    lost: Mapping[int, str] = field(default_factory=dict)
    failed: frozenset[int] = frozenset()
    stops: bool = False
    """True if it stops early, to begin again."""
    explained: bool = False
    """True if a loss that is counted is the reason."""
    interrupted: bool = False
    """True if it is done because it was to stop."""


@dataclass(frozen=True)
class Change:
    """A change of the number of workers; `is_ready` is True if nothing has to be started for it any more."""

    num_workers: int
    is_ready: bool


@dataclass(frozen=True)
class State:
    """The state of a run's processes, as the controller knows it."""

    units: Mapping[int, Unit]
    """Units by index; a worker's unit is rank // `unit_size`."""
    unit_size: int
    max_restarts: int
    restarts: int = 0
    in_step: bool = False
    """True if all workers are one unit, which has to stop before its size changes."""
    servers_lost: frozenset[tuple[str, int]] = frozenset()
    """Roles and ranks of lost servers that are replaced once all units have stopped."""
    stops: bool = False
    """True if the run is to end with a checkpoint."""
    moves: bool = False
    """True if the run is to stop with a checkpoint, and to go on with other processes elsewhere."""
    change: Change | None = None
    leaving: frozenset[int] = frozenset()
    """Ranks of the dismissed workers that have not left yet; their units are gone."""

    @classmethod
    def of(
        cls, num_workers: int, unit_size: int, *, max_restarts: int, restarts: int = 0, in_step: bool = False
    ) -> State:
        """Return the state before anybody works.

        Args:
            num_workers: number of workers.
            unit_size: number of workers of a unit, whose ranks follow each other.
            max_restarts: number of recoveries that the run may have.
            restarts: number of recoveries that it has had.
            in_step: True if the unit of all workers has to stop before its size changes.
        """
        units = {unit: Unit() for unit in range(num_workers // unit_size)}
        return cls(units, unit_size, max_restarts, restarts, in_step)

    @property
    def num_workers(self) -> int:
        """Number of workers, without those that are leaving."""
        return len(self.units) * self.unit_size

    def employed(self, unit: int) -> State:
        """Return the state once all workers of a unit have been set to work."""
        ranks = range(unit * self.unit_size, (unit + 1) * self.unit_size)
        return self._with(unit, Unit(working=frozenset(ranks)))

    @property
    def is_idle(self) -> bool:
        """True if nobody works."""
        return not any(unit.working for unit in self.units.values())

    def _with(self, index: int, unit: Unit) -> State:
        return replace(self, units={**self.units, index: unit})


def step(state: State, event: Event) -> tuple[State, list[Decision]]:
    """Return the state after an event, and the decisions, to be carried out in order."""
    match event:
        case ServersLost():
            return _on_servers_lost(state, event)
        case StopWanted():
            return _on_stop_wanted(state)
        case ScaleWanted(num_workers):
            return _on_scale_wanted(state, num_workers)
        case MoveWanted():
            state = replace(state, moves=not state.stops)
            return state, _interruption(state) if state.moves else []
        case Stopped(interrupted):
            return _on_stopped(state, interrupted=interrupted)
        case Grown() if state.change is not None:
            return _changed(replace(state, change=replace(state.change, is_ready=True)))
        case NotGrown(reason) if state.change is not None:
            return replace(state, change=None), [Refuse(reason)]
        case Grown() | NotGrown():
            return state, []
        case Left(rank):
            return _on_left(state, rank)
        case _:
            return _on_unit(state, event)


def _on_unit(state: State, event: OfUnit) -> tuple[State, list[Decision]]:
    index = event.unit if isinstance(event, TimeUp | Stalled) else event.rank // state.unit_size
    unit = state.units.get(index)
    if unit is None:
        return state, []
    decisions: list[Decision] = []
    if isinstance(event, Stalled):
        if unit.stops or not unit.working:
            return state, []
        unit = replace(unit, stops=True)
        decisions.append(Abort(index))
    elif isinstance(event, TimeUp):
        if not unit.stops:
            return state, []
        lost = {**dict.fromkeys(sorted(unit.working), SILENT), **unit.lost}
        unit = replace(unit, working=frozenset(), lost=lost)
    else:
        unit = _after(unit, event)
        if not isinstance(event, Done) and not state.units[index].stops:
            unit = replace(unit, stops=True)
            if unit.working:
                decisions.append(Abort(index))
    state = state._with(index, unit)
    return _settle(state, index, decisions)


def _after(unit: Unit, event: Done | StoppedEarly | Failed | Lost) -> Unit:
    unit = replace(unit, working=unit.working - {event.rank})
    if isinstance(event, Lost):
        return replace(unit, lost={**unit.lost, event.rank: event.cause})
    if isinstance(event, Failed):
        return replace(unit, failed=unit.failed | {event.rank})
    if isinstance(event, StoppedEarly):
        return replace(unit, explained=unit.explained or event.explained)
    return replace(unit, interrupted=unit.interrupted or event.interrupted)


def _settle(state: State, index: int, decisions: list[Decision]) -> tuple[State, list[Decision]]:
    """Decide what becomes of a unit of which nobody works any more."""
    unit = state.units[index]
    if unit.working:
        return state, decisions
    if unit.failed:
        return state, [*decisions, Fail(min(unit.failed))]
    if not unit.stops:
        return _done(state, unit, decisions)
    if unit.lost:
        decisions.append(Record(dict(sorted(unit.lost.items()))))
    if unit.lost or not unit.explained:
        first = index * state.unit_size
        state, given_up = counted(state, unit.lost or {first: LOST_TOUCH}, "worker")
        if given_up is not None:
            return state, [*decisions, given_up]
    decisions += [Replace(rank) for rank in sorted(unit.lost)]
    state = state._with(index, Unit())
    if not state.servers_lost:
        decisions.append(Employ(index))
        return state.employed(index), [*decisions, *(_interruption(state.employed(index)) if state.in_step else [])]
    return _restarted(state, decisions)


def _done(state: State, unit: Unit, decisions: list[Decision]) -> tuple[State, list[Decision]]:
    """Decide what comes after the work of a unit: nothing, the end, or more work for another number of workers."""
    if not state.is_idle:
        return state, decisions
    if not (state.in_step and unit.interrupted) or state.stops:
        state, departed = _departed(state)
        return state, [*decisions, *departed, *_end(state)]
    if state.moves:
        state = replace(state, moves=False).employed(0)
        return state, [*decisions, Move(), Employ(0), *_interruption(state)]
    num_workers = state.num_workers if state.change is None else state.change.num_workers
    state = replace(state, units={0: Unit()}, unit_size=num_workers, change=None).employed(0)
    return state, [*decisions, Resize(num_workers), Employ(0)]


def _end(state: State) -> list[Decision]:
    """Finish, unless it is still to be heard if those that stopped for a move had more to do."""
    return [] if state.moves and not state.in_step and not state.stops else [Finish()]


def _on_stopped(state: State, *, interrupted: bool) -> tuple[State, list[Decision]]:
    """Go on elsewhere if all have stopped for a move, which workers in step say themselves."""
    if not state.is_idle:
        return state, []
    goes_on = interrupted and state.moves and not state.stops
    state = replace(state, moves=False)
    return _restarted(state, [Move()]) if goes_on else (state, [Finish()])


def _restarted(state: State, decisions: list[Decision]) -> tuple[State, list[Decision]]:
    """Begin again from the checkpoint once all units have stopped."""
    if not state.is_idle:
        return state, decisions
    state, departed = _departed(state)
    decisions += [*departed, *_replacements(state.servers_lost)]
    state = replace(state, servers_lost=frozenset())
    state, changes = _resized(state)  # those that are added begin with the others
    decisions += changes
    for index in state.units:
        state = state.employed(index)
    return state, [*decisions, Restart(), *_interruption(state)]


def _replacements(lost: frozenset[tuple[str, int]]) -> list[ReplaceServers]:
    roles = sorted({role for role, _ in lost})
    return [ReplaceServers(role, tuple(sorted(rank for of, rank in lost if of == role))) for role in roles]


def _on_servers_lost(state: State, event: ServersLost) -> tuple[State, list[Decision]]:
    state, given_up = counted(state, event.causes, event.role)
    if given_up is not None:
        return state, [given_up]
    lost = frozenset((event.role, rank) for rank in event.causes)
    if event.replaced:
        return state, [*_replacements(lost)]
    state = replace(state, servers_lost=state.servers_lost | lost)
    for index, unit in state.units.items():
        if unit.working:
            state = state._with(index, replace(unit, stops=True, explained=True))
    return _restarted(state, [AbortAll()])


# -- what is wanted ----------------------------------------------------------------------------------------------------


def _on_stop_wanted(state: State) -> tuple[State, list[Decision]]:
    if state.stops:
        return state, []
    refused: list[Decision] = []
    if state.change is not None and not state.leaving:
        state, refused = replace(state, change=None), [Refuse(STOPPING)]
    state = replace(state, stops=True)
    return state, [*refused, *_interruption(state)]


def _on_scale_wanted(state: State, num_workers: int) -> tuple[State, list[Decision]]:
    if state.stops:
        return state, [Refuse(STOPPING)]
    grows = num_workers > state.num_workers
    state = replace(state, change=Change(num_workers, is_ready=not grows))
    return (state, [Grow(num_workers)]) if grows else _changed(state)


def _interruption(state: State) -> list[Decision]:
    """Have the workers stop if that is due, and nothing else stops them."""
    changes = state.in_step and state.change is not None and state.change.is_ready
    is_stopped = state.servers_lost or (state.in_step and any(unit.stops for unit in state.units.values()))
    return [Interrupt()] if (state.stops or state.moves or changes) and not is_stopped else []


def _changed(state: State) -> tuple[State, list[Decision]]:
    """Change the number of workers if that is due, or stop those in step for it."""
    if state.in_step:
        return state, _interruption(state)
    before = state.units
    state, decisions = _resized(state)
    added = [index for index in state.units if index not in before]
    for index in added:
        state = state.employed(index)
    decisions += [*map(Employ, added)]
    return state, [*decisions, *(_end(state) if decisions and state.is_idle else [])]


def _resized(state: State) -> tuple[State, list[Decision]]:
    """Add or remove units if that is due; those that are added have nothing to do yet."""
    change = state.change
    if change is None or not change.is_ready or state.leaving or state.servers_lost:
        return state, []
    indices = range(change.num_workers // state.unit_size)
    units = {index: state.units.get(index, Unit()) for index in indices}
    if change.num_workers > state.num_workers:
        return replace(state, units=units, change=None), [Resize(change.num_workers)]
    leaving = frozenset[int]().union(*(unit.working for index, unit in state.units.items() if index not in indices))
    state = replace(state, units=units, leaving=leaving)
    state, departed = (state, []) if leaving and not state.is_idle else _departed(state)
    return state, [Dismiss(change.num_workers), *departed]


def _on_left(state: State, rank: int) -> tuple[State, list[Decision]]:
    if rank not in state.leaving:
        return state, []
    state = replace(state, leaving=state.leaving - {rank})
    return (state, []) if state.leaving else _departed(state)


def _departed(state: State) -> tuple[State, list[Decision]]:
    """End a change to fewer workers, whatever has become of those that leave; nothing if there is none."""
    change = state.change
    if state.in_step or change is None or change.num_workers != state.num_workers:
        return state, []
    return replace(state, change=None, leaving=frozenset()), [Resize(change.num_workers)]


def counted(state: State, causes: Mapping[int, str], role: str) -> tuple[State, GiveUp | None]:
    """Count a recovery; return the decision to give up if there have been too many.

    Args:
        state: state before.
        causes: cause of each loss, by rank.
        role: role of the lost processes.
    """
    if state.restarts < state.max_restarts:
        return replace(state, restarts=state.restarts + 1), None
    return state, GiveUp(_too_many(causes, state.restarts, state.max_restarts, role))


def _too_many(causes: Mapping[int, str], restarts: int, max_restarts: int, role: str) -> str:
    rank, cause = min(causes.items())
    times = "recovery" if restarts == 1 else "recoveries"
    return (
        f"{role.replace('_', ' ').capitalize()} {rank} died ({cause}) after {restarts} {times}, and max_restarts is "
        f"{max_restarts}. "
        "Go on with --resume, and with a larger max_restarts if the machine is at fault."
    )
