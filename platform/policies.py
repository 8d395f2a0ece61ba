"""Decisions as pure functions: they return what to do; one place acts on it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Recover:
    """Replace the lost members and go on."""

    ranks: tuple[int, ...]


@dataclass(frozen=True)
class GiveUp:
    """End the run as failed, for this reason."""

    reason: str


def after_loss(lost: dict[int, str], *, restarts: int, max_restarts: int, role: str = "worker") -> Recover | GiveUp:
    """What to do when members died.

    Args:
        lost: why each lost rank died, by rank.
        restarts: recoveries this run has already had.
        max_restarts: how many it may have.
        role: of the lost ones.
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
