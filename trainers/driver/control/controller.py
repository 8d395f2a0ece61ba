"""The decisions of a run's driver, as a pure function of what happened: `step(state, event) -> state, decisions`.

Workers that train in step with each other are a unit: what ends one of them ends the work of all, and they begin
again together. Under a lock-step scheme all workers are one unit. Under parameter servers each replica is one, and
the others go on meanwhile. The driver turns what Ray reports into events, and carries the decisions out in order.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

SILENT = "it did not answer after another worker was lost"
"""Cause of a loss of a worker that stays silent."""
LOST_TOUCH = "the workers lost touch with each other"

# -- events ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Done:
    """A worker has done all its work."""

    rank: int


@dataclass(frozen=True)
class StoppedEarly:
    """A worker has stopped because it lost touch.

    `explained` is True if what it lost touch with is known to be dead, and handled as a loss of its own.
    """

    rank: int
    explained: bool


@dataclass(frozen=True)
class Failed:
    """A worker reports an error of the user's code or of ours, which would come again."""

    rank: int


@dataclass(frozen=True)
class Lost:
    """A worker's process is dead."""

    rank: int
    cause: str


@dataclass(frozen=True)
class TimeUp:
    """The workers of a unit that is to stop have had their time."""

    unit: int


@dataclass(frozen=True)
class ServersLost:
    """Servers are dead; `replaced` is True if copies have taken over."""

    causes: Mapping[int, str]
    role: str
    replaced: bool


Event = Done | StoppedEarly | Failed | Lost | TimeUp | ServersLost

# -- decisions ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Abort:
    """Have the workers of a unit stop what they wait for, and answer."""

    unit: int


@dataclass(frozen=True)
class AbortAll:
    """Have all workers and servers stop what they wait for, and answer."""


@dataclass(frozen=True)
class Record:
    """Record the losses of workers that led to what follows."""

    causes: Mapping[int, str]


@dataclass(frozen=True)
class Replace:
    """Start another process for the rank of a lost worker."""

    rank: int


@dataclass(frozen=True)
class ReplaceServers:
    """Start other processes for the ranks of lost servers."""

    role: str
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Employ:
    """Set the workers of a unit to work."""

    unit: int


@dataclass(frozen=True)
class Restart:
    """Have the servers begin again from the newest checkpoint, and set all units to work."""


@dataclass(frozen=True)
class Fail:
    """End the run with the error that this worker reported."""

    rank: int


@dataclass(frozen=True)
class GiveUp:
    """End the run as failed, for this reason."""

    reason: str


@dataclass(frozen=True)
class Finish:
    """All work is done."""


Decision = Abort | AbortAll | Record | Replace | ReplaceServers | Employ | Restart | Fail | GiveUp | Finish

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


@dataclass(frozen=True)
class State:
    """The state of a run's processes, as the controller knows it."""

    units: Mapping[int, Unit]
    """Units by index; a worker's unit is rank // `unit_size`."""
    unit_size: int
    max_restarts: int
    restarts: int = 0
    servers_lost: frozenset[tuple[str, int]] = frozenset()
    """Roles and ranks of lost servers that are replaced once all units have stopped."""

    @classmethod
    def of(cls, num_workers: int, unit_size: int, *, max_restarts: int, restarts: int = 0) -> State:
        """Return the state before anybody works.

        Args:
            num_workers: number of workers.
            unit_size: number of workers of a unit, whose ranks follow each other.
            max_restarts: number of recoveries that the run may have.
            restarts: number of recoveries that it has had.
        """
        return cls({unit: Unit() for unit in range(num_workers // unit_size)}, unit_size, max_restarts, restarts)

    def employed(self, unit: int) -> State:
        """Return the state once all workers of a unit have been set to work."""
        ranks = range(unit * self.unit_size, (unit + 1) * self.unit_size)
        return self._with(unit, Unit(working=frozenset(ranks)))

    def without(self, unit: int) -> State:
        """Return the state without a unit that has left the run."""
        return replace(self, units={index: one for index, one in self.units.items() if index != unit})

    @property
    def is_idle(self) -> bool:
        """True if nobody works."""
        return not any(unit.working for unit in self.units.values())

    def _with(self, index: int, unit: Unit) -> State:
        return replace(self, units={**self.units, index: unit})


def step(state: State, event: Event) -> tuple[State, list[Decision]]:
    """Return the state after an event, and the decisions, to be carried out in order."""
    if isinstance(event, ServersLost):
        return _on_servers_lost(state, event)
    index = event.unit if isinstance(event, TimeUp) else event.rank // state.unit_size
    unit = state.units.get(index)
    if unit is None:
        return state, []
    decisions: list[Decision] = []
    if isinstance(event, TimeUp):
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
    return unit


def _settle(state: State, index: int, decisions: list[Decision]) -> tuple[State, list[Decision]]:
    """Decide what becomes of a unit of which nobody works any more."""
    unit = state.units[index]
    if unit.working:
        return state, decisions
    if unit.failed:
        return state, [*decisions, Fail(min(unit.failed))]
    if not unit.stops:
        return state, [*decisions, *([Finish()] if state.is_idle else [])]
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
        return state.employed(index), [*decisions, Employ(index)]
    return _restarted(state, decisions)


def _restarted(state: State, decisions: list[Decision]) -> tuple[State, list[Decision]]:
    """Begin again from the checkpoint once all units have stopped."""
    if not state.is_idle:
        return state, decisions
    decisions += [*_replacements(state.servers_lost), Restart()]
    state = replace(state, servers_lost=frozenset())
    for index in state.units:
        state = state.employed(index)
    return state, decisions


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
