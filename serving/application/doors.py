"""The addresses at which replicas take batches: each writes its own to the cluster's key-value store.

An ingress reads them there. To ask replicas by a handle of Ray Serve would take it seconds where a machine is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Container
from dataclasses import asdict, dataclass

from orchestray.platform.cluster import key_values

_WRITE_EVERY_S = 1.0


@dataclass(frozen=True)
class Door:
    """The place where a replica takes batches.

    Args:
        place: result of `doors_of` for its deployment.
        replica: id of the replica.
        host, port: address at which it listens.
        key: secret that both sides of a connection have, as hexadecimal digits.
        node: id of the replica's node in the cluster; empty: a replica of an earlier version does not say.
        pid: its process there; 0: as above.
    """

    place: str
    replica: str
    host: str
    port: int
    key: str
    node: str = ""
    pid: int = 0


def doors_of(application: str, deployment: str) -> str:
    """Return the begin of the names of a deployment's doors in the store."""
    return f"orchestray-door/{application}/{deployment}/"


async def announce(door: Door) -> None:
    """Keep a door in the store, until cancelled: an ingress that could not reach it for a moment has removed it."""
    try:
        while True:
            with contextlib.suppress(Exception):  # the cluster's head is being restarted
                await asyncio.to_thread(write, door)
            await asyncio.sleep(_WRITE_EVERY_S)
    finally:
        await asyncio.to_thread(remove, door)


def write(door: Door) -> None:
    """Write a door to the store."""
    key_values.put(door.place + door.replica, asdict(door))


def remove(door: Door) -> None:
    """Remove a door from the store, if that can be reached."""
    with contextlib.suppress(Exception):  # the cluster may be gone already
        key_values.delete(door.place + door.replica)


def new_doors(place: str, known: Container[str]) -> list[Door]:
    """Return the doors of a deployment, without those of replicas that are known."""
    written = [key_values.get(key) for key in key_values.keys(place) if key.removeprefix(place) not in known]
    return [Door(**each) for each in written if each is not None]
