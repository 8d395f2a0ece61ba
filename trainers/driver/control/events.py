"""The events in a run's processes, and the wishes of users, as the controller hears of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True)
class Done:
    """A worker has done all its work, or has stopped because it was to: `interrupted` is True then."""

    rank: int
    interrupted: bool = False


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
class Stalled:
    """All workers of a unit wait for each other, with no end."""

    unit: int


@dataclass(frozen=True)
class ServersLost:
    """Servers are dead; `replaced` is True if copies have taken over."""

    causes: Mapping[int, str]
    role: str
    replaced: bool


@dataclass(frozen=True)
class StopWanted:
    """The run is to end with a checkpoint."""


@dataclass(frozen=True)
class ScaleWanted:
    """The run is to go on with another number of workers, as soon as it can; one change is made at a time."""

    num_workers: int


@dataclass(frozen=True)
class MoveWanted:
    """The run is to stop with a checkpoint and to go on, with some processes replaced by others on other nodes."""


@dataclass(frozen=True)
class Stopped:
    """Nobody works any more under parameter servers; `interrupted` is True if there is more to do."""

    interrupted: bool


@dataclass(frozen=True)
class Grown:
    """The processes of the workers that a change adds have been started."""


@dataclass(frozen=True)
class NotGrown:
    """The processes of the workers that a change adds cannot be started."""

    reason: str


@dataclass(frozen=True)
class Left:
    """A dismissed worker has stopped or is dead, or has had its time."""

    rank: int


OfUnit = Done | StoppedEarly | Failed | Lost | TimeUp | Stalled
Event = OfUnit | ServersLost | StopWanted | ScaleWanted | MoveWanted | Stopped | Grown | NotGrown | Left
