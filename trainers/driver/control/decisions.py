"""The decisions of the controller, which a driver carries out in order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


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


@dataclass(frozen=True)
class Interrupt:
    """Have all workers stop after a common step, with a checkpoint."""


@dataclass(frozen=True)
class Grow:
    """Start the processes that this number of workers lacks, while the others go on."""

    num_workers: int


@dataclass(frozen=True)
class Dismiss:
    """Have the workers from this rank on leave, while the others go on."""

    num_workers: int


@dataclass(frozen=True)
class Resize:
    """Take on the workers that were started, or end those that have left: the run has this number from now on."""

    num_workers: int


@dataclass(frozen=True)
class Move:
    """Have other processes on other nodes take over, now that all workers have stopped with a checkpoint."""


@dataclass(frozen=True)
class Refuse:
    """Refuse to change the number of workers."""

    reason: str


Scale = Grow | Dismiss | Resize | Refuse
Ending = Employ | Restart | Fail | GiveUp | Finish
Decision = Ending | Scale | Abort | AbortAll | Record | Replace | ReplaceServers | Interrupt | Move
