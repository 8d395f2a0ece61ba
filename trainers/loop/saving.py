"""The checkpoint of a replica: what it has between two steps, handed to the writer."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from orchestray.platform.errors import ConfigError
from orchestray.trainers.core.buffer_kinds import places_of
from orchestray.trainers.core.own_saving import saved_otherwise
from orchestray.trainers.loop import own_state, sharded_state
from orchestray.trainers.loop.error_feedback import RESIDUALS
from orchestray.trainers.loop.sharded_buffers import changed_kinds, held_transient
from orchestray.trainers.saved.checkpoint_model import BUFFERS, HAS_AVERAGE

if TYPE_CHECKING:
    from torch import nn

    from orchestray.trainers.config.settings import ReplicaSettings
    from orchestray.trainers.loop.replica import Replica

_SHOWN = 5


def refuse_own_saving(model: nn.Module, settings: ReplicaSettings) -> None:
    """Refuse a model that saves its state in a way of its own, where only the tensors that it holds can be kept.

    Raises:
        ConfigError: it does, and no worker holds a whole model that all others have as well.
    """
    is_whole = settings.is_replicated and settings.exchange.get("type") != "parameter_server"
    if is_whole and settings.average is None:
        return
    if names := saved_otherwise(model):
        raise ConfigError(
            f"The model saves {', '.join(names[:_SHOWN])} in a way of its own (get_extra_state, _save_to_state_dict, a "
            "hook, or state_dict). That can be kept where every worker has the whole model: use "
            "strategy.exchange.type: allreduce with shard: none, no compression that keeps residuals, "
            "strategy.network.tensor: 1 and pipeline: 1, and no train.average."
        )


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
            model, slots = replica.state(), replica.optimizer.state_tensors()
            if model.buffers:
                state[BUFFERS] = model.buffers
            # A forward pass may change any parameter that is not trained, without a word: a codebook, by its data.
            untrained = [name for name, each in replica.model.named_parameters() if not each.requires_grad]
            changing = [*places_of(replica.model), *untrained, *model.beside]
            replica.checkpoints.save_async(step, model.tensors, slots, state, buffers=changing, resume=model.beside)
        return
    if kinds := changed_kinds(replica):
        state[BUFFERS] = kinds
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
        resume=held_transient(replica),
        consensus=replica.exchange.consensus,
    )
