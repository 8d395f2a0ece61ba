"""The request router of a model's deployment: the batcher knows which replica is free, and names it in its calls.

Serve's own router would choose by chance between replicas that have room, also one that is busy. Imports Ray, by which
it is loaded.
"""

from __future__ import annotations

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

SLOT = "slot"
"""Keyword argument of a call that names a replica, from 0: by its place among those that run."""


class SlotRouter(RequestRouter):
    """A router that sends calls with a slot to the replica of that slot; others to any."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the replicas to which a call may go, those that come first being preferred."""
        slot = None if pending_request is None else pending_request.kwargs.get(SLOT)
        if slot is None or not candidate_replicas:
            return [candidate_replicas]
        ordered = sorted(candidate_replicas, key=lambda replica: str(replica.replica_id.unique_id))
        return [[ordered[slot % len(ordered)]]]
