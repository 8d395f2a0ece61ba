"""The state that a new generation of replicas goes on from: that of the farthest one, or of the newest checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestray.platform.comm import objects
from orchestray.trainers.core.members import change_of_members
from orchestray.trainers.core.model_state import ModelState
from orchestray.trainers.loop import own_state, sharded_state
from orchestray.trainers.loop.error_feedback import dropped_residuals
from orchestray.trainers.loop.position import Position

if TYPE_CHECKING:
    from collections.abc import Callable

    from orchestray.trainers.loop.checkpoint_source import Loaded
    from orchestray.trainers.loop.replica import Replica


def agree_on_state(replica: Replica, load: Callable[[], Loaded | None] | None) -> None:
    """Have replicas that each hold all of the state go on from the same one. All replicas call.

    Args:
        replica: replica of this worker, in its new generation.
        load: finds the checkpoint to resume from, or returns None; called on rank 0 if no replica has a state.
    """
    world, settings = replica.world, replica.settings
    source, steps = objects.farthest(world, replica.position.step if replica.has_state else objects.NO_STATE)
    nobody_has_state = max(steps) == objects.NO_STATE
    if nobody_has_state and load is not None and world.rank == 0 and (loaded := load()) is not None:
        replica.become(loaded.model(), loaded.optimizer(), loaded.state["position"])
        replica.warn(change_of_members(int(loaded.state.get("members", 0)), settings.num_members))
        replica.warn(dropped_residuals(loaded.state))
        replica.saved_step = replica.position.step
    if world.size > 1 and (nobody_has_state or min(steps) != max(steps)):
        _adopt(replica, source)
    replica.position.begin_attempt(settings)


def _adopt(replica: Replica, source: int) -> None:
    """Copy the state of the replica of rank `source`. All replicas call."""
    world, mine = replica.world, replica.world.rank == source
    state = replica.state() if mine else ModelState({})
    position, kinds = objects.share_json(world, [vars(replica.position), state.buffers] if mine else None, source)
    tensors = objects.share_tensors(world, state.tensors if mine else None, source)
    beside = objects.share_tensors(world, state.beside if mine else None, source)
    optimizer = objects.share_tensors(world, replica.optimizer.state_tensors() if mine else None, source)
    if not mine:
        replica.become(ModelState(tensors, beside, kinds), optimizer, position)


def load_sharded(replica: Replica, load: Callable[[], Loaded | None] | None) -> None:
    """Load this worker's pieces of the checkpoint that rank 0 finds, or start from the first step. All workers call.

    Args:
        replica: replica of this worker, in its new generation.
        load: as in `agree_on_state`.
    """
    world, settings = replica.world, replica.settings
    loaded = load() if load is not None and world.rank == 0 else None
    streams = None if loaded is None else loaded.streams()
    state = sharded_state.load(replica, streams)
    takes_own = state is not None and own_state.fits(settings, state)
    if takes_own:
        own_state.load_own_state(replica, streams)
    replica.position = Position(**state["position"]) if state is not None else Position()
    replica.position.begin_attempt(settings)
    replica.saved_step = replica.position.step
    replica.recorder.forget_after(replica.position.step)
    if state is not None and world.rank == 0:
        replica.warn(change_of_members(int(state.get("members", 0)), settings.num_members))
        if not takes_own:
            replica.warn(dropped_residuals(state))
