"""The checkpoint of a replica: what it has between two steps, handed to the writer."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from orchestray.trainers.core.weights import model_tensors
from orchestray.trainers.loop import own_state, sharded_state
from orchestray.trainers.loop.error_feedback import RESIDUALS
from orchestray.trainers.saved.checkpoint_model import HAS_AVERAGE

if TYPE_CHECKING:
    from orchestray.trainers.loop.replica import Replica


def save_checkpoint(replica: Replica) -> None:
    """Save a checkpoint of the last step. All workers call if the state is sharded; rank 0 writes.

    Args:
        replica: replica of this worker, which is connected.

    Raises:
        StorageError, CheckpointError: the checkpoint before could not be written.
        PeerLostError: another worker is gone.
    """
    settings, step = replica.settings, replica.position.step
    state: dict[str, Any] = {**replica.position.state(), "num_replicas": replica.world.size}
    state["seconds"] = time.time() - replica.log.started_at
    state["lines"] = [line for line in replica.recorder.since(replica.written_step) if "event" not in line]
    if settings.num_members:
        state["members"] = settings.num_members
    if replica.average is not None:
        state[HAS_AVERAGE] = replica.average.has_begun(step)
    if settings.is_replicated:
        if replica.checkpoints is not None:
            tensors, slots = model_tensors(replica.model), replica.optimizer.state_tensors()
            buffers = [name for name, _ in replica.model.named_buffers()]
            replica.checkpoints.save_async(step, tensors, slots, state, buffers=buffers)
        return
    state["replicas"] = own_state.scheme_of(settings)
    if settings.has_residual:
        state[RESIDUALS] = state["replicas"]
    sharded_state.save(
        replica.world,
        replica.checkpoints,
        step,
        replica.exchange.held(),
        own_state.optimizer_state(replica),
        state,
        exchange=own_state.own_state(replica),
        consensus=replica.exchange.consensus,
    )
