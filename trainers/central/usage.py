"""What the processes of a run say they have used, and what the result says of it. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from orchestray.platform.gang import MemberLostError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from orchestray.platform.gang import Gang
    from orchestray.trainers.outcome import Outcome

Usage = dict[str, Any]
"""Of a process: `rank`, `memory` in bytes, `bytes` sent, `saved_bytes` by compression; of a worker also `_TOLD`."""
_TOLD = ("replica", "stage", "shares", "samples", "busy_s", "waited_s", "left_at_step")
"""What the result says of each worker."""


def usage_of(gang: Gang) -> list[Usage]:
    """What each process has used; left out is one that has just taken a lost one's place, and hosts nothing yet.

    Raises:
        MemberLostError: a process is lost.
    """
    answers = gang.gather([gang.control_one(rank, "usage") for rank in range(len(gang.seats))])
    return [{**usage, "rank": rank} for rank, usage in enumerate(answers) if usage is not None]


def usage_of_the_living(gang: Gang, lost: Callable[[Gang, int, str], None]) -> list[Usage]:
    """As `usage_of`, of a gang that nobody needs any more: who is lost is left out, and `lost` is called with the rank
    and the cause.
    """
    asked = [gang.control_one(rank, "usage") for rank in range(len(gang.seats))]
    found = []
    for rank, reference in enumerate(asked):
        try:
            usage = gang.gather_one(reference, rank)
        except MemberLostError as loss:
            lost(gang, rank, loss.lost[rank])
            continue
        found += [] if usage is None else [{**usage, "rank": rank}]
    return found


def add_usage(outcome: Outcome, workers: Sequence[Usage], servers: Sequence[Usage]) -> None:
    """Have the outcome, which knows what the lead does, tell of all processes."""
    everybody = [*workers, *servers]
    sent = sum(one.get("bytes", 0) for one in everybody)
    outcome.bytes_sent += sent
    outcome.bytes_dense += sent + sum(one.get("saved_bytes", 0) for one in everybody)
    outcome.memory = [one["memory"] for one in everybody]
    outcome.told |= {"workers": [{key: one[key] for key in _TOLD if key in one} for one in workers]}
