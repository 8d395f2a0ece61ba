"""The usage that the processes of a run report, and its part of the result. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from orchestray.platform.actors.gang import MemberLostError
from orchestray.trainers.driver.runlog.result import parts_of_all, reports_of_all

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from orchestray.platform.actors.gang import Gang
    from orchestray.trainers.core.outcome import Outcome

Usage = dict[str, Any]
"""Usage of a process: `rank`, `memory` in bytes, `bytes` sent, `saved_bytes` by compression, its `parts` and `reports`.

A worker also has `_WORKER_KEYS` and `read_retries`, a server with copies `replicated_bytes`, sent to them. A leaf
server also has `across_bytes` between it and the shards, and `across_dense_bytes`, had all values been sent each time.
"""
_WORKER_KEYS = ("replica", "stage", "shares", "samples", "busy_s", "waited_s", "cancelled", "left_at_step")
"""Keys of each worker's usage in the result."""


def usage_of(gang: Gang) -> list[Usage]:
    """Return the usage of each process, except of one that has just replaced a lost one and hosts nothing yet.

    Raises:
        MemberLostError: a process is lost.
    """
    answers = gang.gather([gang.control_one(rank, "usage") for rank in range(len(gang.slots))])
    return [{**usage, "rank": rank} for rank, usage in enumerate(answers) if usage is not None]


def usage_of_the_living(gang: Gang, lost: Callable[[Gang, int, str], None]) -> list[Usage]:
    """Return the usage of the living processes of a gang that is not needed any more.

    Args:
        gang: gang of the processes.
        lost: called with the gang, the rank and the cause for each lost process.
    """
    asked = [gang.control_one(rank, "usage") for rank in range(len(gang.slots))]
    found = []
    for rank, reference in enumerate(asked):
        try:
            usage = gang.gather_one(reference, rank)
        except MemberLostError as loss:
            lost(gang, rank, loss.lost[rank])
            continue
        found += [] if usage is None else [{**usage, "rank": rank}]
    return found


def add_usage(outcome: Outcome, workers: Sequence[Usage], servers: Sequence[Usage], *, bytes_reported: int) -> None:
    """Add the usage of all processes to the lead's outcome.

    Args:
        outcome: outcome, which is changed.
        workers: usage of the present and the departed workers.
        servers: usage of the servers and leaf servers.
        bytes_reported: bytes sent according to this attempt's lines. A killed process takes along its own
            count, but not these.
    """
    everybody = [*workers, *servers]
    sent = max(sum(one.get("bytes", 0) for one in everybody), bytes_reported)
    outcome.bytes_sent += sent
    outcome.bytes_dense += sent + sum(one.get("saved_bytes", 0) for one in everybody)
    outcome.memory = [one["memory"] for one in everybody]
    outcome.summary |= {"parts": parts_of_all(everybody), **reports_of_all(everybody)}
    leaves = [one for one in servers if "across_bytes" in one]
    if leaves:
        across, dense = (sum(one[key] for one in leaves) for key in ("across_bytes", "across_dense_bytes"))
        part = round(across / dense, 6) if dense else None
        outcome.summary |= {"bytes_across_groups": {"sent": across, "dense": dense, "part": part}}
    if replicated := [one["replicated_bytes"] for one in servers if "replicated_bytes" in one]:
        outcome.summary |= {"bytes_replicated": sum(replicated)}
    if num_retries := sum(one.get("read_retries", 0) for one in workers):
        outcome.summary |= {"read_retries": num_retries}
    outcome.summary |= {"workers": [{key: one[key] for key in _WORKER_KEYS if key in one} for one in workers]}
