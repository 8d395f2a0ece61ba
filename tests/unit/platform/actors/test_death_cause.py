"""Ray's errors that report a loss, and the causes that their texts give."""

from __future__ import annotations

import ray.exceptions
from ray.exceptions import RayError

from orchestray.platform.actors.death_cause import LOSSES, cause_of

OTHERS = {
    "ActorAlreadyExistsError",
    "ActorHandleNotFoundError",
    "ActorPlacementGroupRemoved",
    "ActorUnschedulableError",
    "AsyncioActorExit",
    "AuthenticationError",
    "CrossLanguageError",
    "GetTimeoutError",
    "ObjectRefStreamEndOfStreamError",
    "ObjectStoreFullError",
    "OufOfBandObjectRefSerializationException",
    "OutOfDiskError",
    "PendingCallsLimitExceeded",
    "PlasmaObjectNotAvailable",
    "RayCgraphCapacityExceeded",
    "RayChannelError",
    "RayChannelTimeoutError",
    "RayDirectTransportError",
    "RayError",
    "RaySystemError",
    "RayTaskError",
    "RpcError",
    "RuntimeEnvSetupError",
    "StreamingGeneratorReplayInconsistentError",
    "TaskCancelledError",
    "TaskPlacementGroupRemoved",
    "TaskUnschedulableError",
    "UnserializableException",
    "UserCodeException",
}
"""Errors that do not say that a process is gone."""


def test_every_error_of_ray_is_a_loss_or_is_known_to_be_none() -> None:
    errors = {
        name: kind
        for name, kind in vars(ray.exceptions).items()
        if isinstance(kind, type) and issubclass(kind, RayError)
    }
    assert {name for name, kind in errors.items() if not issubclass(kind, LOSSES)} == OTHERS


def test_a_worker_that_ray_killed_for_memory_says_so_with_the_amounts() -> None:
    text = (
        "Task was killed due to the node running low on memory.\n"
        "Memory on the node (IP: 10.0.0.1, ID: ab) where the task (actor ID: cd, name=train, pid=7, memory used=3.31GB)"
        " was running was 22.60GB / 23.49GB (0.962), which exceeds the memory usage threshold of 0.95."
    )
    assert cause_of(RuntimeError(text)) == (
        "its machine ran out of memory (22.60 of 23.49 GB used, 3.31 GB of them by this process), and Ray killed it"
    )
