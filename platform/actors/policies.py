"""Recovery decisions as pure functions: they return what to do, and one place acts on it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Recover:
    """Decision: replace the lost members and continue."""

    ranks: tuple[int, ...]


@dataclass(frozen=True)
class GiveUp:
    """Decision: end the run as failed, for this reason."""

    reason: str


def after_loss(lost: dict[int, str], *, restarts: int, max_restarts: int, role: str = "worker") -> Recover | GiveUp:
    """Return the decision after members died.

    Args:
        lost: cause of death of each lost member, by rank.
        restarts: number of recoveries this run has already had.
        max_restarts: number of recoveries it may have.
        role: role of the lost members.
    """
    if restarts < max_restarts:
        return Recover(tuple(sorted(lost)))
    rank, cause = min(lost.items())
    times = "recovery" if restarts == 1 else "recoveries"
    return GiveUp(
        f"{role.replace('_', ' ').capitalize()} {rank} died ({cause}) after {restarts} {times}, and max_restarts is "
        f"{max_restarts}. "
        "Go on with --resume, and with a larger max_restarts if the machine is at fault."
    )
