"""What the processes of a run say they have used, and what the result says of it. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from orchestray.platform.gang.gang import MemberLostError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from orchestray.platform.gang.gang import Gang
    from orchestray.trainers.replica.outcome import Outcome

Usage = dict[str, Any]
"""Of a process: `rank`, `memory` in bytes, `bytes` sent, `saved_bytes` by compression; of a worker also `_TOLD`; of a
leaf server `across_bytes` between it and the shards, and `across_dense_bytes`, had all values been sent each time.
"""
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


def add_usage(outcome: Outcome, workers: Sequence[Usage], servers: Sequence[Usage], *, bytes_told: int) -> None:
    """Have the outcome, which knows what the lead does, tell of all processes.

    Args:
        outcome: is changed.
        workers: what those there are have used.
        servers: what these have.
        bytes_told: what this attempt's lines say was sent. A killed process takes its own count along, but not these.
    """
    everybody = [*workers, *servers]
    sent = max(sum(one.get("bytes", 0) for one in everybody), bytes_told)
    outcome.bytes_sent += sent
    outcome.bytes_dense += sent + sum(one.get("saved_bytes", 0) for one in everybody)
    outcome.memory = [one["memory"] for one in everybody]
    leaves = [one for one in servers if "across_bytes" in one]
    if leaves:
        across, dense = (sum(one[key] for one in leaves) for key in ("across_bytes", "across_dense_bytes"))
        outcome.told |= {"bytes_across_groups": {"sent": across, "dense": dense}}
    outcome.told |= {"workers": [{key: one[key] for key in _TOLD if key in one} for one in workers]}
